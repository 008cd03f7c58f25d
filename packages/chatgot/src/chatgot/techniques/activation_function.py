"""The activation of the MLPs, compared with GELU at an equal number of parameters."""

import math
from collections.abc import Callable
from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from chatgot.model.config import GATED, ModelConfig
from chatgot.model.gpt import MLP
from chatgot.techniques.base import Config, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import observe_inputs, observe_outputs
from tensorkeep.errors import UsageError

# Models count as equally large if the parameters of their MLPs differ by less than this fraction.
_SIZE_TOLERANCE = 0.05

# The largest relative distance of a hidden layer from its formula: bfloat16 gives 0.002, another activation 0.05.
_SAME_ACTIVATION = 0.01

# The proof computes each activation by a formula of its own, not by the model's function.
_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": functional.gelu,
}


class ActivationSettings(Section, frozen=True):
    """The activation of the MLPs."""

    # "gelu"; "relu2", the square of ReLU (So et al., arXiv 2109.08668); "swiglu" or "geglu", which multiply two
    # projections of the input.
    activation: Literal["gelu", "relu2", "swiglu", "geglu"] = "swiglu"


class ActivationFunction(Technique):
    """Shazeer, arXiv 2002.05202: gated activations are compared at equal size, 2/3 of the width and three matrices."""

    name: ClassVar = "activation-function"
    aliases: ClassVar = ("activation-function-experiments", "gated-activation")
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "model"
    summary: ClassVar = "gives the MLPs another activation, with as many parameters as GELU with 4 d_model"
    effect: ClassVar = "often a slightly lower loss with ReLU^2 or a gated activation, at equal parameters and time"
    reference: ClassVar = "arXiv 2002.05202, arXiv 2109.08668"
    predicts_memory: ClassVar = True
    conflicts: ClassVar = {"pipeline-parallel": "its activity check needs every block, but each process has only some"}
    settings: ActivationSettings

    def configure(self, config: Config) -> Config:
        model = config.model
        # A width that equals the default of the current activation counts as the default, and is not kept.
        by_default = model.d_ff == msgspec.structs.replace(model, d_ff=None).mlp_width
        d_ff = None if by_default else model.d_ff
        chosen = msgspec.structs.replace(model, activation=self.settings.activation, d_ff=d_ff)
        excess = _mlp_weights(chosen) / _mlp_weights(_gelu_counterpart(chosen)) - 1
        if abs(excess) > _SIZE_TOLERANCE:
            width = msgspec.structs.replace(chosen, d_ff=None).mlp_width
            raise UsageError(
                f"model.d_ff is {model.d_ff}, which gives MLPs with {chosen.activation} {excess:+.0%} parameters: "
                "a comparison of activations needs models of equal size",
                remedy=f"give model.d_ff none, for a width of {width}",
            )
        return config.changed({"model.activation": chosen.activation, "model.d_ff": d_ff})

    def verify(self, run: StepState) -> Verification:
        name = self.settings.activation
        mlps: list[MLP] = [block.mlp for block in run.model.blocks]  # type: ignore[misc]
        by_layer: dict[nn.Module, MLP] = {mlp.down: mlp for mlp in mlps if (mlp.gate is not None) == (name in GATED)}
        projected: dict[nn.Module, Tensor] = {}
        distances: dict[MLP, Tensor] = {}

        # The model computed the projections; only the activation between them is computed again.
        def keep(layer: nn.Module, output: Tensor) -> None:
            projected[layer] = output.detach().float()

        def compare(layer: nn.Module, hidden: Tensor) -> None:
            mlp, formula = by_layer[layer], _FORMULAS[name]
            # Popped, so that the projections of one block at a time are in memory.
            up = projected.pop(mlp.up)
            expected = formula(up) if mlp.gate is None else formula(projected.pop(mlp.gate)) * up
            distances[mlp] = (hidden.detach().float() - expected).norm() / expected.norm()

        projections = [layer for mlp in mlps for layer in (mlp.up, mlp.gate) if layer is not None]
        with observe_outputs(projections, keep), observe_inputs(by_layer, compare):
            yield
        # Written with `not`, so that NaN is an error too.
        others = [n for n, mlp in enumerate(mlps) if not float(distances.get(mlp, math.inf)) < _SAME_ACTIVATION]
        if others:
            raise self.not_active(
                f"in blocks {', '.join(map(str, others))} of {len(mlps)} the MLP did not compute {name}"
            )
        model, compared = run.config.model, _gelu_counterpart(run.config.model)
        parameters = model.parameter_count() / compared.parameter_count() - 1
        flops = model.flops_per_token() / compared.flops_per_token() - 1
        return Proof(
            f"{len(mlps)} MLPs computed {name} {model.mlp_width} wide; compared with GELU {compared.mlp_width} wide the"
            f" model has {parameters:+.2%} parameters and takes {flops:+.2%} FLOPs per token",
            activation=name,
            width=model.mlp_width,
            parameters=model.parameter_count(),
            parameters_more=parameters,
            flops_more=flops,
        )


def _gelu_counterpart(model: ModelConfig) -> ModelConfig:
    """Return the GELU model to compare with: of the same width, or 4 d_model for a gated activation."""
    return msgspec.structs.replace(model, activation="gelu", d_ff=None if model.gated else model.d_ff)


def _mlp_weights(model: ModelConfig) -> int:
    return (3 if model.gated else 2) * model.d_model * model.mlp_width
