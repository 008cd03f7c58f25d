"""Sharded parameters: optimizers, averages and checkpoints of a model whose parameters are DTensors.

Checkpoints hold full tensors, laid out as those of one process, so any number of processes can resume. The tools of
`torch.distributed.checkpoint.state_dict` are not used: they name optimizer states by parameter, and step an optimizer
to create them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.world import World
from tensorkeep.train.techniques.parallel import Parallel


class ShardedParallel(Parallel):
    """A technique that shards the parameters of the model."""

    def configure(self, config: Config) -> Config:
        """Refuse optimizers that need full matrices."""
        if config.optim.name == "muon":
            raise UsageError(
                f"optim.name is 'muon', which orthogonalises full matrices, and {self.name} shards them",
                remedy="give optim.name adamw, or use ddp",
            )
        return config

    def check_sharded(self, run: Run, placements: Mapping[str, Shard]) -> None:
        """Raise TechniqueNotActiveError unless parameters are sharded, and the optimizers update the model's."""
        shards, size = sharded_parameters(run.model), run.world.size
        plain = [name for name, placement in placements.items() if not _is_placed(shards.get(name), placement, size)]
        if plain:
            raise self.not_active(f"{len(plain)} of {len(placements)} parameters are not sharded, such as {plain[0]}")
        groups = (group for optimizer in run.optimizers.values() for group in optimizer.param_groups)
        if {id(each) for group in groups for each in group["params"]} != {id(each) for each in run.model.parameters()}:
            raise self.not_active("the optimizers update tensors that are not the model's")


def _is_placed(parameter: DTensor | None, placement: Shard, size: int) -> bool:
    return parameter is not None and parameter.placements == (placement,) and parameter.device_mesh.size() == size


class ShardLayout:
    """Makes full tensors of shards, and shards of full tensors.

    ``rows`` is for parameters whose rows are not sharded in their order: int64, the numbers of the rows in the order in
    which the processes have them.
    """

    def __init__(self, world: World, rows: Mapping[str, Tensor] | None = None) -> None:
        self._world = world
        self._rows = rows or {}

    def full(self, name: str, shard: Any) -> Tensor:
        """Return the full tensor of a shard of a parameter or its state; empty in processes that do not save it."""
        found = self._world.kept(shard.full_tensor())
        if name not in self._rows or not found.numel():
            return found
        return torch.empty_like(found).index_copy_(0, self._rows[name], found)

    def shard(self, name: str, full: Tensor, like: DTensor) -> DTensor:
        """Return this process's shard of a full tensor, placed like another."""
        if name in self._rows:
            full = full.index_select(0, self._rows[name].to(full.device))
        # Every process has the full tensor, so nothing is sent.
        return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def use_sharded_parameters(run: Run, before: Mapping[str, nn.Parameter], layout: ShardLayout) -> None:
    """Give the optimizers and the average the sharded parameters, and make checkpoints hold full tensors.

    ``before`` has the parameters that the model was built with; now they are DTensors.
    """
    now = dict(run.model.named_parameters())
    new = {id(old): now[name] for name, old in before.items()}
    for optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [new[id(each)] for each in group["params"]]
        _save_full_states(optimizer, run.model, layout)
    run.average = _ShardedAverage(run.model, run.config.ema.decay, layout)
    _save_full_weights(run.model, layout)
    clip = run.operations.clip

    def clip_to_full_norm() -> Tensor:
        norm = clip()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    run.operations.clip = clip_to_full_norm


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    """Return the parameters of a model that are DTensors, by name; tied ones under each of their names."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: each.data for name, each in found if isinstance(each.data, DTensor)}


def _save_full_weights(model: nn.Module, layout: ShardLayout) -> None:
    def gather(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        # Tied weights share their memory in a checkpoint too.
        full: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in full:
                full[id(parameter)] = layout.full(name, parameter.data)
            state[prefix + name] = full[id(parameter)]

    def shard(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, parameter in sharded_parameters(module).items():
            state[prefix + name] = layout.shard(name, state[prefix + name], parameter)

    model.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(shard)  # type: ignore[no-untyped-call]


def _save_full_states(optimizer: torch.optim.Optimizer, model: nn.Module, layout: ShardLayout) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def with_states(state: dict[str, Any], change: Callable[[str, Any, Any], Any]) -> dict[str, Any]:
        states = {
            index: {key: change(names[id(parameters[index])], parameters[index], value) for key, value in each.items()}
            for index, each in state["state"].items()
        }
        return {**state, "state": states}

    def gather(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return with_states(
            state, lambda name, parameter, value: layout.full(name, value) if isinstance(value, DTensor) else value
        )

    def shard(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        def sharded(name: str, parameter: Any, value: Any) -> Any:
            is_full = isinstance(value, Tensor) and value.shape == parameter.shape
            return layout.shard(name, value, parameter.data) if is_full else value

        return with_states(state, sharded)

    optimizer.register_state_dict_post_hook(gather)
    optimizer.register_load_state_dict_pre_hook(shard)


class _ShardedAverage(WeightAverage):
    """An average that is sharded like the weights."""

    def __init__(self, model: nn.Module, decay: float, layout: ShardLayout) -> None:
        super().__init__(model, decay)
        self._layout = layout

    def state_dict(self) -> dict[str, Any]:
        """Return the full averages by parameter."""
        return {name: self._layout.full(name, each) for name, each in super().state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        shards: dict[str, Any] = super().state_dict()
        super().load_state_dict({name: self._layout.shard(name, state[name], like) for name, like in shards.items()})
