"""Optimizers and their settings: learning rates and weight decays by parameter; the average of the weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from chatgot.optim.muon import Muon
from chatgot.settings import Decay, NonNegative, Positive, Section
from tensorkeep.errors import UsageError, first_line

# The optimizers of a run by name; a training step steps all optimizers.
Optimizers = dict[str, torch.optim.Optimizer]
_PEAK = "peak_lr"
# Patterns of the names of parameters, by kind.
KINDS = {
    "embeddings": ("tokens.*", "positions.*"),
    "head": ("head.*",),
    "norms": ("norm.*", "blocks.*.norm?.*", "*.q_norm.*", "*.k_norm.*"),
    "biases": ("*.bias",),
    "matrices": tuple(f"blocks.*.{layer}.weight" for layer in ("qkv", "q", "kv", "out", "up", "gate", "down")),
}
# How many matrices of equal shape are stacked in one weight, by the end of its name.
FUSED_PROJECTIONS = {".attention.qkv.weight": 3, ".attention.kv.weight": 2}


class ParameterGroup(Section, frozen=True):
    """A factor of the learning rate, and a weight decay, for some parameters."""

    lr_factor: Positive | None = None
    weight_decay: NonNegative | None = None


class OptimConfig(Section, frozen=True):
    """How weights are updated."""

    aliases: ClassVar = {
        "learning_rate": "lr",
        "optimizer": "name",
        "max_grad_norm": "grad_clip",
        "clip_grad_norm": "grad_clip",
    }

    # ``"adamw"``, or ``"muon"`` for the matrices of the blocks and AdamW for the rest.
    name: Literal["adamw", "muon"] = "adamw"
    # The peak learning rate of AdamW.
    lr: Positive = 1e-3
    # The peak learning rate and the momentum of Muon.
    muon_lr: Positive = 0.02
    muon_momentum: Decay = 0.95
    # Newton-Schulz steps in an update: fewer are faster and less exact.
    muon_steps: Annotated[int, Meta(ge=1, le=99)] = 5  # torch allows no more
    # ``"quintic"``, the same in each step, or ``"polar-express"``, the best one for each (see `POLAR_EXPRESS`): four of
    # its steps are about as good as five ``"quintic"`` ones.
    muon_polynomials: Literal["quintic", "polar-express"] = "quintic"
    # Decay of the mean squares that normalise the rows of an update (NorMuon, arXiv 2510.05491); 0 turns it off.
    muon_beta2: Decay = 0.0
    # Whether Muon orthogonalises queries, keys and values each by itself, not their fused projection.
    muon_split: bool = False
    # Weight decay of matrices. Vectors (biases, norms) do not decay.
    weight_decay: NonNegative = 0.1
    # See `torch.optim.AdamW`.
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    # The largest norm of the gradient; a larger gradient is scaled down to it. 0 for no limit.
    grad_clip: NonNegative = 1.0
    # Which of torch's AdamW: ``"default"``, ``"foreach"`` or ``"fused"``.
    implementation: Literal["default", "foreach", "fused"] = "default"
    # Settings of ``"embeddings"``, ``"head"``, ``"norms"``, ``"biases"`` or ``"matrices"``, or of names that match a
    # pattern such as ``"blocks.0.*"``. Where several match, the last one that states a setting decides.
    groups: dict[str, ParameterGroup] = {}  # noqa: RUF012  # msgspec copies it for each instance


def build_optimizers(model: nn.Module, config: OptimConfig) -> Optimizers:
    """Return the optimizers of a model.

    Matrices decay, vectors (biases and the weights of norms) do not, as in GPT-3 (Brown et al., arXiv 2005.14165).
    ``"muon"`` updates the matrices of the blocks by orthogonalised momentum (Jordan et al., 2024), the other parameters
    by AdamW (Loshchilov and Hutter, arXiv 1711.05101). Raises UsageError if a group has no parameter.
    """
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    for group in config.groups:
        if not any(_matches(name, group) for name in parameters):
            tied = group == "head" and "head.weight" not in parameters
            raise UsageError(
                f"optim.groups has {group!r}, and no trained parameter is in it",
                remedy="a tied head is the embedding: give 'embeddings'"
                if tied
                else f"give one of {', '.join(KINDS)}, or a pattern of names such as 'blocks.0.*'",
            )
    hidden = {name: each for name, each in parameters.items() if name.startswith("blocks.") and each.ndim == 2}
    if config.name == "adamw":
        return {"adamw": _adamw(parameters, config)}
    muon = Muon(
        [part for group in _muon_groups(hidden, config) for part in _parts(group, hidden, config)],
        lr=config.muon_lr,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        ns_steps=config.muon_steps,
    )
    rest = {name: each for name, each in parameters.items() if name not in hidden}
    return {"muon": muon, "adamw": _adamw(rest, config)}


def _muon_groups(hidden: Mapping[str, nn.Parameter], config: OptimConfig) -> Iterator[dict[str, Any]]:
    """Yield the groups of Muon. Keys that torch's Muon lacks are there only where their setting is on."""
    shared: dict[str, Any] = {_PEAK: config.muon_lr}
    shared |= {"polar_express": True} if config.muon_polynomials == "polar-express" else {}
    shared |= {"beta2": config.muon_beta2} if config.muon_beta2 else {}
    groups: dict[int, list[nn.Parameter]] = {1: []}
    for name, each in hidden.items():
        groups.setdefault(fused_projections(name) if config.muon_split else 1, []).append(each)
    for count, parameters in groups.items():
        yield {"params": parameters, **shared} | ({"projections": count} if count > 1 else {})


def fused_projections(name: str) -> int:
    return next((count for end, count in FUSED_PROJECTIONS.items() if name.endswith(end)), 1)


def _matches(name: str, group: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in KINDS.get(group, (group,)))


def _parts(group: dict[str, Any], named: Mapping[str, nn.Parameter], config: OptimConfig) -> Iterator[dict[str, Any]]:
    """Split a group into groups with equal settings; yield the group itself if no setting is changed."""
    if not config.groups:
        yield group
        return
    # By identity: `==` of two tensors compares their elements.
    names = {id(each): name for name, each in named.items()}
    parts: dict[tuple[float, float | None], list[nn.Parameter]] = {}
    for parameter in group["params"]:
        factor, decay = 1.0, None
        # The last match that states a setting decides.
        for pattern, changed in config.groups.items():
            if _matches(names[id(parameter)], pattern):
                factor = factor if changed.lr_factor is None else changed.lr_factor
                decay = decay if changed.weight_decay is None else changed.weight_decay
        parts.setdefault((factor, decay), []).append(parameter)
    for (factor, decay), parameters in parts.items():
        changes = {} if decay is None else {"weight_decay": decay}
        yield {**group, "params": parameters, _PEAK: group[_PEAK] * factor, **changes}


def _adamw(named: Mapping[str, nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    matrices = [each for each in named.values() if each.ndim >= 2]
    vectors = [each for each in named.values() if each.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay, _PEAK: config.lr},
        {"params": vectors, "weight_decay": 0.0, _PEAK: config.lr},
    ]
    return torch.optim.AdamW(
        [part for group in groups if group["params"] for part in _parts(group, named, config)],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        # None leaves the choice to torch.
        foreach=True if config.implementation == "foreach" else None,
        fused=True if config.implementation == "fused" else None,
    )


def check_optimizers(config: OptimConfig, device: torch.device) -> None:
    """Raise UsageError if torch has no such AdamW for a device."""
    parameter = nn.Parameter(torch.zeros(1, 1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        # Torch checks the device in the first step only.
        _adamw({"": parameter}, msgspec.structs.replace(config, groups={})).step()
    except RuntimeError as error:
        reason = first_line(error)
        raise UsageError(
            f"optim.implementation is {config.implementation!r}, which is not supported on {device}: {reason}",
            remedy='give "default"',
        ) from error


def weights_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def with_changed_states(state: dict[str, Any], change: Callable[[int, str, Any], Any]) -> dict[str, Any]:
    """Return the ``state_dict()`` of an optimizer with ``change(number of the weight, key, value)`` for each value."""
    states = {
        index: {key: change(index, key, value) for key, value in each.items()} for index, each in state["state"].items()
    }
    return {**state, "state": states}


def set_learning_rate(optimizers: Optimizers, factor: float) -> None:
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = factor * group[_PEAK]


class WeightAverage:
    """An exponential moving average of named parameters (Polyak and Juditsky, 1992); none if the decay is 0."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._decay = decay
        self._parameters = parameters if decay else {}
        self._averages = [tensor.clone() for tensor in self._live]

    @property
    def _live(self) -> list[Tensor]:
        # Looked up each time: techniques that shard the parameters may give them other memory.
        return [parameter.data for parameter in self._parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        if self._averages:
            # The first weights are random: an average that keeps them for 1 / (1 - decay) steps starts far too high.
            decay = min(self._decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self._averages, self._live, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averaged weights into the model within the block; no effect if nothing is averaged."""
        own = [tensor.clone() for tensor in self._live]
        self._set(self._averages)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for live, value in zip(self._live, values, strict=True):
            live.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._parameters, self._averages, strict=True))
