"""Activation functions of the MLPs, compared at equal parameters: a gated one has a hidden layer of 8/3 d_model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.model.config import GATED, ModelConfig
from tensorkeep.train.model.mlp import MLP
from tensorkeep.train.techniques.base import Proof, Technique

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": functional.gelu,
}
_MATCHED = 0.05
"""How much the parameters of the MLPs may differ for models to count as equally large."""

_NEAR = 0.01
"""How far, relatively, the hidden layer may be from the formula: bfloat16 is by 0.002, another activation by 0.05."""


class ActivationSettings(Section, frozen=True):
    """Which activation.

    Attributes
    ----------
    activation : str
        ``"gelu"``; ``"relu2"``, the square of ReLU (So et al., arXiv 2109.08668); ``"swiglu"`` or ``"geglu"``, which
        multiply two projections of the input.
    """

    activation: Literal["gelu", "relu2", "swiglu", "geglu"] = "swiglu"


class ActivationFunction(Technique):
    """Shazeer, arXiv 2002.05202, who compares gated activations as this does: 2/3 of the width, three matrices."""

    name: ClassVar = "activation-function"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "gives the MLPs another activation, at the number of parameters of GELU's with 4 d_model"
    effect: ClassVar = "often a slightly lower loss with ReLU^2 or a gated activation, at equal parameters and time"
    reference: ClassVar = "arXiv 2002.05202, arXiv 2109.08668"
    Settings: ClassVar = ActivationSettings
    conflicts: ClassVar = {"pipeline-parallel": "its proof looks at every block, and a process has some of them"}

    def configure(self, config: Config) -> Config:
        """Choose activation and width of the MLPs.

        Raises
        ------
        UsageError
            If the activation is gated, and a width was chosen that makes the models differ in size.
        """
        model = config.model
        by_default = model.d_ff == msgspec.structs.replace(model, d_ff=None).mlp_width
        chosen = msgspec.structs.replace(
            model, activation=self.settings.activation, d_ff=None if by_default else model.d_ff
        )
        more = _mlp_weights(chosen) / _mlp_weights(_compared_with(chosen)) - 1
        if abs(more) > _MATCHED:
            width = msgspec.structs.replace(chosen, d_ff=None).mlp_width
            raise UsageError(
                f"model.d_ff is {model.d_ff}, which gives MLPs with {chosen.activation} {more:+.0%} parameters: "
                "models of different sizes tell nothing of an activation",
                remedy=f"give model.d_ff none, for a width of {width}",
            )
        return msgspec.structs.replace(config, model=chosen)

    def apply(self, run: Run) -> None:
        """Do nothing: the model was built so."""

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Compare the hidden layer of each MLP with the formula, and the model with one that has GELU."""
        proof = Proof()
        name = self.settings.activation
        mlps: list[MLP] = [block.mlp for block in run.model.blocks]  # type: ignore[misc]
        with _distances(mlps, name) as found:
            yield proof
        other = [number for number, mlp in enumerate(mlps) if mlp not in found or not float(found[mlp]) < _NEAR]
        if other:
            raise self.not_active(
                f"in blocks {', '.join(map(str, other))} of {len(mlps)} what the MLP computed is not {name}",
                "report it, with the other techniques that are on",
            )
        model, compared = run.config.model, _compared_with(run.config.model)
        parameters = model.parameter_count() / compared.parameter_count() - 1
        flops = model.flops_per_token() / compared.flops_per_token() - 1
        proof.is_that(
            f"{len(mlps)} MLPs computed {name} {model.mlp_width} wide; against GELU {compared.mlp_width} wide the "
            f"model has {parameters:+.2%} parameters and takes {flops:+.2%} FLOPs a token",
            activation=name,
            width=model.mlp_width,
            parameters=model.parameter_count(),
            parameters_more=parameters,
            flops_more=flops,
        )


def _compared_with(model: ModelConfig) -> ModelConfig:
    """Return the model with GELU that one is compared with: as wide as its own, or 4 d_model if that is gated."""
    return msgspec.structs.replace(model, activation="gelu", d_ff=None if model.gated else model.d_ff)


def _mlp_weights(model: ModelConfig) -> int:
    return (3 if model.gated else 2) * model.d_model * model.mlp_width


@contextmanager
def _distances(mlps: Iterable[MLP], name: str) -> Iterator[dict[MLP, Tensor]]:
    """Note, within, how far the hidden layer of each MLP is from the formula, relatively."""
    found: dict[MLP, Tensor] = {}
    with ExitStack() as hooks:
        for mlp in mlps:
            results: dict[nn.Module, Tensor] = {}
            for layer in (mlp.up, mlp.gate):
                if layer is not None:
                    hooks.callback(layer.register_forward_hook(partial(_keep, results)).remove)
            compare = partial(_compare, mlp, name, results, found)
            # Before other hooks, which may make a divided tensor of what is one here.
            hooks.callback(mlp.down.register_forward_pre_hook(compare, prepend=True).remove)
        yield found


def _keep(results: dict[nn.Module, Tensor], layer: nn.Module, inputs: object, output: Tensor) -> None:
    results[layer] = output.detach().float()


def _compare(
    mlp: MLP,
    name: str,
    results: dict[nn.Module, Tensor],
    found: dict[MLP, Tensor],
    layer: nn.Module,
    inputs: tuple[Any, ...],
) -> None:
    if (mlp.gate is not None) != (name in GATED):
        return
    up = results.pop(mlp.up)
    wanted = _FORMULAS[name](up) if mlp.gate is None else _FORMULAS[name](results.pop(mlp.gate)) * up
    found[mlp] = (inputs[0].detach().float() - wanted).norm() / wanted.norm()
