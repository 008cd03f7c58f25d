"""TF32: the device rounds the operands of float32 matmuls to fewer bits."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from chatgot.step.device import measured_peak
from chatgot.techniques.base import Machine, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import observe_outputs

_LEVELS = {"tf32": "high", "bf16": "medium"}
_SIZE = 256
# A float32 matmul is exact to 1e-6; with operands of 10 bits of mantissa it is off by 3e-4.
_ROUNDED = 1e-5


class Tf32Settings(Section, frozen=True):
    """How far operands are rounded."""

    # "tf32": 10 bits of mantissa, on GPUs of compute capability 8.0 or later; "bf16": 7 bits, on CPUs where torch uses
    # bfloat16 matmuls for float32 (AMX).
    precision: Literal["tf32", "bf16"] = "tf32"


class Tf32(Technique):
    """Results, sums, weights and everything else outside matmuls stay in float32."""

    name: ClassVar = "tf32"
    aliases: ClassVar = ("allow-tf32", "matmul-precision")
    changes: ClassVar = "process"
    tolerance: ClassVar = 0.02
    summary: ClassVar = "lets the device round the operands of float32 matmuls"
    effect: ClassVar = "matmuls up to eight times as fast as in float32, and half as fast as in 16 bits"
    reference: ClassVar = "docs.pytorch.org/docs/stable/notes/cuda.html, TensorFloat-32"
    predicts_memory: ClassVar = True
    settings: Tf32Settings

    def missing(self, machine: Machine) -> str | None:
        precision = self.settings.precision
        if machine.on_cuda:
            return "needs a CPU for bf16" if precision == "bf16" else machine.missing_cuda(least=(8, 0))
        # Try a matmul: torch accepts the setting on any CPU.
        with _restored_precision():
            torch.set_float32_matmul_precision(_LEVELS[precision])
            error = _matmul_error(machine.device)
        if error > _ROUNDED:
            return None
        return f"needs a device that rounds float32 matmuls to {precision}; here they are exact to {error:.0e}"

    def process(self) -> AbstractContextManager[None]:
        return _restored_precision()

    def apply(self, run: StepState) -> None:
        # The setting of all backends: torch.compile reads it, and fails if it differs from a backend's own setting.
        torch.set_float32_matmul_precision(_LEVELS[self.settings.precision])
        # MFU is relative to the peak in this precision.
        run.peak_flops = measured_peak(run.device)

    def verify(self, run: StepState) -> Verification:
        settings: set[str] = set()
        errors: list[float] = []

        def probe(module: object, output: Tensor) -> None:
            # Read within the step: other code may have changed the setting since `apply`.
            settings.add(_precision(run.device))
            errors.append(_matmul_error(run.device))

        with observe_outputs([each.projections[0] for each in run.model.attentions], probe):
            yield
        requested = self.settings.precision
        if settings != {requested}:
            found = ", ".join(sorted(settings)) or "not read"
            raise self.not_active(f"the precision in the step was {found}", "find out what sets it after the run began")
        if min(errors) < _ROUNDED:
            raise self.not_active(
                f"a matmul in the step was exact to {min(errors):.0e}, the precision of float32 itself",
                "leave it out: the device does not round",
            )
        return Proof(
            f"matmuls were off by {max(errors):.0e}, as in {requested}", precision=requested, error=max(errors)
        )


def _backend(device: torch.device) -> Any:
    backends: Any = torch.backends
    return backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul


def _precision(device: torch.device) -> str:
    precision: str = _backend(device).fp32_precision
    return precision


@contextmanager
def _restored_precision() -> Iterator[None]:
    common = torch.get_float32_matmul_precision()
    # The common setting overwrites the settings of the backends, so these are kept as well.
    own = {device: _precision(device) for device in (torch.device("cpu"), torch.device("cuda"))}
    try:
        yield
    finally:
        # In this order: the common setting would overwrite the others.
        torch.set_float32_matmul_precision(common)
        for device, precision in own.items():
            _backend(device).fp32_precision = precision


def _matmul_error(device: torch.device) -> float:
    # A generator of its own: the step must draw the same numbers as an unobserved one.
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=generator) for _ in range(2))
    # float64 matmuls are never rounded to fewer bits.
    exact = left.double() @ right.double()
    # Under mixed precision the matmul would be in 16 bits, and its error prove nothing.
    with torch.autocast(device.type, enabled=False):
        found = _matmul(left.to(device), right.to(device)).cpu().double()
    return float((found - exact).norm() / exact.norm())


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    return left @ right
