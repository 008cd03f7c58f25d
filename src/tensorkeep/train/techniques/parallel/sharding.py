"""Sharded parameters: optimizers, averages and checkpoints of a model whose parameters are DTensors.

Checkpoints hold full tensors, laid out as those of one process, so any number of processes can resume. The tools of
`torch.distributed.checkpoint.state_dict` are not used: they name optimizer states by parameter, and step an optimizer
to create them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tensorkeep.errors import UsageError
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.train.config.config import Config
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.world import World
from tensorkeep.train.techniques.parallel import Parallel
from tensorkeep.train.techniques.parallel.filling import fill_parameters, update_parameters
from tensorkeep.train.techniques.parallel.mesh import SHARD, TENSOR, mesh_of


class ShardedParallel(Parallel):
    """A technique that shards the parameters of the model along one dimension of a mesh; see `mesh`.

    Of two such techniques that are on together, tensor parallelism is applied first.
    """

    fills_model: ClassVar = True
    axis: ClassVar[str]
    """The dimension of the mesh."""

    def configure(self, config: Config) -> Config:
        """Refuse optimizers that need full matrices."""
        if config.optim.name == "muon":
            raise UsageError(
                f"optim.name is 'muon', which orthogonalises full matrices, and {self.name} shards them",
                remedy="give optim.name adamw, or use ddp",
            )
        return config

    def apply(self, run: Run) -> None:
        """Shard the model, which is on the meta device; the last such technique makes the shards of this process."""
        before, mesh = dict(run.model.named_parameters()), mesh_of(run)
        self.shard(run, mesh)
        last = self.axis == (SHARD if SHARD in (mesh.mesh_dim_names or ()) else TENSOR)
        if last:
            fill_shards(run)
        update_parameters(run, before)
        if last:
            use_sharded_parameters(run, ShardLayout(run.world, run.model))

    @abstractmethod
    def shard(self, run: Run, mesh: DeviceMesh) -> None:
        """Shard the parameters of the model along the dimension."""

    def check_sharded(self, run: Run, dimensions: Mapping[str, int]) -> None:
        """Raise TechniqueNotActiveError unless parameters are sharded, and the optimizers update the model's.

        ``dimensions`` has the dimension along which each parameter is sharded.
        """
        shards, count = sharded_parameters(run.model), mesh_of(run)[self.axis].size()
        plain = [name for name, dim in dimensions.items() if not _is_placed(shards.get(name), self.axis, dim, count)]
        if plain:
            raise self.not_active(f"{len(plain)} of {len(dimensions)} parameters are not sharded, such as {plain[0]}")
        groups = (group for optimizer in run.optimizers.values() for group in optimizer.param_groups)
        if {id(each) for group in groups for each in group["params"]} != {id(each) for each in run.model.parameters()}:
            raise self.not_active("the optimizers update tensors that are not the model's")


def _is_placed(parameter: DTensor | None, axis: str, dim: int, count: int) -> bool:
    names = None if parameter is None else parameter.device_mesh.mesh_dim_names
    if parameter is None or names is None or axis not in names:
        return False
    placement = parameter.placements[names.index(axis)]
    is_shard = isinstance(placement, Shard | _StridedShard) and placement.dim == dim
    return is_shard and parameter.device_mesh.shape[names.index(axis)] == count


def in_order(name: str, parameter: DTensor) -> DTensor:
    """Return a parameter, or its state, with placements that state which rows of the full tensor this rank has.

    Of the fused projection to queries, keys and values, tensor parallelism gives each rank the heads that it computes:
    a part of each third. The placement of its matmul, ``Shard(0)``, does not state that; ``_StridedShard`` does.
    The memory is shared.
    """
    names = parameter.device_mesh.mesh_dim_names or ()
    if ".attention.qkv." not in name or TENSOR not in names:
        return parameter
    placements = list(parameter.placements)
    placements[names.index(TENSOR)] = _StridedShard(0, split_factor=3)
    return _like(parameter, parameter.to_local(), placements)


def _like(parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def fill_shards(run: Run) -> None:
    """Make the shards of this process; see `fill_parameters`."""

    def shard_of(name: str, parameter: Any, full: Tensor) -> DTensor:
        local = torch.empty_like(parameter.to_local(), device=run.device)
        shard = _like(parameter, local, parameter.placements)
        copy_boxes(name, full, shard)
        return shard

    fill_parameters(run, shard_of)


def copy_boxes(name: str, full: Tensor, shard: DTensor) -> None:
    """Copy the part of a full tensor that this process has into its shard of a parameter or its state."""
    leaf = ShardedLeaf.of(name, in_order(name, shard))
    for piece in leaf.pieces() if leaf is not None else ():
        box = tuple(slice(start, start + length) for start, length in zip(piece.offsets, piece.shape, strict=True))
        piece.array.copy_(full[box])


class ShardLayout:
    """Makes full tensors of shards, and shards of full tensors."""

    def __init__(self, world: World, model: GPT) -> None:
        self._world = world
        names = (world.mesh.mesh_dim_names or ()) if world.mesh is not None else ()
        size = world.mesh[TENSOR].size() if world.mesh is not None and TENSOR in names else 1
        width = model.config.d_model
        self._rows = torch.arange(3 * width).view(3, size, width // size).transpose(0, 1).flatten()

    def full(self, name: str, shard: Any) -> Tensor:
        """Return the full tensor of a shard of a parameter or its state; empty in processes that do not save it."""
        found = self._world.kept(shard.full_tensor())
        if ".attention.qkv." not in name or not found.numel():
            return found
        return torch.empty_like(found).index_copy_(0, self._rows, found)

    def shard(self, name: str, full: Tensor, like: DTensor) -> DTensor:
        """Return this process's shard of a full tensor, placed like another."""
        found = _like(like, torch.empty_like(like.to_local(), dtype=full.dtype), like.placements)
        copy_boxes(name, full, found)
        return found


def use_sharded_parameters(run: Run, layout: ShardLayout) -> None:
    """Average the sharded parameters, make checkpoints hold full tensors, and clip by the norm of all shards."""
    for optimizer in run.optimizers.values():
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
