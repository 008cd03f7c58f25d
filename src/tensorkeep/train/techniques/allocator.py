"""The CUDA allocator's settings, which torch reads from the environment when it starts, and at no later time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second one is the older name, which torch reads where the first one is not set."""

_MIB = 2**20


class AllocatorSettings(Section, frozen=True):
    """What the environment must say.

    Attributes
    ----------
    expandable_segments : bool
        Memory is mapped behind what is there instead of taken in pieces of fixed size, between which gaps remain.
    max_split_size_mb : int, optional
        Larger blocks, of so many MiB, are not split; torch takes 20 at least.
    garbage_collection_threshold : float, optional
        The share of the memory above which blocks that are not used go back to the driver.
    """

    expandable_segments: bool = True
    max_split_size_mb: int | None = None
    garbage_collection_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.max_split_size_mb is not None:
            check_bounds("max_split_size_mb", self.max_split_size_mb, least=21)
        if self.garbage_collection_threshold is not None:
            check_bounds("garbage_collection_threshold", self.garbage_collection_threshold, above=0, below=1)


class Allocator(Technique):
    """Fewer gaps between blocks: the bytes reserved come closer to the bytes allocated."""

    name: ClassVar = "allocator"
    kind: ClassVar = "systems"
    changes: ClassVar = "process"
    summary: ClassVar = "holds the CUDA allocator to its settings, most of all to segments that grow"
    effect: ClassVar = "less memory reserved beyond what tensors take, where their sizes vary; no difference in speed"
    reference: ClassVar = "docs.pytorch.org/docs/stable/notes/cuda.html, PYTORCH_ALLOC_CONF"
    Settings: ClassVar = AllocatorSettings

    def lacks(self, machine: Machine) -> str | None:
        """Say that CUDA is missing, or which environment is: torch has read it before this can be known."""
        if sys.platform == "win32":
            return "needs Linux: on Windows the driver has no segments that grow"
        wanted, given = self._wanted(), _read(os.environ)
        unset = any(given.get(name) != value for name, value in wanted.items())
        line = ",".join(f"{name}:{value}" for name, value in {**given, **wanted}.items())
        late = f"needs {_VARIABLES[0]}={line} in the environment from the start: put that before the command"
        return machine.lacks_cuda() or (late if unset else None)

    def _wanted(self) -> dict[str, str]:
        """Return the settings as the environment spells them."""
        settings = {name: getattr(self.settings, name) for name in self.settings.__struct_fields__}
        return {name: str(value) for name, value in settings.items() if value is not None}

    def apply(self, run: Run) -> None:
        """Do nothing: torch has read the environment."""

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Read back what the allocator goes by, and how the memory of the step lies."""
        proof = Proof()
        yield proof
        snapshot = torch.cuda.memory._snapshot(run.device)
        found, wanted = snapshot["allocator_settings"], self._expected()
        for name, value in wanted.items():
            if found[name] != value:
                raise self.not_active(
                    f"the allocator goes by {name}={found[name]} instead of {value}",
                    "set the environment before Python starts: torch had read it when it changed",
                )
        device = torch.cuda.current_device() if run.device.index is None else run.device.index
        segments = [each for each in snapshot["segments"] if each["device"] == device]
        growing = sum(each["is_expandable"] for each in segments)
        if self.settings.expandable_segments and growing < len(segments):
            raise self.not_active(
                f"{len(segments) - growing} of {len(segments)} segments cannot grow",
                "leave it out: the driver or the platform does not have them",
            )
        reserved, allocated = torch.cuda.memory_reserved(run.device), torch.cuda.memory_allocated(run.device)
        proof.is_that(
            f"{growing} of {len(segments)} segments grow; {(reserved - allocated) / _MIB:,.0f} MiB are reserved "
            f"beyond the {allocated / _MIB:,.0f} MiB of tensors",
            growing=growing,
            segments=len(segments),
            reserved_bytes=reserved,
            allocated_bytes=allocated,
        )

    def _expected(self) -> dict[str, Any]:
        """Return the settings as a snapshot has them."""
        settings = self.settings
        expected: dict[str, Any] = {"expandable_segments": settings.expandable_segments}
        if settings.max_split_size_mb is not None:
            expected["max_split_size"] = settings.max_split_size_mb * _MIB
        if settings.garbage_collection_threshold is not None:
            expected["garbage_collection_threshold"] = settings.garbage_collection_threshold
        return expected


def _read(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that an environment has for the allocator, as texts."""
    line = next((environment[name] for name in _VARIABLES if environment.get(name)), "")
    parts = (part.partition(":") for part in line.split(","))
    return {name.strip(): value.strip() for name, _, value in parts if name.strip()}
