"""Mixed precision: matrix products in bfloat16 or float16, weights and sums in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn

from tensorkeep.errors import UnsupportedError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.speed import measured_peak
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.watching import seen_inputs, seen_outputs

if TYPE_CHECKING:
    from tensorkeep.train.model.attention import Kernel
    from tensorkeep.train.run.state import Run

_Precision = Literal["bf16", "fp16"]

_DTYPES: dict[_Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CLEARLY_FASTER = 1.1
_SHORT = 256
"""Tokens of context, from which on attention on a CPU is as fast in 16 bits as in 32."""


class MixedPrecisionSettings(Section, frozen=True):
    """Which precision.

    Attributes
    ----------
    dtype : str
        ``"bf16"``; ``"fp16"``, whose losses are scaled so that small gradients do not vanish; ``"auto"``: the one whose
        matrix products are measured to be the fastest here, and it is an error if neither is faster than float32's.
    attention : str
        Of attention between its projections: ``"same"``; ``"float32"``; ``"auto"``: float32 on CPUs with contexts of
        less than 256, where the gradient of torch's kernel for 16 bits takes several times as long.
    """

    dtype: Literal["auto", "bf16", "fp16"] = "auto"
    attention: Literal["auto", "same", "float32"] = "auto"


class MixedPrecision(Technique):
    """Micikevicius et al., arXiv 1710.03740, by `torch.autocast`."""

    name: ClassVar = "mixed-precision"
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    tolerance: ClassVar = 0.02
    summary: ClassVar = "computes matrix products in 16 bits, and keeps weights, optimizer and losses in 32"
    effect: ClassVar = "up to twice the speed, or more, where the chip multiplies 16-bit matrices faster"
    reference: ClassVar = "arXiv 1710.03740; torch.amp"
    Settings: ClassVar = MixedPrecisionSettings

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self._scaler: torch.amp.GradScaler | None = None
        self.skipped = 0

    def configure(self, config: Config) -> Config:
        """Choose the precisions, once for all processes of the run."""
        device = chosen_device(config.loop.device)
        dtype, attention = self.settings.dtype, self.settings.attention
        if dtype == "auto":
            dtype = _fastest(device)
        if attention == "auto":
            short = config.model.context_length < _SHORT
            attention = "float32" if device.type == "cpu" and short else "same"
        self.settings = MixedPrecisionSettings(dtype=dtype, attention=attention)
        techniques = {**config.techniques, self.name: msgspec.to_builtins(self.settings)}
        return msgspec.structs.replace(config, techniques=techniques)

    def apply(self, run: Run) -> None:
        """Compute losses under autocast; in float16, scale them."""
        dtype = _DTYPES[self.settings.dtype]
        inner = run.operations.loss

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(run.device.type, dtype):
                return inner(inputs, targets)

        run.operations.loss = loss
        if self.settings.attention == "float32":
            for attention in run.model.attentions:
                attention.kernel = _in_32_bits(attention.kernel)
        # The share of the peak is that of the peak in this precision.
        run.speed.peak = measured_peak(run.device, dtype)
        if dtype is torch.float16:
            self._scale(run)

    def _scale(self, run: Run) -> None:
        scaler = self._scaler = torch.amp.GradScaler(run.device.type)
        operations, optimizers = run.operations, run.optimizers.values()
        backward, clip, accepts = operations.backward, operations.clip, operations.accepts

        def scaled_backward(loss: Tensor) -> None:
            backward(scaler.scale(loss))

        def unscaled_clip() -> Tensor:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            return clip()

        def accepts_or_backs_off(loss: Tensor, norm: Tensor) -> bool:
            # Gradients that overflow are how a scale is found. A loss that does is not, nor is what overflows unscaled.
            too_large = bool(loss.isfinite()) and not bool(norm.isfinite()) and scaler.get_scale() > 1
            self.skipped += too_large
            accepted = not too_large and accepts(loss, norm)
            if not accepted:
                scaler.update()
            return accepted

        def update() -> None:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        operations.backward, operations.clip = scaled_backward, unscaled_clip
        operations.accepts, operations.update = accepts_or_backs_off, update

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See the dtype of what every linear layer of the blocks returns, and of what attention gives to the last."""
        proof = Proof()
        wanted = _DTYPES[self.settings.dtype]
        seen: Counter[torch.dtype] = Counter()
        attended: Counter[torch.dtype] = Counter()
        layers = [each for each in run.model.blocks.modules() if isinstance(each, nn.Linear)]
        outs = [each.out for each in run.model.attentions]
        with (
            seen_outputs(layers, lambda module, output: seen.update([output.dtype])),
            seen_inputs(outs, lambda module, given: attended.update([given.dtype])),
        ):
            yield proof
        if set(seen) != {wanted}:
            raise self.not_active(f"linear layers returned {_counted(seen)}", "leave it out, or report it")
        of_attention = torch.float32 if self.settings.attention == "float32" else wanted
        if set(attended) != {of_attention}:
            raise self.not_active(f"attention returned {_counted(attended)}", "report it")
        proof.is_that(
            f"{seen[wanted]} results of linear layers were {wanted}, those of attention {of_attention}",
            results=seen[wanted],
            dtype=str(wanted),
            attention=str(of_attention),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, and how many updates it has skipped."""
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
            self.skipped = int(state["skipped"])


def _in_32_bits(kernel: Kernel) -> Kernel:
    def attend(query: Tensor, key: Tensor, value: Tensor, /, **how: Any) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return kernel(query.float(), key.float(), value.float(), **how)

    return attend


def _counted(dtypes: Counter[torch.dtype]) -> str:
    return ", ".join(f"{str(each).removeprefix('torch.')} ({count})" for each, count in dtypes.items()) or "nothing"


def _fastest(device: torch.device) -> _Precision:
    """Return the precision whose matrix products are the fastest here.

    A chip may take both and be no faster in either: what it is said to support is not asked.
    """
    plain = measured_peak(device)
    peaks = {name: measured_peak(device, dtype) for name, dtype in _DTYPES.items()}
    best = max(peaks, key=lambda name: peaks[name])
    if peaks[best] < _CLEARLY_FASTER * plain:
        measured: dict[str, float] = {"float32": plain} | {str(name): peak for name, peak in peaks.items()}
        figures = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in measured.items())
        raise UnsupportedError(
            f"mixed-precision would make nothing faster here: GFLOP/s of matrix products are {figures}",
            remedy="leave it out, or choose a precision (techniques.mixed-precision.dtype)",
        )
    return best
