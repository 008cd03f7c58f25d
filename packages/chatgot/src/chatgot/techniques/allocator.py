"""Settings of the CUDA allocator, which torch reads from the environment once, when it starts."""

import os
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta

from chatgot.settings import Fraction
from chatgot.techniques.base import Machine, Proof, Section, StepState, Technique, Verification

# torch reads the second variable, an older name, if the first is not set.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_MIB = 2**20


class AllocatorSettings(Section, frozen=True):
    """The allocator settings that the environment must have."""

    # Map memory at the end of existing segments instead of allocating segments of fixed size, which leaves gaps.
    expandable_segments: bool = True
    # Blocks above this size, in MiB, are not split; more than 20.
    max_split_size_mb: Annotated[int, Meta(ge=21)] | None = None
    # The fraction of the memory above which unused blocks are returned to the driver.
    garbage_collection_threshold: Fraction | None = None


class Allocator(Technique):
    name: ClassVar = "allocator"
    aliases: ClassVar = (
        "memory-optimization",
        "memory-optimization-settings",
        "cuda-alloc-conf",
        "pytorch-cuda-alloc-conf",
        "pytorch-alloc-conf",
    )
    changes: ClassVar = "process"
    summary: ClassVar = "verifies the settings of the CUDA allocator, above all expandable segments"
    effect: ClassVar = "less fragmentation when tensor sizes vary; no difference in speed"
    reference: ClassVar = "docs.pytorch.org/docs/stable/notes/cuda.html, PYTORCH_ALLOC_CONF"
    settings: AllocatorSettings

    def missing(self, machine: Machine) -> str | None:
        # torch read the environment when it started, so only the command line can set it.
        requested = {name: str(value) for name, value in self._requested().items()}
        variable = next((os.environ[name] for name in _VARIABLES if os.environ.get(name)), "")
        parts = (part.partition(":") for part in variable.split(","))
        given = {name.strip(): value.strip() for name, _, value in parts if name.strip()}
        unset = any(given.get(name) != value for name, value in requested.items())
        # Keep what the user has set: the variable is one string, which a new value replaces completely.
        line = ",".join(f"{name}:{value}" for name, value in {**given, **requested}.items())
        late = f"needs {_VARIABLES[0]}={line} in the environment from the start: put that before the command"
        return machine.missing_cuda() or (late if unset else None)

    def _requested(self) -> dict[str, Any]:
        return {name: value for name, value in msgspec.structs.asdict(self.settings).items() if value is not None}

    def verify(self, run: StepState) -> Verification:
        yield
        snapshot = torch.cuda.memory._snapshot(run.device)
        found = snapshot["allocator_settings"]
        requested = self._requested()
        # The snapshot reports bytes, under another name.
        if "max_split_size_mb" in requested:
            requested["max_split_size"] = requested.pop("max_split_size_mb") * _MIB
        for name, value in requested.items():
            if found[name] != value:
                raise self.not_active(
                    f"the allocator has {name}={found[name]} instead of {value}",
                    "set the environment before Python starts: torch had read it before it changed",
                )
        # The snapshot has the segments of all devices.
        device = torch.cuda.current_device() if run.device.index is None else run.device.index
        segments = [each for each in snapshot["segments"] if each["device"] == device]
        expandable = sum(each["is_expandable"] for each in segments)
        if self.settings.expandable_segments and expandable < len(segments):
            raise self.not_active(
                f"{len(segments) - expandable} of {len(segments)} segments are not expandable",
                "leave it out: the driver or the platform does not support them",
            )
        reserved, allocated = torch.cuda.memory_reserved(run.device), torch.cuda.memory_allocated(run.device)
        return Proof(
            f"{expandable} of {len(segments)} segments are expandable; {(reserved - allocated) / _MIB:,.0f} MiB are "
            f"reserved beyond the {allocated / _MIB:,.0f} MiB of tensors",
            growing=expandable,
            segments=len(segments),
            reserved_bytes=reserved,
            allocated_bytes=allocated,
        )
