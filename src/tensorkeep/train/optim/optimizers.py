"""Optimizers: which parameters each updates, with which learning rate and weight decay."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tensorkeep.errors import UsageError
from tensorkeep.train.config.sections import OptimConfig
from tensorkeep.train.optim.muon import Muon

Optimizers = dict[str, torch.optim.Optimizer]
"""By name; each training step steps all of them."""

_PEAK = "peak_lr"
FUSED_PROJECTIONS = {".attention.qkv.weight": 3, ".attention.kv.weight": 2}
"""How many matrices of equal shape are one above the other in a weight whose name ends so."""


def build_optimizers(model: nn.Module, config: OptimConfig) -> Optimizers:
    """Return the optimizers of a model.

    Matrices decay, vectors (biases and the weights of norms) do not, as in GPT-3 (Brown et al., arXiv 2005.14165).
    ``"muon"`` updates the matrices of the blocks by orthogonalised momentum (Jordan et al., 2024), the other parameters
    by AdamW (Loshchilov and Hutter, arXiv 1711.05101).
    """
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    hidden = {name: each for name, each in parameters.items() if name.startswith("blocks.") and each.ndim == 2}
    if config.name == "adamw":
        return {"adamw": _adamw(parameters.values(), config)}
    muon = Muon(
        list(_muon_groups(hidden, config)),
        lr=config.muon_lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        ns_steps=config.muon_steps,
    )
    rest = (each for name, each in parameters.items() if name not in hidden)
    return {"muon": muon, "adamw": _adamw(rest, config)}


def _muon_groups(hidden: Mapping[str, nn.Parameter], config: OptimConfig) -> Iterator[dict[str, Any]]:
    """Yield the groups of Muon. Keys that torch's Muon lacks are there only where their setting is on."""
    shared = {_PEAK: config.muon_lr} | ({"polar_express": True} if config.muon_polynomials == "polar-express" else {})
    groups: dict[int, list[nn.Parameter]] = {1: []}
    for name, each in hidden.items():
        groups.setdefault(fused_projections(name) if config.muon_split else 1, []).append(each)
    for count, parameters in groups.items():
        yield {"params": parameters, **shared} | ({"projections": count} if count > 1 else {})


def fused_projections(name: str) -> int:
    """Return how many projections the weight of a name has."""
    return next((count for end, count in FUSED_PROJECTIONS.items() if name.endswith(end)), 1)


def _adamw(parameters: Iterable[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    parameters = list(parameters)
    matrices = [each for each in parameters if each.ndim >= 2]
    vectors = [each for each in parameters if each.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay, _PEAK: config.lr},
        {"params": vectors, "weight_decay": 0.0, _PEAK: config.lr},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=True if config.implementation == "foreach" else None,
        fused=True if config.implementation == "fused" else None,
    )


def check_optimizers(config: OptimConfig, device: torch.device) -> None:
    """Raise UsageError if torch has no such AdamW for a device."""
    parameter = nn.Parameter(torch.zeros(1, 1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        # Torch checks the device in the first step only.
        _adamw([parameter], config).step()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"optim.implementation is {config.implementation!r}, which is not supported on {device}: {reason}",
            remedy='give "default"',
        ) from error


def set_learning_rate(optimizers: Optimizers, factor: float) -> None:
    """Set the learning rate of every parameter group to a factor of its peak."""
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = factor * group[_PEAK]
