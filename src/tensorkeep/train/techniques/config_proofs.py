"""Proofs of the techniques that only set configuration: what the first step shows of the fused AdamW, the learning-rate
schedule and the activation.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tensorkeep.train.model.block import MLP
from tensorkeep.train.model.config import GATED, ModelConfig
from tensorkeep.train.optim.schedules import learning_rate_factor
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Technique, Verification
from tensorkeep.train.techniques.observe import hooked, observe_inputs, observe_outputs
from tensorkeep.train.techniques.update_proof import observe_adamw

_SAME_RATE = 1e-6
"""The relative error of a learning rate that is kept in float32."""

_SAME_ACTIVATION = 0.01
"""The relative distance of a hidden layer from its formula: 0.002 in bfloat16, 0.05 with another activation."""

_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "swiglu": lambda x: x * torch.sigmoid(x),
    "geglu": functional.gelu,
}


def prove_fused_adamw(technique: Technique, run: Run) -> Verification:
    """Record which weights the fused kernel updates: it must update all those of AdamW, by AdamW's formula."""
    adamw, observer = run.optimizers["adamw"], _FusedKernelObserver()
    step = adamw.step

    def observed_step(*arguments: Any, **options: Any) -> Any:
        # Around AdamW alone: torch compiles nothing in a dispatch mode, and a function that it has met in one, such as
        # the Newton-Schulz steps of a compiled Muon, it would never compile.
        with observer:
            return step(*arguments, **options)

    adamw.step = observed_step  # type: ignore[method-assign]
    try:
        with observe_adamw(run) as observed:
            yield
    finally:
        del adamw.step
    if not observed.updates:
        return None
    missed = [group for group in adamw.param_groups if not observer.weights.issuperset(map(id, group["params"]))]
    if missed:
        raise technique.not_active(
            f"the fused kernel did not update {len(missed)} of {len(adamw.param_groups)} groups of weights",
            "report it, with the device and the dtype of the weights",
        )
    observed.check(technique)
    return Proof(
        f"{observer.calls} calls of the fused kernel updated {len(observer.weights)} weights by AdamW's formula",
        calls=observer.calls,
        weights=len(observer.weights),
    )


class _FusedKernelObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each call of the fused AdamW, and the weights that it updates.

    Weights are known by their identity, not by their memory: a sharded weight has no data pointer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0
        self.weights: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operator.overloadpacket is torch.ops.aten._fused_adamw_:
            self.calls += 1
            self.weights.update(map(id, arguments[0]))
        return operator(*arguments, **(options or {}))


def prove_schedule(technique: Technique, run: Run) -> Verification:
    """Record the learning rates with which optimizers step: they must be those of the schedule."""
    stepped: list[float] = []
    # Of every optimizer that steps, including unknown ones.
    with hooked([register_optimizer_step_pre_hook(lambda optimizer, *_: stepped.extend(_rates(optimizer)))]):
        yield
    # If the loss scaler skipped the update, look at the rates that would have been used.
    rates = stepped or [rate for optimizer in run.optimizers.values() for rate in _rates(optimizer)]
    fraction = learning_rate_factor(run.config.schedule, run.progress.step, run.config.loop.steps) * run.plateau.factor
    optim = run.config.optim
    peaks = (optim.lr, *([optim.muon_lr] if optim.name == "muon" else []))
    factors = {1.0, *(each.lr_factor for each in optim.groups.values() if each.lr_factor is not None)}
    expected = sorted({fraction * peak * factor for peak in peaks for factor in factors})
    others = [rate for rate in rates if not any(math.isclose(rate, each, rel_tol=_SAME_RATE) for each in expected)]
    if others or not rates:
        raise technique.not_active(
            f"of {len(rates)} groups of parameters, {len(others)} stepped with another learning rate "
            f"({', '.join(f'{rate:g}' for rate in others[:3])}) than {', '.join(f'{rate:g}' for rate in expected)}"
        )
    return Proof(
        f"{len(rates)} groups of parameters stepped with the learning rate of the schedule, "
        f"{', '.join(f'{rate:.3g}' for rate in expected)}",
        groups=len(rates),
        learning_rates=expected,
        share_of_peak=fraction,
    )


def prove_plateau(technique: Technique, run: Run) -> Verification:
    """Check the rates, and that a copy of the schedule lowers them after evaluations without improvement."""
    proof = yield from prove_schedule(technique, run)
    settings = technique.settings
    before, trial = run.plateau.factor, copy.deepcopy(run.plateau)
    for _ in range(settings.patience):
        trial.add(math.inf)
    if not math.isclose(trial.factor, before * settings.factor):
        raise technique.not_active(
            f"{settings.patience} evaluations without improvement would change the learning rate from {before:g} of "
            f"its peak to {trial.factor:g}"
        )
    return proof


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def gelu_counterpart(model: ModelConfig) -> ModelConfig:
    """Return the GELU model that a model is compared with: of the same width, or 4 d_model for a gated one."""
    return msgspec.structs.replace(model, activation="gelu", d_ff=None if model.gated else model.d_ff)


def prove_activation(technique: Technique, run: Run) -> Verification:
    """Compare the hidden layer of each MLP with the formula, and the size of the model with a GELU model's."""
    name = technique.settings.activation
    mlps: list[MLP] = [block.mlp for block in run.model.blocks]  # type: ignore[misc]
    by_layer: dict[nn.Module, MLP] = {mlp.down: mlp for mlp in mlps if (mlp.gate is not None) == (name in GATED)}
    results: dict[nn.Module, Tensor] = {}
    distances: dict[MLP, Tensor] = {}

    def keep(layer: nn.Module, output: Tensor) -> None:
        results[layer] = output.detach().float()

    def compare(layer: nn.Module, hidden: Tensor) -> None:
        """Record the relative distance of an MLP's hidden layer from the formula of the activation."""
        mlp, formula = by_layer[layer], _FORMULAS[name]
        up = results.pop(mlp.up)
        expected = formula(up) if mlp.gate is None else formula(results.pop(mlp.gate)) * up
        distances[mlp] = (hidden.detach().float() - expected).norm() / expected.norm()

    projections = [layer for mlp in mlps for layer in (mlp.up, mlp.gate) if layer is not None]
    with observe_outputs(projections, keep), observe_inputs(by_layer, compare):
        yield
    others = [number for number, mlp in enumerate(mlps) if not float(distances.get(mlp, math.inf)) < _SAME_ACTIVATION]
    if others:
        raise technique.not_active(
            f"in blocks {', '.join(map(str, others))} of {len(mlps)} the MLP did not compute {name}"
        )
    model, compared = run.config.model, gelu_counterpart(run.config.model)
    parameters = model.parameter_count() / compared.parameter_count() - 1
    flops = model.flops_per_token() / compared.flops_per_token() - 1
    return Proof(
        f"{len(mlps)} MLPs computed {name} {model.mlp_width} wide; compared with GELU {compared.mlp_width} wide the "
        f"model has {parameters:+.2%} parameters and takes {flops:+.2%} FLOPs per token",
        activation=name,
        width=model.mlp_width,
        parameters=model.parameter_count(),
        parameters_more=parameters,
        flops_more=flops,
    )
