"""Quantised forward: int8 on a CPU has 0.85 times the plain speed; float8 on an H200 0.85 times compiled bfloat16.

The matmuls of the blocks have 8-bit operands; the weights themselves are not changed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from chatgot.techniques.base import Config, Machine, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import hooked
from tensorkeep.errors import UsageError

# Levels are -127 to 127, symmetric around 0.
_LARGEST = 127

# The error against int8 matmuls must be below this fraction of the error against float matmuls.
_MAX_DISTANCE_RATIO = 0.5

# The proof compares the results of this many tokens of a batch.
_COMPARED = 256

# float8 matmuls need dimensions that are multiples of this.
_MULTIPLE = 16


class QuantisedForwardSettings(Section, frozen=True):
    """The number format."""

    # "int8": inputs and weights are rounded to 255 levels, with a scale for each token and each output channel, and
    # multiplied in floating point. Any machine computes the loss of 8-bit integers, but not at their speed. "float8":
    # torchao computes the matmuls in float8, forward and backward.
    mode: Literal["int8", "float8"] = "int8"


class QuantisedForward(Technique):
    """Jacob et al., arXiv 1712.05877 (int8, straight-through); Micikevicius et al., arXiv 2209.05433 (float8)."""

    name: ClassVar = "quantised-forward"
    aliases: ClassVar = ("quantized-forward", "quantized-forwarding")
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "rounds the operands of the blocks' matmuls to 8 bits"
    effect: ClassVar = (
        "int8: slower, use it only to see the effect on the loss; float8: up to 1.3 times the speed for large models"
    )
    reference: ClassVar = "arXiv 1712.05877, arXiv 2209.05433; torchao.float8"
    settings: QuantisedForwardSettings
    conflicts: ClassVar = {"tensor-parallel": "the scale of a channel needs weights that other processes have"}

    def missing(self, machine: Machine) -> str | None:
        if self.settings.mode == "int8":
            return None
        return machine.missing_cuda(least=(8, 9)) or machine.missing_package("torchao", install="torchao")

    def configure(self, config: Config) -> Config:
        if self.settings.mode == "int8":
            return config
        if "compile" not in config.techniques:
            raise UsageError(
                "float8 is slower than float32 unless the scaling is compiled with the matmul",
                remedy="add the technique compile",
            )
        model = config.model
        tokens = config.loop.batch_size * model.context_length
        heads = ("the width of all heads", model.attention_width)
        widths = (("d_model", model.d_model), heads, ("the width of MLPs", model.mlp_width))
        for name, size in (*widths, ("tokens", tokens)):
            if size % _MULTIPLE:
                raise UsageError(
                    f"float8 needs dimensions that are multiples of {_MULTIPLE}, and {name} is {size}",
                    remedy="choose other sizes, or techniques.quantised-forward.mode int8",
                )
        return config

    def apply(self, run: StepState) -> None:
        if self.settings.mode == "float8":
            to_float8(run.model.blocks)
            return
        for layer in _linear_layers(run):
            layer.forward = _quantised(layer)  # type: ignore[method-assign, assignment]

    def verify(self, run: StepState) -> Verification:
        return (yield from self._verify_float8(run) if self.settings.mode == "float8" else self._verify_int8(run))

    def _verify_int8(self, run: StepState) -> Verification:
        layers = _linear_layers(run)
        distances: dict[nn.Linear, tuple[float, float]] = {}
        with hooked(each.register_forward_hook(partial(_record_distances, distances)) for each in layers):
            yield
        # The result must be nearer to products of integers than to float products, which `_MAX_DISTANCE_RATIO` decides.
        near = sum(from_integers < _MAX_DISTANCE_RATIO * from_plain for from_plain, from_integers in distances.values())
        if near < len(layers):
            raise self.not_active(
                f"of {len(layers)} linear layers {len(layers) - near} did not return products of 8-bit integers"
            )
        from_plain, from_integers = (max(each) for each in zip(*distances.values(), strict=True))
        summary = (
            f"{len(layers)} linear layers returned products of 8-bit integers, to within {from_integers:.0e}; they are "
            f"up to {from_plain:.0e} off the unrounded products"
        )
        return Proof(summary, layers=len(layers), distance=from_integers, distance_of_plain=from_plain)

    def _verify_float8(self, run: StepState) -> Verification:
        layers = _linear_layers(run)
        with torch.profiler.profile() as profile:
            yield
        matmuls = sum(each.count for each in profile.key_averages() if "scaled_mm" in each.key)
        plain = sum(type(each) is nn.Linear for each in layers)
        if plain or matmuls < len(layers):
            raise self.not_active(
                f"of {len(layers)} linear layers {plain} were not replaced, and there were {matmuls} matmuls in float8"
            )
        return Proof(
            f"{len(layers)} linear layers made {matmuls} matmuls in float8", layers=len(layers), products=matmuls
        )


def fake_quantised(x: Tensor) -> Tensor:
    """Return a tensor with each row (the last dimension) rounded to 255 levels, in float32, with its gradient."""
    # The levels are symmetric: 0 and the largest element of a row by magnitude are unchanged.
    rounded: Tensor = _StraightThrough.apply(x.float())  # type: ignore[no-untyped-call]
    return rounded


class _StraightThrough(torch.autograd.Function):
    """Rounds in the forward pass only: the straight-through estimator (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        # Rounding has a gradient of 0 almost everywhere, so the backward pass ignores it.
        scale = _scale(x)
        return (x / scale).round() * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _scale(x: Tensor) -> Tensor:
    # A row of zeros needs a scale above 0, because it is a divisor.
    return x.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / _LARGEST


def _quantised(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return functional.linear(fake_quantised(x), fake_quantised(layer.weight), layer.bias)

    return forward


def to_float8(blocks: nn.Module, *, emulate: bool = False) -> None:
    """Replace linear layers by torchao's, with the same parameters; ``emulate`` computes in float32, for tests."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=Float8LinearConfig(emulate=emulate))


def _linear_layers(run: StepState) -> list[nn.Linear]:
    # Layers of the blocks only: embeddings and head are not quantised.
    return [each for each in run.model.blocks.modules() if isinstance(each, nn.Linear)]


@torch.no_grad()
def _record_distances(
    distances: dict[nn.Linear, tuple[float, float]], layer: nn.Linear, inputs: tuple[Any, ...], output: Tensor
) -> None:
    x, found = (_as_float64(each.flatten(0, -2)[:_COMPARED]) for each in (inputs[0], output))
    weight = _as_float64(layer.weight)
    if layer.bias is not None:
        found = found - _as_float64(layer.bias)
    # Sums of integers are exact in float64.
    of_x, of_weight = _scale(x), _scale(weight)
    integers = (x / of_x).round() @ (weight / of_weight).round().T * of_x * of_weight.T
    plain = x @ weight.T
    from_plain, from_integers = (float((found - each).norm() / plain.norm()) for each in (plain, integers))
    distances[layer] = from_plain, from_integers


def _as_float64(x: Tensor) -> Tensor:
    return x.detach().cpu().double()
