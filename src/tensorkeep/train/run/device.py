"""The device of a run, batches on it, its memory, and the machine properties that exact results depend on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tensorkeep import machine
from tensorkeep.errors import OutOfMemoryError, UsageError, first_line
from tensorkeep.train.model.config import ModelConfig


def chosen_device(name: str) -> torch.device:
    """Return the device of a name; ``"auto"`` is the GPU if there is one, else the CPU.

    Raises UsageError if torch cannot compute on such a device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Tensors on torch's "meta" device have no values to read back.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # Some of these messages are pages long.
        reason = first_line(error).partition(". ")[0]
        raise UsageError(
            f"the device {name!r} cannot be used: {reason}", remedy='give "auto", "cpu" or "cuda"'
        ) from error
    return device


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(machine.processor()["model"])


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return the properties that exact results depend on besides configuration and data: torch, device, threads."""
    model = device_name(device)
    return {
        "torch": str(torch.__version__),
        "device": f"{device.type} ({model})",
        "threads": torch.get_num_threads(),
    }


class Mover:
    """Copies batches to a device while it computes.

    On a GPU, from pinned memory and on a stream of its own: as the CPU runs ahead of the GPU, the batches of a step are
    drawn and copied while the GPU computes the step before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors of the CPU on the device, for use on its current stream."""
        if self._stream is None:
            return [each.to(self._device) for each in tensors]
        with torch.cuda.stream(self._stream):
            moved = [each.pin_memory().to(self._device, non_blocking=True) for each in tensors]
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in moved:
            # Its memory belongs to the other stream, which must not reuse it before the current one is done.
            each.record_stream(current)
        return moved


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: on a GPU those of its tensors, on a CPU those of the whole process."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_resident_bytes()


@contextmanager
def memory_errors_reported(config: ModelConfig) -> Iterator[None]:
    """Raise what torch raises when it cannot allocate a model as OutOfMemoryError."""
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        raise OutOfMemoryError(
            f"there is not enough memory for a model of {config.parameter_count():,} parameters: {first_line(error)}",
            remedy="use a smaller model (--model.d_model, --model.n_layers)",
        ) from error
