"""The mesh of a run's ranks: its dimensions, which the techniques that shard the model share, and their sizes.

``replicate`` counts copies of the model, ``shard`` the shards of each copy, and ``tensor`` the processes that compute
each matmul together. A dimension exists if its technique is on. Neighbouring ranks differ in the last dimension, so
that the processes that communicate most are on the same machine.
"""

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tensorkeep.errors import UsageError
from tensorkeep.train.config.sections import Section, Steps, read_settings
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.world import launched_machines

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


class FsdpSettings(Section, frozen=True):
    """When gradients are exchanged.

    Attributes
    ----------
    sync_each_batch : bool
        Exchange and shard the gradient after each micro-batch of a step. By default only after the last one: less
        communication, but until then each process holds an unsharded gradient.
    """

    sync_each_batch: bool = False


class HsdpSettings(FsdpSettings, frozen=True):
    """How many copies of the model there are, and when gradients are exchanged.

    Attributes
    ----------
    replicas : int
        Copies of the model; the shards of each are divided among as many processes. 0: one copy for each machine, or 2
        on a single machine.
    sync_each_batch : bool
        Exchange and shard the gradient after each micro-batch of a step. By default only after the last one: less
        communication, but until then each process holds an unsharded gradient.
    """

    replicas: Steps = 0


class TensorSettings(Section, frozen=True):
    """How many processes compute each matmul together.

    Attributes
    ----------
    degree : int
        Processes that share the heads and the hidden units of every block. 0: all processes, or 2 beside fsdp or hsdp.
    """

    degree: Steps = 0


def mesh_sizes(techniques: Mapping[str, Mapping[str, Any]], size: int, machines: int = 1) -> dict[str, int]:
    """Return the dimensions of the mesh of ``size`` processes and their sizes, from the settings of techniques.

    Raises UsageError if the processes cannot be divided in this way, or a technique would have nothing to divide.

    Examples
    --------
    >>> mesh_sizes({"fsdp": {}}, 8)
    {'shard': 8}
    >>> mesh_sizes({"hsdp": {}}, 8, machines=4)
    {'replicate': 4, 'shard': 2}
    >>> mesh_sizes({"fsdp": {}, "tensor-parallel": {"degree": 4}}, 8)
    {'shard': 2, 'tensor': 4}
    """
    replicates, shards = "hsdp" in techniques, "hsdp" in techniques or "fsdp" in techniques
    replicas = tensor = 1
    if replicates:
        wanted = read_settings(techniques["hsdp"], HsdpSettings).replicas
        replicas = wanted or min(size, machines if machines > 1 else 2)
    if "tensor-parallel" in techniques:
        wanted = read_settings(techniques["tensor-parallel"], TensorSettings).degree
        tensor = wanted or (min(size, 2) if shards else size)
    found = {REPLICATE: replicas, SHARD: size // (replicas * tensor) or 1, TENSOR: tensor}
    on = {REPLICATE: replicates, SHARD: shards, TENSOR: "tensor-parallel" in techniques}
    found = {name: count for name, count in found.items() if on[name]}
    _check(found, size)
    return found


def _check(found: dict[str, int], size: int) -> None:
    product = 1
    for count in found.values():
        product *= count
    sizes = " x ".join(f"{count} ({name})" for name, count in found.items())
    if product != size:
        raise UsageError(
            f"{size} processes are not a mesh of {sizes}",
            remedy="give techniques.tensor-parallel.degree and techniques.hsdp.replicas, whose product must divide the "
            "number of processes; tensor-parallel alone takes all of them, and fsdp or hsdp divides the rest",
        )
    if size > 1 and 1 in found.values():
        idle = next(name for name, count in found.items() if count == 1)
        technique = "tensor-parallel" if idle == TENSOR else "hsdp" if REPLICATE in found else "fsdp"
        raise UsageError(
            f"{size} processes are a mesh of {sizes}, so that nothing is divided along {idle!r}",
            remedy=f"start at least {2 ** len(found)} processes, or leave {technique} out",
        )


def mesh_of(run: Run) -> DeviceMesh:
    """Return the mesh of a run; it is made once, by all ranks together."""
    world = run.world
    if world.mesh is None:
        sizes = mesh_sizes(run.config.techniques, world.size, launched_machines())
        world.mesh = init_device_mesh(run.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if SHARD in sizes and TENSOR in sizes:
            # Then the norm of the gradient is one sum over both dimensions, which is the same in every process.
            world.mesh[SHARD, TENSOR]._flatten()
    return world.mesh


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return which part of each batch this rank computes, and the number of parts."""
    rank, count = 0, 1
    for name in (REPLICATE, SHARD):
        if name in (mesh.mesh_dim_names or ()):
            length = mesh[name].size()
            rank, count = rank * length + mesh.get_local_rank(name), count * length
    return rank, count
