"""How fast training is: tokens per second, and the share of the machine's measured peak that its FLOPs make."""

from __future__ import annotations

import time

import torch

_SIZES = (512, 1024, 2048, 4096, 8192)
_SECONDS = 0.1
"""How long each size is measured."""
_LONG = 0.02
"""Seconds of a product with which sizes stop growing: a CPU, which comes so far, is no faster in larger ones."""


def measured_peak(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Return the FLOP/s of the fastest square matrix product that this machine is seen to make.

    Measured, because data sheets know nothing of power limits, of clocks, or of how many cores a process may use.

    Parameters
    ----------
    device : torch.device
    dtype : torch.dtype
        Of the factors.
    """
    best = 0.0
    # One of its own: how many numbers are drawn depends on how fast the machine is.
    generator = torch.Generator(device).manual_seed(0)
    for size in _SIZES:
        factors = (torch.randn(size, size, generator=generator, device=device, dtype=dtype) for _ in range(2))
        seconds = _fastest_product(*factors)
        best = max(best, 2.0 * size**3 / seconds)
        if seconds > _LONG:
            break
    if device.type == "cuda":
        # What these matrices took is no part of what training takes.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _fastest_product(left: torch.Tensor, right: torch.Tensor) -> float:
    def product() -> float:
        begin = time.perf_counter()
        torch.mm(left, right)
        if left.is_cuda:
            torch.cuda.synchronize(left.device)
        return time.perf_counter() - begin

    product()  # loads kernels
    found = [product()]
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        found.append(product())
    return min(found)


class Speedometer:
    """Counts the tokens of training, their floating-point operations and the seconds they took.

    Parameters
    ----------
    peak : float
        FLOP/s of the machine, as `measured_peak` found them.
    """

    def __init__(self, peak: float) -> None:
        self.peak = peak
        self.tokens = 0
        self.flops = 0
        self.seconds = 0.0
        self._since = (0, 0, 0.0)

    def add(self, tokens: int, flops: int, seconds: float) -> None:
        """Count a step; nothing else that a run does."""
        self.tokens += tokens
        self.flops += flops
        self.seconds += seconds

    def lap(self) -> dict[str, float]:
        """Return tokens per second and MFU since the last lap."""
        now = (self.tokens, self.flops, self.seconds)
        tokens, flops, seconds = (after - before for after, before in zip(now, self._since, strict=True))
        self._since = now
        return self._rates(int(tokens), int(flops), seconds)

    def total(self) -> dict[str, float]:
        """Return tokens per second and MFU of all that was counted."""
        return self._rates(self.tokens, self.flops, self.seconds)

    def _rates(self, tokens: int, flops: int, seconds: float) -> dict[str, float]:
        if not seconds:
            return {}
        # What is reached is possible: a peak that was measured too low, on a busy machine, is raised.
        self.peak = max(self.peak, flops / seconds)
        return {"tokens_per_second": tokens / seconds, "mfu": flops / seconds / self.peak}
