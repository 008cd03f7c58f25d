"""TF32: matrix products of float32 factors, of which the chip takes the leading bits only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tensorkeep.train.config.sections import Section
from tensorkeep.train.run.speed import measured_peak
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine
from tensorkeep.train.techniques.watching import seen_outputs

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_LEVELS = {"tf32": "high", "bf16": "medium"}
_SIZE = 256
_SHORTENED = 1e-5
"""A product of float32 factors is within 1e-6 of the exact one; of 10 bits of mantissa it is off by 3e-4."""


class Tf32Settings(Section, frozen=True):
    """How much of a factor is taken.

    Attributes
    ----------
    precision : str
        ``"tf32"``: 10 bits of mantissa, on GPUs of compute capability 8.0 or later; ``"bf16"``: 7 bits, on CPUs that
        have products of that kind and torch uses them for float32 (AMX).
    """

    precision: Literal["tf32", "bf16"] = "tf32"


class Tf32(Technique):
    """Results, sums, weights and all that is no matrix product stay in float32."""

    name: ClassVar = "tf32"
    kind: ClassVar = "systems"
    changes: ClassVar = "process"
    tolerance: ClassVar = 0.02
    summary: ClassVar = "lets the chip shorten the factors of float32 matrix products"
    effect: ClassVar = "matrix products up to eight times as fast as in float32, and half as fast as in 16 bits"
    reference: ClassVar = "docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32"
    Settings: ClassVar = Tf32Settings
    conflicts: ClassVar = {"mixed-precision": "its matrix products have 16-bit factors, which nothing shortens"}

    def lacks(self, machine: Machine) -> str | None:
        """Say what chip it needs; on a CPU a product is tried, as torch takes the setting on any."""
        precision = self.settings.precision
        if machine.on_cuda:
            return "needs a CPU for bf16" if precision == "bf16" else machine.lacks_cuda(least=(8, 0))
        with _restored():
            torch.set_float32_matmul_precision(_LEVELS[precision])
            error = _error(machine.device)
        if error > _SHORTENED:
            return None
        return f"needs a chip whose float32 products are shortened to {precision}; here they are exact to {error:.0e}"

    @contextmanager
    def process(self) -> Iterator[None]:
        """Put the precision back at the end."""
        with _restored():
            yield

    def apply(self, run: Run) -> None:
        """Set the precision of matrix products."""
        # Not that of the one backend, which is the newer way: torch.compile asks for the precision of all of them, and
        # fails where one was set by itself.
        torch.set_float32_matmul_precision(_LEVELS[self.settings.precision])
        run.speed.peak = measured_peak(run.device)

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Multiply two matrices within the step, whenever a block does: the result must show the shortening."""
        proof = Proof()
        seen: list[tuple[str, float]] = []

        def look(module: nn.Module, output: Tensor) -> None:
            seen.append((_setting(run.device), _error(run.device)))

        with seen_outputs([each.qkv for each in run.model.attentions], look):
            yield proof
        wanted = self.settings.precision
        settings, errors = {setting for setting, _ in seen}, [error for _, error in seen]
        if settings != {wanted}:
            found = ", ".join(sorted(settings)) or "nothing"
            raise self.not_active(f"the precision in the step was {found}", "find out what sets it after the run began")
        if min(errors) < _SHORTENED:
            raise self.not_active(
                f"a product in the step was exact to {min(errors):.0e}, which is float32's own precision",
                "leave it out: the chip shortens nothing",
            )
        proof.is_that(f"products were off by {max(errors):.0e}, as in {wanted}", precision=wanted, error=max(errors))


def _backend(device: torch.device) -> Any:
    backends: Any = torch.backends
    return backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul


def _setting(device: torch.device) -> str:
    setting: str = _backend(device).fp32_precision
    return setting


@contextmanager
def _restored() -> Iterator[None]:
    """Put back, at the end, the precision of all backends and of each."""
    common = torch.get_float32_matmul_precision()
    own = {device: _setting(device) for device in (torch.device("cpu"), torch.device("cuda"))}
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(common)
        for device, setting in own.items():
            _backend(device).fp32_precision = setting


def _error(device: torch.device) -> float:
    """Return how far a product of float32 matrices is from the exact one, as a share of it."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    found = _product(left.to(device), right.to(device)).cpu().double()
    return float((found - exact).norm() / exact.norm())


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right
