"""Training one run with several processes: the base classes of ddp, fsdp, hsdp, tensor and pipeline parallelism.

A checkpoint has the names, keys and full shapes of one process, so any number of processes can resume.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from chatgot.optim.muon import Muon
from chatgot.optim.optimizers import WeightAverage, weights_of, with_changed_states
from chatgot.step.device import memory_errors_reported
from chatgot.step.world import can_join, launched_machines
from chatgot.techniques.base import Config, Machine, StepState, Technique
from chatgot.techniques.wrapped_batches import with_loop
from tensorkeep.errors import UsageError
from tensorkeep.ext.formats import box_of
from tensorkeep.ext.state import ShardedLeaf

# Techniques that distribute a run among processes, each in its own way.
PARALLEL_TECHNIQUES = ("ddp", "fsdp", "hsdp", "tensor-parallel", "pipeline-parallel")

# The dimensions of the one mesh that the sharding techniques share; each exists if its technique is on. They count the
# copies of the model, the shards of a copy, and the processes that compute a matmul together.
REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"

# Fused layers, and how many projections each stacks by rows; tensor parallelism shards each projection by heads.
_FUSED = {".attention.qkv.": 3, ".attention.convolution.": 3, ".attention.kv.": 2}


class FunctionModule(nn.Module):
    """A function with its parameters, for classes of torch that wrap a module. It has no buffers."""

    def __init__(self, parameters: Iterable[nn.Parameter], function: Callable[..., Any]) -> None:
        super().__init__()
        self.of_function = nn.ParameterList(parameters)
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


class ParallelTechnique(Technique):
    changes: ClassVar = "processes"
    # With dropout, each process draws other zeros; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    # Its own name has no effect: a technique is on once.
    conflicts: ClassVar = dict.fromkeys(PARALLEL_TECHNIQUES, "both need all ranks")

    # Whether the technique is applied to a model on the meta device, and makes the weights of this process.
    fills_model: ClassVar[bool] = False

    def missing(self, machine: Machine) -> str | None:
        if can_join():
            return None
        return f"needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train RECIPE --technique {self.name}"


def shard_batches(run: StepState, rank: int, count: int) -> None:
    """Let this process train one of ``count`` parts of every batch; UsageError if the batch size is not a multiple."""
    # `loop.batch_size` counts the rows of all processes together: they compute what one process would.
    run.batches.draw_part(rank, count)
    run.replicas, run.replica = count, rank
    # For this process only: another number of processes may resume the run.
    run.config = with_loop(run.config, batch_size=run.config.loop.batch_size // count)
    # The same seed would draw the same dropout zeros for different rows.
    torch.manual_seed(run.config.loop.seed + rank)


def distribute_muon(run: StepState) -> None:
    for optimizer in run.optimizers.values():
        if isinstance(optimizer, Muon):
            # Each rank orthogonalises some matrices instead of all.
            optimizer.ranks = run.world.group


def mesh_sizes(techniques: Mapping[str, Mapping[str, Any]], size: int, machines: int = 1) -> dict[str, int]:
    """Return the mesh dimensions of ``size`` processes and their sizes, such as ``{"shard": 2, "tensor": 4}``."""
    replicates, tensors = "hsdp" in techniques, "tensor-parallel" in techniques
    shards = replicates or "fsdp" in techniques
    replicas = degree = 1
    if replicates:
        replicas = int(techniques["hsdp"].get("replicas", 0)) or min(size, machines if machines > 1 else 2)
    if tensors:
        degree = int(techniques["tensor-parallel"].get("degree", 0)) or (min(size, 2) if shards else size)
    sizes = {}
    # In this order, because neighbouring ranks differ in the last dimension: the processes that communicate most are on
    # the same machine.
    if replicates:
        sizes[REPLICATE] = replicas
    if shards:
        sizes[SHARD] = size // (replicas * degree) or 1
    if tensors:
        sizes[TENSOR] = degree
    described = " x ".join(f"{count} ({name})" for name, count in sizes.items())
    if math.prod(sizes.values()) != size:
        raise UsageError(
            f"{size} processes are not a mesh of {described}",
            remedy="give techniques.tensor-parallel.degree and techniques.hsdp.replicas: their product must divide the "
            "number of processes; tensor-parallel alone takes all processes, and fsdp or hsdp shards over the rest",
        )
    if size > 1 and 1 in sizes.values():
        idle = next(name for name, count in sizes.items() if count == 1)
        technique = "tensor-parallel" if idle == TENSOR else "hsdp" if REPLICATE in sizes else "fsdp"
        raise UsageError(
            f"{size} processes are a mesh of {described}, so that nothing is sharded along {idle!r}",
            remedy=f"start at least {2 ** len(sizes)} processes, or leave {technique} out",
        )
    return sizes


def mesh_of(run: StepState) -> DeviceMesh:
    """Return the mesh of a run; the first call is a collective."""
    world = run.world
    if world.mesh is None:
        sizes = mesh_sizes(run.config.techniques, world.size, launched_machines())
        world.mesh = init_device_mesh(run.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if SHARD in sizes and TENSOR in sizes:
            # Flattened, the norm of the gradient is one sum over both dimensions, which is the same in every process.
            world.mesh[SHARD, TENSOR]._flatten()
    return world.mesh


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return which part of every batch this rank computes, and the number of parts."""
    rank, count = 0, 1
    for name in (REPLICATE, SHARD):
        if name in (mesh.mesh_dim_names or ()):
            length = mesh[name].size()
            # The tensor dimension is left out: its processes compute the same rows.
            rank, count = rank * length + mesh.get_local_rank(name), count * length
    return rank, count


# `(name, parameter, full) -> tensor`: this process's part of a parameter on the meta device, from all its values.
Keep = Callable[[str, Tensor, Tensor], Tensor]


@torch.no_grad()
def fill_parameters(run: StepState, keep: Keep) -> None:
    """Make the parameters of a model on the meta device, with the values that one process would draw."""
    model = run.model
    generator = torch.Generator().manual_seed(run.config.loop.seed)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    with memory_errors_reported(run.config.model):
        model.fill_tables(run.device)
        # Every process draws all values, one tensor after the other, and keeps its part: beside the kept parts this
        # needs the memory of one full tensor only.
        for name, parameter in list(model.named_parameters()):
            kept = nn.Parameter(keep(name, parameter.data, model.initial_value(name, generator)))
            # Assigned to every owner, so that tied weights stay tied.
            for module, attribute in owners[id(parameter)]:
                setattr(module, attribute, kept)


def update_parameters(run: StepState, before: Mapping[str, nn.Parameter]) -> None:
    after = dict(run.model.named_parameters())
    # By identity, because optimizers hold tensors without names.
    new = {id(old): after[name] for name, old in before.items()}
    for optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [new[id(each)] for each in group["params"]]


class ShardingTechnique(ParallelTechnique):
    """A technique that shards the parameters of the model along one dimension of the mesh, as DTensors."""

    fills_model: ClassVar = True
    # The dimension of the mesh.
    axis: ClassVar[str]

    def configure(self, config: Config) -> Config:
        if config.optim.name == "muon" and self.axis == TENSOR:
            raise UsageError(
                f"optim.name is 'muon', which orthogonalises full matrices, and {self.name} shards them by columns",
                remedy="give optim.name adamw, or use ddp, fsdp or hsdp",
            )
        return config

    def apply(self, run: StepState) -> None:
        """Shard the model, which is on the meta device. The last sharding technique makes this process's shards."""
        before, mesh = dict(run.model.named_parameters()), mesh_of(run)
        self.shard(run, mesh)
        # Tensor parallelism comes first, if both are on.
        last = self.axis == (SHARD if SHARD in (mesh.mesh_dim_names or ()) else TENSOR)
        if last:
            fill_parameters(run, lambda name, parameter, full: _shard_of(name, parameter, full, run.device))
        update_parameters(run, before)
        if last:
            use_sharded_parameters(run, mesh)

    @abstractmethod
    def shard(self, run: StepState, mesh: DeviceMesh) -> None:
        """Shard the parameters of the model along the dimension."""

    def check_sharded(self, run: StepState, dimensions: Mapping[str, int]) -> None:
        """Raise TechniqueNotActiveError unless parameters are sharded along ``dimensions``, and updated."""
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


def checkpoint_view(name: str, parameter: Any) -> Any:
    """Return a parameter or its state, in the same memory, with placements that state which rows this rank has."""
    names = parameter.device_mesh.mesh_dim_names or ()
    # Tensor parallelism gives each rank the heads that it computes: for a fused layer, a part of all stacked
    # projections. The placement of the computation, `Shard(0)`, does not state that; `_StridedShard` does.
    fused = next((parts for layer, parts in _FUSED.items() if layer in name), None)
    if fused is None or TENSOR not in names:
        return parameter
    placements = list(parameter.placements)
    placements[names.index(TENSOR)] = _StridedShard(0, split_factor=fused)
    return _dtensor_like(parameter, parameter.to_local(), placements)


def _dtensor_like(parameter: DTensor, local: Tensor, placements: Sequence[Placement]) -> DTensor:
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    # run_check would communicate; shape and stride are given because uneven shards do not determine them.
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _shard_of(name: str, parameter: Any, full: Tensor, device: torch.device) -> DTensor:
    # On the meta device the DTensor has a shape and a placement, and no memory.
    shard = _dtensor_like(parameter, torch.empty_like(parameter.to_local(), device=device), parameter.placements)
    leaf = ShardedLeaf.of(name, checkpoint_view(name, shard))
    for piece in leaf.pieces() if leaf is not None else ():
        piece.array.copy_(full[box_of(piece.offsets, piece.shape)])
    return shard


def use_sharded_parameters(run: StepState, mesh: DeviceMesh) -> None:
    """Average the sharded parameters, save their `checkpoint_view`, and clip by the norm of all shards."""
    distribute_muon(run)
    run.average = WeightAverage(dict(run.model.named_parameters()), run.config.ema.decay)
    if TENSOR in (mesh.mesh_dim_names or ()):
        names = {id(each): name for name, each in run.model.named_parameters()}
        optimizers = {name: _CheckpointedOptimizer(each, names) for name, each in run.optimizers.items()}
        run.in_checkpoint["model"] = lambda: _checkpoint_views(run.model.state_dict())
        run.in_checkpoint["average"] = lambda: _checkpoint_views(dict(run.average.state_dict()))
        run.in_checkpoint["optimizers"] = lambda: optimizers
    clip = run.operations.clip

    def clip_to_full_norm() -> Tensor:
        norm = clip()
        # The norm of DTensors is a partial sum until all ranks have added theirs.
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    run.operations.clip = clip_to_full_norm


def sharded_parameters(model: nn.Module) -> dict[str, DTensor]:
    # Tied parameters have each of their names.
    found = model.named_parameters(remove_duplicate=False)
    return {name: each.data for name, each in found if isinstance(each.data, DTensor)}


def _checkpoint_views(tensors: dict[str, Any]) -> dict[str, Any]:
    # In place: the state_dict() of a module has metadata as an attribute.
    for name, tensor in tensors.items():
        tensors[name] = checkpoint_view(name, tensor)
    return tensors


class _CheckpointedOptimizer(torch.optim.Optimizer):
    """An optimizer as checkpoints see it; it has only what saving and loading call."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [
            {**group, "params": [checkpoint_view(self._names[id(each)], each.data) for each in group["params"]]}
            for group in self._optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        return self._with_states(
            self._optimizer.state_dict(), lambda parameter, value: checkpoint_view(self._names[id(parameter)], value)
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Back to the placement of the computation, with the same memory.
        def as_computed(parameter: Any, value: DTensor) -> DTensor:
            return _dtensor_like(parameter.data, value.to_local(), parameter.data.placements)

        self._optimizer.load_state_dict(self._with_states(state, as_computed))

    def _with_states(self, state: dict[str, Any], change: Callable[[Any, DTensor], DTensor]) -> dict[str, Any]:
        parameters = weights_of(self._optimizer)
        return with_changed_states(
            state, lambda index, key, value: change(parameters[index], value) if isinstance(value, DTensor) else value
        )
