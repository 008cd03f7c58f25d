"""Seconds by activity, and speed: tokens per second, and MFU against a measured peak.

MFU (model FLOP utilisation; Chowdhery et al., arXiv 2204.02311) is the rate of the model's floating-point operations as
a fraction of the fastest rate that the machine reaches.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_SIZES = (512, 1024, 2048, 4096, 8192)
_SECONDS = 0.1
"""How long each matrix size is measured."""
_MAX_SECONDS = 0.02
"""Once a matmul takes this many seconds, larger ones are not tried: on such a slow CPU they are not faster."""


_TERA = 1e12

_DATA_SHEETS: dict[str, float] = {
    # NVIDIA's data sheets; where they give a figure with sparsity only, half of it.
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
"""Dense bfloat16 TFLOP/s by the words of a device's name: what others report MFU against."""

_OTHER_CARDS = {"Ti", "SUPER", "D", "Laptop", "MIG", "Max-Q"}
"""Words that make a name that of another card, with another peak."""


def measured_peak(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the FLOP/s of the fastest square matmul that this machine reaches.

    It is measured, because data sheets do not include power limits, clock rates or the cores that a process may use.
    """
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
        # The memory of these matrices must not count as memory of the training.
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
    return min(found)


def data_sheet_peak(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device in its data sheet, by the name that torch gives; None if unknown.

    Examples
    --------
    >>> data_sheet_peak("NVIDIA H100 80GB HBM3"), data_sheet_peak("NVIDIA H100 PCIe")
    (989000000000000.0, 756000000000000.0)
    >>> data_sheet_peak("NVIDIA GeForce RTX 4090 D") is None
    True
    """
    words = set(name.split()) | set(name.replace("-", " ").split())
    if words & _OTHER_CARDS:
        return None
    known = [card for card in _DATA_SHEETS if words.issuperset(card.split())]
    return _DATA_SHEETS[max(known, key=lambda card: len(card.split()))] * _TERA if known else None


class Clock:
    """Adds up seconds by activity: ``"train"``, ``"evaluate"``, ``"checkpoint"``, ``"sample"``, ``"first step"``."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def spent_on(self, activity: str) -> Iterator[None]:
        """Add the duration of the block to an activity. Blocks must not be nested."""
        begin = self._now()
        try:
            yield
        finally:
            self.seconds[activity] = self.seconds.get(activity, 0.0) + self._now() - begin


class Speedometer:
    """Counts the tokens of training, their floating-point operations and the seconds they took.

    The peak, in FLOP/s, is that of `measured_peak`; ``data_sheet`` is that of `data_sheet_peak`, if it is known.
    """

    def __init__(self, peak: float, data_sheet: float | None = None) -> None:
        self.peak = peak
        self.data_sheet = data_sheet
        self.tokens = 0
        self.flops = 0
        self.seconds = 0.0
        self._lap_start = (0, 0, 0.0)

    def add(self, tokens: int, flops: int, seconds: float) -> None:
        """Count one training step. Evaluation, samples and checkpoints do not count."""
        self.tokens += tokens
        self.flops += flops
        self.seconds += seconds

    def lap(self) -> dict[str, float]:
        """Return ``tokens_per_second`` and ``mfu`` since the last lap; an empty dict if no step was counted.

        On a known card also ``mfu_of_data_sheet``, as others report it.
        """
        now = (self.tokens, self.flops, self.seconds)
        tokens, flops, seconds = (after - before for after, before in zip(now, self._lap_start, strict=True))
        self._lap_start = now
        return self._rates(int(tokens), int(flops), seconds)

    def total(self) -> dict[str, float]:
        """Return the same rates of all counted steps; empty without counted steps."""
        return self._rates(self.tokens, self.flops, self.seconds)

    def _rates(self, tokens: int, flops: int, seconds: float) -> dict[str, float]:
        if not seconds:
            return {}
        # The peak is at least the rate reached in training; on a busy machine it may be measured too low.
        self.peak = max(self.peak, flops / seconds)
        rates = {"tokens_per_second": tokens / seconds, "mfu": flops / seconds / self.peak}
        if self.data_sheet is not None:
            rates["mfu_of_data_sheet"] = flops / seconds / self.data_sheet
        return rates


class SlowdownDetector:
    """Notices when training has become five times slower than it was before.

    Rates are those of windows, of at least 10 steps and 5 seconds of training, compared with the median of all windows
    before. Rates are of floating-point operations, because techniques may change the length of sequences.
    """

    STEPS = 10
    SECONDS = 5.0
    LEAST_BEFORE = 3
    """Windows that must have passed before one can be slow."""
    RATIO = 5.0

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._steps = 0
        self._flops = 0
        self._seconds = 0.0
        self._reported = False

    def add(self, flops: int, seconds: float, *, steps: int = 1) -> float | None:
        """Add a step, or with 0 steps the time that a GPU still took for earlier ones.

        Returns how many times slower training has become, once, at the end of the first slow window.
        """
        self._steps, self._flops, self._seconds = self._steps + steps, self._flops + flops, self._seconds + seconds
        if self._reported or self._steps < self.STEPS or self._seconds < self.SECONDS:
            return None
        rate = self._flops / self._seconds
        earlier = statistics.median(self._rates) if len(self._rates) >= self.LEAST_BEFORE else 0.0
        self._rates.append(rate)
        self._steps, self._flops, self._seconds = 0, 0, 0.0
        self._reported = rate * self.RATIO <= earlier
        return earlier / rate if self._reported else None
