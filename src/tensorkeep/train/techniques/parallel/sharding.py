"""Sharded parameters: optimizers, averages and checkpoints of a model whose parameters are DTensors.

A checkpoint has the names, keys and full shapes of one process, so any number of processes can resume. DTensors state
which part of each tensor a rank has; where that would not be true, `in_order` corrects it.
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
from tensorkeep.formats.base import box_of
from tensorkeep.state.sharded import ShardedLeaf
from tensorkeep.train.config.config import Config
from tensorkeep.train.optim.average import WeightAverage
from tensorkeep.train.optim.optimizers import weights_of
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.parallel import Parallel, share_muon
from tensorkeep.train.techniques.parallel.filling import fill_parameters, update_parameters
from tensorkeep.train.techniques.parallel.mesh import SHARD, TENSOR, mesh_of

_FUSED = {".attention.qkv.": 3, ".attention.convolution.": 3, ".attention.kv.": 2}
"""Layers of several parts one below the other, each of which is sharded by heads; and how many parts."""


class ShardedParallel(Parallel):
    """A technique that shards the parameters of the model along one dimension of a mesh; see `mesh`.

    Of two such techniques that are on together, tensor parallelism is applied first.
    """

    fills_model: ClassVar = True
    axis: ClassVar[str]
    """The dimension of the mesh."""

    def configure(self, config: Config) -> Config:
        """Refuse Muon where matrices are sharded by columns, too."""
        if config.optim.name == "muon" and self.axis == TENSOR:
            raise UsageError(
                f"optim.name is 'muon', which orthogonalises full matrices, and {self.name} shards them by columns",
                remedy="give optim.name adamw, or use ddp, fsdp or hsdp",
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
            use_sharded_parameters(run, mesh)

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
        updated = {id(each) for optimizer in run.optimizers.values() for each in weights_of(optimizer)}
        if updated != {id(each) for each in run.model.parameters()}:
            raise self.not_active("the optimizers update tensors that are not the model's")


def _is_placed(parameter: DTensor | None, axis: str, dim: int, count: int) -> bool:
    names = None if parameter is None else parameter.device_mesh.mesh_dim_names
    if parameter is None or names is None or axis not in names:
        return False
    placement = parameter.placements[names.index(axis)]
    is_shard = isinstance(placement, Shard | _StridedShard) and placement.dim == dim
    return is_shard and parameter.device_mesh.shape[names.index(axis)] == count


def in_order(name: str, parameter: Any) -> Any:
    """Return a parameter, or its state, with placements that state which rows of the full tensor this rank has.

    Of fused layers, such as the projection to queries, keys and values, tensor parallelism gives each rank the heads
    that it computes: a part of each third. The placement of the computation, ``Shard(0)``, does not state that;
    ``_StridedShard`` does. The memory is shared.
    """
    names = parameter.device_mesh.mesh_dim_names or ()
    fused = next((parts for layer, parts in _FUSED.items() if layer in name), None)
    if fused is None or TENSOR not in names:
        return parameter
    placements = list(parameter.placements)
    placements[names.index(TENSOR)] = _StridedShard(0, split_factor=fused)
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
        piece.array.copy_(full[box_of(piece.offsets, piece.shape)])


def use_sharded_parameters(run: Run, mesh: DeviceMesh) -> None:
    """Average the sharded parameters, make checkpoints state their rows, and clip by the norm of all shards."""
    share_muon(run)
    run.average = WeightAverage(dict(run.model.named_parameters()), run.config.ema.decay)
    if TENSOR in (mesh.mesh_dim_names or ()):
        run.in_checkpoint["model"] = lambda: _weights_in_order(run.model)
        run.in_checkpoint["average"] = lambda: {n: in_order(n, each) for n, each in run.average.state_dict().items()}
        names = {id(each): name for name, each in run.model.named_parameters()}
        optimizers = {name: _OptimizerInOrder(each, names) for name, each in run.optimizers.items()}
        run.in_checkpoint["optimizers"] = lambda: optimizers
    clip = run.operations.clip

    def clip_to_full_norm() -> Tensor:
        norm = clip()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    run.operations.clip = clip_to_full_norm


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    """Return the parameters of a model that are DTensors, by name; tied ones under each of their names."""
    found = model.named_parameters(remove_duplicate=False)
    return {name: each.data for name, each in found if isinstance(each.data, DTensor)}


def _weights_in_order(model: nn.Module) -> dict[str, Any]:
    weights = model.state_dict()
    for name, weight in weights.items():
        weights[name] = in_order(name, weight)
    return weights


class _OptimizerInOrder(torch.optim.Optimizer):
    """An optimizer as checkpoints have it: its parameters and their states state which rows they have.

    Only what saving and loading call is here. A load divides a new state as the parameter is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        groups = self._optimizer.param_groups
        return [
            {**group, "params": [in_order(self._names[id(each)], each.data) for each in group["params"]]}
            for group in groups
        ]

    def state_dict(self) -> dict[str, Any]:
        return self._with_states(
            self._optimizer.state_dict(), lambda parameter, value: in_order(self._names[id(parameter)], value)
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def as_computed(parameter: Any, value: DTensor) -> DTensor:
            return _like(parameter.data, value.to_local(), parameter.data.placements)

        self._optimizer.load_state_dict(self._with_states(state, as_computed))

    def _with_states(self, state: dict[str, Any], change: Callable[[Any, DTensor], DTensor]) -> dict[str, Any]:
        """Return an optimizer's state with other DTensors."""
        parameters = weights_of(self._optimizer)
        states = {
            index: {
                key: change(parameters[index], value) if isinstance(value, DTensor) else value
                for key, value in found.items()
            }
            for index, found in state["state"].items()
        }
        return {**state, "state": states}
