"""Mixed precision: matmuls in bfloat16 or float16, weights and sums in float32."""

from collections import Counter
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from chatgot.model.attention import in_float32
from chatgot.step.device import chosen_device, measured_peak
from chatgot.techniques.base import Config, MemoryEffects, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import Loss, observe_inputs, observe_outputs
from tensorkeep.errors import UnsupportedError

_Precision = Literal["bf16", "fp16"]

_DTYPES: dict[_Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
# How many times as fast as float32 the matmuls of a precision must be.
_CLEARLY_FASTER = 1.1
# How many times as fast as bfloat16 float16 must be, because it needs scaled losses and skips updates. A GPU computes
# both at the same speed, apart from noise, or emulates bfloat16 several times slower.
_WORTH_SCALING = 1.5
# Two speeds are measured again if their ratio is within this factor of a bound.
_NOISE = 1.15
_MEASUREMENTS = 3
# On a CPU, attention to fewer tokens is slower in 16 bits than in 32.
_SHORT_CONTEXT = 256


class MixedPrecisionSettings(Section, frozen=True):
    """The precision of matmuls and of attention."""

    # "bf16"; "fp16", with scaled losses, so that small gradients do not vanish; "auto": bf16, or fp16 if its matmuls,
    # measured here, are at least 1.5 times as fast; an error if neither is faster than float32. The choice is stored
    # with the run.
    dtype: Literal["auto", "bf16", "fp16"] = "auto"
    # The precision of attention between its projections: "same"; "float32"; "auto": float32 on CPUs with contexts of
    # less than 256, because the gradient of torch's 16-bit kernel takes several times as long.
    attention: Literal["auto", "same", "float32"] = "auto"


class MixedPrecision(Technique):
    """Micikevicius et al., arXiv 1710.03740, with `torch.autocast`."""

    name: ClassVar = "mixed-precision"
    aliases: ClassVar = (
        "amp",
        "autocast",
        "grad-scaler",
        "mixed-precision-training",
        "half-precision",
        "float16",
        "bfloat16",
    )
    changes: ClassVar = "loss"
    tolerance: ClassVar = 0.02
    summary: ClassVar = "computes matmuls in 16 bits, and keeps weights, optimizer and losses in 32"
    effect: ClassVar = "up to twice the speed, or more, where the device multiplies 16-bit matrices faster"
    reference: ClassVar = "arXiv 1710.03740; torch.amp"
    predicts_memory: ClassVar = True
    settings: MixedPrecisionSettings

    skipped = 0
    _scaler: torch.amp.GradScaler | None = None

    def configure(self, config: Config) -> Config:
        device = chosen_device(config.loop.device)
        dtype, attention = self.settings.dtype, self.settings.attention
        if dtype == "auto":
            dtype = _fastest(device)
        if attention == "auto":
            short = config.model.context_length < _SHORT_CONTEXT
            attention = "float32" if device.type == "cpu" and short else "same"
        # Stored, because a resumed run must not choose another precision after another measurement.
        self.settings = MixedPrecisionSettings(dtype=dtype, attention=attention)
        return config.changed({f"techniques.{self.name}": msgspec.to_builtins(self.settings)})

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.settings.dtype == "fp16" else torch.bfloat16

    def apply(self, run: StepState) -> None:
        dtype, operations = self._dtype, run.operations

        def under_autocast(inner: Loss) -> Loss:
            def loss(inputs: Tensor, targets: Tensor) -> Tensor:
                with torch.autocast(run.device.type, dtype):
                    return inner(inputs, targets)

            return loss

        operations.loss, operations.evaluate = under_autocast(operations.loss), under_autocast(operations.evaluate)
        if self.settings.attention == "float32":
            for attention in run.model.attentions:
                attention.kernel = in_float32(attention.kernel)
        # MFU is relative to the peak in this precision.
        run.peak_flops = measured_peak(run.device, dtype)
        if dtype is torch.float16:
            self._scale_losses(run)

    def _scale_losses(self, run: StepState) -> None:
        # Each loss decides the next scale, so it must be read in its own step.
        run.reads_losses = True
        scaler = self._scaler = torch.amp.GradScaler(run.device.type)
        operations, optimizers = run.operations, run.optimizers.values()
        backward, clip, accepts = operations.backward, operations.clip, operations.accepts

        # The scale multiplies the loss, and is divided out before clipping, so that `clip` is in real units.
        def scaled_backward(loss: Tensor) -> None:
            backward(scaler.scale(loss))

        def unscaled_clip() -> Tensor:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            return clip()

        def accepts_or_backs_off(loss: Tensor, norm: Tensor) -> bool:
            # Overflowing gradients lower the scale. An infinite loss, or an overflow at scale 1, is a divergence.
            too_large = bool(loss.isfinite()) and not bool(norm.isfinite()) and scaler.get_scale() > 1
            self.skipped += too_large
            accepted = not too_large and accepts(loss, norm)
            if not accepted:
                scaler.update()
            return accepted

        def update() -> None:
            # `step` skips an optimizer with gradients that are not finite.
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        operations.backward, operations.clip = scaled_backward, unscaled_clip
        operations.accepts, operations.update = accepts_or_backs_off, update

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.element_bytes = 2

    def verify(self, run: StepState) -> Verification:
        linear: Counter[torch.dtype] = Counter()
        attention: Counter[torch.dtype] = Counter()
        layers = [each for each in run.model.blocks.modules() if isinstance(each, nn.Linear)]
        projections = [each.out for each in run.model.attentions]
        with (
            observe_outputs(layers, lambda module, output: linear.update([output.dtype])),
            observe_inputs(projections, lambda module, attended: attention.update([attended.dtype])),
        ):
            yield
        # Linear layers return the dtype of autocast.
        if set(linear) != {self._dtype}:
            raise self.not_active(f"linear layers returned {_formatted(linear)}", "leave it out, or report it")
        in_attention = torch.float32 if self.settings.attention == "float32" else self._dtype
        if set(attention) != {in_attention}:
            raise self.not_active(f"attention returned {_formatted(attention)}")
        summary = (
            f"{linear[self._dtype]} results of linear layers were {self._dtype}, attention returned {in_attention}"
        )
        return Proof(summary, results=linear[self._dtype], dtype=str(self._dtype), attention=str(in_attention))

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
            self.skipped = int(state["skipped"])


def _formatted(dtypes: Counter[torch.dtype]) -> str:
    return ", ".join(f"{str(each).removeprefix('torch.')} ({count})" for each, count in dtypes.items()) or "nothing"


def _fastest(device: torch.device) -> _Precision:
    """Return the precision with the fastest measured matmuls; UnsupportedError if float32 is as fast."""
    # Measured, because a device may support a precision without being faster in it.
    plain, bf16, fp16 = _peaks(device)
    if max(bf16, fp16) >= _CLEARLY_FASTER * plain:
        return "fp16" if fp16 >= _WORTH_SCALING * bf16 else "bf16"
    measured = {"float32": plain, "bf16": bf16, "fp16": fp16}
    figures = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in measured.items())
    raise UnsupportedError(
        f"mixed-precision would not be faster here: matmuls reach, in GFLOP/s, {figures}",
        remedy="leave it out, or choose a precision (techniques.mixed-precision.dtype)",
    )


def _peaks(device: torch.device) -> list[float]:
    """Return the FLOP/s of matmuls in float32, bfloat16 and float16, measured again while a decision is near."""
    # Other processes only slow a measurement down, so the highest of several is nearest to the truth.
    dtypes = (torch.float32, *_DTYPES.values())
    peaks = [0.0] * len(dtypes)
    for _ in range(_MEASUREMENTS):
        peaks = [max(peak, measured_peak(device, dtype)) for peak, dtype in zip(peaks, dtypes, strict=True)]
        plain, bf16, fp16 = peaks
        bounds = ((bf16, _CLEARLY_FASTER * plain), (fp16, _CLEARLY_FASTER * plain), (fp16, _WORTH_SCALING * bf16))
        # Far from every bound, noise cannot change the decision.
        if not any(bound / _NOISE < rate < bound * _NOISE for rate, bound in bounds):
            break
    return peaks
