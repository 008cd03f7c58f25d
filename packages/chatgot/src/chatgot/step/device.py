"""The device of a run: its name, its peak FLOP/s and memory, and the transfer of batches to it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from chatgot.model.config import ModelConfig
from tensorkeep.errors import OutOfMemoryError, UsageError, first_line
from tensorkeep.ext import machine


def chosen_device(name: str) -> torch.device:
    """Return the device of a name; ``"auto"`` is the GPU if there is one. UsageError if torch cannot use it here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # Tensors on torch's "meta" device have no values to read back.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        # Some messages are pages long.
        reason = first_line(error).partition(". ")[0]
        raise UsageError(
            f"the device {name!r} cannot be used: {reason}", remedy='give "auto", "cpu" or "cuda"'
        ) from error
    return device


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(machine.processor()["model"])


def numerics_environment(device: torch.device) -> dict[str, Any]:
    """Return the properties that exact results depend on besides configuration and data: torch, device, threads."""
    name = f"{device.type} ({device_name(device)})"
    return {"torch": str(torch.__version__), "device": name, "threads": torch.get_num_threads()}


class BatchTransfer:
    """Copies batches to a device while it computes: to a GPU from pinned memory, on a second stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        if self._stream is None:
            return [each.to(self._device) for each in tensors]
        # The CPU runs ahead: it copies the batches of a step while the GPU computes the step before.
        with torch.cuda.stream(self._stream):
            moved = [each.pin_memory().to(self._device, non_blocking=True) for each in tensors]
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for each in moved:
            # The memory belongs to the copy stream, which must not reuse it before the current stream is done.
            each.record_stream(current)
        return moved


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: by tensors on a GPU, or by the whole process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else machine.peak_resident_bytes()


@contextmanager
def memory_errors_reported(config: ModelConfig) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OverflowError, TypeError) as error:
        raise OutOfMemoryError(
            f"there is not enough memory for a model of {config.parameter_count():,} parameters: {first_line(error)}",
            remedy="use a smaller model (--model.d_model, --model.n_layers)",
        ) from error


_SIZES = (512, 1024, 2048, 4096, 8192)
# How long each matrix size is measured.
_SECONDS = 0.1
# Once a matmul takes this many seconds, larger ones are not tried: on such a slow CPU they are not faster.
_MAX_SECONDS = 0.02
_TERA = 1e12
# Dense bfloat16 TFLOP/s by the words of a device's name: what others report MFU against.
_DATA_SHEETS: dict[str, float] = {
    # NVIDIA's data sheets; half of a figure that is for sparse matrices only.
    "B200": 2250,
    "H200": 989,
    "H200 NVL": 835,
    "H100": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "GH200": 989,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX A6000": 154.8,
    # White papers of the architectures: with sums in float32, as torch computes.
    "RTX 5090": 209.5,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71,
    # AMD's data sheets.
    "MI300X": 1307,
    "MI250X": 383,
}
# Words in the name of another card, with another peak.
_OTHER_CARDS = {"Ti", "SUPER", "D", "Laptop", "MIG", "Max-Q"}


def measured_peak(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the FLOP/s of the fastest square matmul that this machine reaches."""
    # Measured, because data sheets do not include power limits, clock rates or the cores that a process may use.
    best = 0.0
    # A generator of its own: how many numbers it draws depends on the speed of the machine.
    generator = torch.Generator(device).manual_seed(0)
    for size in _SIZES:
        factors = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
        seconds = _fastest_matmul(*factors)
        best = max(best, 2.0 * size**3 / seconds)
        if seconds > _MAX_SECONDS:
            break
    if device.type == "cuda":
        # The memory of the matrices must not count as memory of the training.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _fastest_matmul(left: torch.Tensor, right: torch.Tensor) -> float:
    found: list[float] = []
    # The first call loads kernels.
    while len(found) < 2 or sum(found[1:]) < _SECONDS:
        begin = time.perf_counter()
        torch.mm(left, right)
        if left.is_cuda:
            torch.cuda.synchronize(left.device)
        found.append(time.perf_counter() - begin)
    # The minimum: other work on the machine can only add time.
    return min(found)


def data_sheet_peak(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device in its data sheet, by the name that torch gives; None if unknown."""
    # Some names join their words by hyphens, such as A100-SXM4-80GB.
    words = set(name.split()) | set(name.replace("-", " ").split())
    if words & _OTHER_CARDS:
        return None
    known = [card for card in _DATA_SHEETS if words.issuperset(card.split())]
    # The most specific name: an H100 PCIe has another peak than an H100.
    return _DATA_SHEETS[max(known, key=lambda card: len(card.split()))] * _TERA if known else None
