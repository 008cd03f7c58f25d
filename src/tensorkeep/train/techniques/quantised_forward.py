"""Quantised forward: the matrix products of the blocks take 8-bit numbers, the weights stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.machine import Machine

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_LARGEST = 127
"""Levels reach from -127 to 127: 255 of them, as many below 0 as above."""

_NEARER = 0.5
"""Results are this much nearer to those of 8-bit integers than to those of the numbers as they were, or nearer."""

_LOOKED_AT = 256
"""Tokens of a batch whose results are compared."""

_MULTIPLE = 16
"""Of which float8 products want each dimension to be a multiple."""


class QuantisedForwardSettings(Section, frozen=True):
    """In which numbers.

    Attributes
    ----------
    mode : str
        ``"int8"``: inputs and weights are rounded to 255 levels, a scale for each token and each output channel, and
        multiplied in floating point, so that the loss is that of 8-bit integers on any machine, and the speed is not.
        ``"float8"``: products are computed in float8, forward and backward, by torchao.
    """

    mode: Literal["int8", "float8"] = "int8"


class QuantisedForward(Technique):
    """Jacob et al., arXiv 1712.05877 (int8, straight-through); Micikevicius et al., arXiv 2209.05433 (float8).

    The linear layers of the blocks are quantised, embeddings and head are not. Checkpoints hold the weights as they
    are, which a model that is opened elsewhere uses unrounded.
    """

    name: ClassVar = "quantised-forward"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "rounds what the linear layers of the blocks multiply to 8 bits"
    effect: ClassVar = "int8: slower, it tells what quality is left; float8: up to 1.3 times the speed for large models"
    reference: ClassVar = "arXiv 1712.05877, arXiv 2209.05433; torchao.float8"
    Settings: ClassVar = QuantisedForwardSettings
    conflicts: ClassVar = {
        "tensor-parallel": "the scale of a channel would need weights that other processes hold",
    }

    def lacks(self, machine: Machine) -> str | None:
        """Say what float8 needs."""
        if self.settings.mode == "int8":
            return None
        return machine.lacks_cuda(least=(8, 9)) or machine.lacks_package("torchao", install="torchao")

    def configure(self, config: Config) -> Config:
        """Check what float8 needs of the model.

        Raises
        ------
        UsageError
            If a dimension is no multiple of 16, or nothing is compiled.
        """
        if self.settings.mode == "int8":
            return config
        if "compile" not in config.techniques:
            raise UsageError(
                "float8 is slower than float32 where the scaling is not compiled with the product",
                remedy="add the technique compile",
            )
        model = config.model
        tokens = config.loop.batch_size * model.context_length
        for name, size in (("d_model", model.d_model), ("the width of MLPs", model.mlp_width), ("tokens", tokens)):
            if size % _MULTIPLE:
                raise UsageError(
                    f"float8 wants dimensions that are multiples of {_MULTIPLE}, and {name} is {size}",
                    remedy="choose other sizes, or techniques.quantised-forward.mode int8",
                )
        return config

    def apply(self, run: Run) -> None:
        """Give each linear layer of the blocks another forward."""
        if self.settings.mode == "float8":
            to_float8(run.model.blocks)
            return
        for layer in _linear_layers(run):
            layer.forward = _quantised(layer)  # type: ignore[method-assign, assignment]

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Compare what layers return with the products of 8-bit integers, or look for products in float8."""
        proof = Proof()
        watched = self._float8_products if self.settings.mode == "float8" else self._int8_products
        with watched(run, proof):
            yield proof

    @contextmanager
    def _int8_products(self, run: Run, proof: Proof) -> Iterator[None]:
        layers = _linear_layers(run)
        distances: dict[nn.Linear, tuple[float, float]] = {}
        with ExitStack() as hooks:
            for layer in layers:
                note = partial(_note_distances, distances)
                hooks.callback(layer.register_forward_hook(note).remove)
            yield
        plain = [each for each in layers if not _are_integers(*distances.get(each, (0.0, 0.0)))]
        if plain:
            raise self.not_active(
                f"of {len(layers)} linear layers {len(plain)} did not return the products of 8-bit integers",
                "report it, with the other techniques that are on",
            )
        far, near = (max(each) for each in zip(*distances.values(), strict=True))
        proof.is_that(
            f"{len(layers)} linear layers returned the products of 8-bit integers, to within {near:.0e} of them, where "
            f"the numbers as they were give others by up to {far:.0e}",
            layers=len(layers),
            distance=near,
            distance_of_plain=far,
        )

    @contextmanager
    def _float8_products(self, run: Run, proof: Proof) -> Iterator[None]:
        layers = _linear_layers(run)
        with torch.profiler.profile() as profile:
            yield
        products = sum(each.count for each in profile.key_averages() if "scaled_mm" in each.key)
        plain = sum(type(each) is nn.Linear for each in layers)
        if plain or products < len(layers):
            raise self.not_active(
                f"of {len(layers)} linear layers {plain} were left as they are, and there were {products} products in "
                "float8",
                "report it, with the other techniques that are on",
            )
        proof.is_that(
            f"{len(layers)} linear layers made {products} products in float8", layers=len(layers), products=products
        )


def fake_quantised(x: Tensor) -> Tensor:
    """Return a tensor rounded to 255 levels for each row (its last dimension), in float32; the gradient passes through.

    Symmetric: 0 stays 0, and the largest element of a row by magnitude stays what it is.
    """
    rounded: Tensor = _StraightThrough.apply(x.float())  # type: ignore[no-untyped-call]
    return rounded


class _StraightThrough(torch.autograd.Function):
    """Rounds, and hands the gradient back as if it had not (Bengio et al., arXiv 1308.3432)."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        scale = _scale(x)
        return (x / scale).round() * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _scale(x: Tensor) -> Tensor:
    """Return the distance between two levels, for each row."""
    return x.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / _LARGEST


def _quantised(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return functional.linear(fake_quantised(x), fake_quantised(layer.weight), layer.bias)

    return forward


def to_float8(blocks: nn.Module, *, emulate: bool = False) -> None:
    """Put torchao's layers in place of the linear ones, with the same parameters under the same names.

    Parameters
    ----------
    blocks : Module
    emulate : bool
        Compute the products in float32, where the chip has none in float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(blocks, config=Float8LinearConfig(emulate=emulate))


def _linear_layers(run: Run) -> list[nn.Linear]:
    return [each for each in run.model.blocks.modules() if isinstance(each, nn.Linear)]


def _are_integers(from_plain: float, from_integers: float) -> bool:
    return from_integers < _NEARER * from_plain


@torch.no_grad()
def _note_distances(
    distances: dict[nn.Linear, tuple[float, float]], layer: nn.Linear, inputs: tuple[Any, ...], output: Tensor
) -> None:
    """Note how far a result is, relatively, from the product of the numbers as they were, and from that of integers."""
    x, found = (_as_float64(each.flatten(0, -2)[:_LOOKED_AT]) for each in (inputs[0], output))
    weight = _as_float64(layer.weight)
    if layer.bias is not None:
        found = found - _as_float64(layer.bias)
    # Sums of whole numbers are exact in float64.
    of_x, of_weight = _scale(x), _scale(weight)
    integers = (x / of_x).round() @ (weight / of_weight).round().T * of_x * of_weight.T
    plain = x @ weight.T
    from_plain, from_integers = (float((found - each).norm() / plain.norm()) for each in (plain, integers))
    distances[layer] = from_plain, from_integers


def _as_float64(x: Tensor) -> Tensor:
    return x.detach().cpu().double()
