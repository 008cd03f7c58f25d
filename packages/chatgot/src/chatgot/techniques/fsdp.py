"""Fully sharded data parallel: each process keeps a shard of every tensor, and gathers a block to compute it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from chatgot.settings import Steps
from chatgot.techniques.base import Proof, Section, StepState, Verification
from chatgot.techniques.distributed import (
    REPLICATE,
    SHARD,
    ParallelTechnique,
    ShardingTechnique,
    data_rank,
    mesh_of,
    shard_batches,
    sharded_parameters,
)
from chatgot.techniques.observe import observe_operation
from tensorkeep.ext import format_bytes


class FsdpSettings(Section, frozen=True):
    """When gradients are exchanged."""

    # Exchange and shard the gradient after each micro-batch of a step. By default only after the last one: less
    # communication, but until then each process holds an unsharded gradient.
    sync_each_batch: bool = False


class HsdpSettings(FsdpSettings, frozen=True):
    """How many copies of the model there are, and when gradients are exchanged."""

    # Copies of the model; each copy is sharded among as many processes. 0: one copy for each machine, or 2 on a single
    # machine.
    replicas: Steps = 0


class Fsdp(ShardingTechnique):
    """Zhao et al., arXiv 2304.11277, with torch's FSDP2: weights, gradients and optimizer states are sharded."""

    name: ClassVar = "fsdp"
    aliases: ClassVar = ("fsdp2", "fully-sharded", "zero")
    axis: ClassVar = SHARD
    summary: ClassVar = "shards weights, gradients and optimizer states among processes, and gathers block by block"
    effect: ClassVar = "state memory is divided by the number of devices; 1.5 times the communication of ddp"
    reference: ClassVar = "arXiv 2304.11277; torch.distributed.fsdp.fully_shard"
    conflicts: ClassVar = {name: why for name, why in ParallelTechnique.conflicts.items() if name != "tensor-parallel"}
    after: ClassVar = ("tensor-parallel",)
    settings: FsdpSettings

    @contextmanager
    def process(self) -> Iterator[None]:
        with warnings.catch_warnings():
            # Beside tensor parallelism, the logits are a view of a DTensor. Nothing changes them in place.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            yield

    def shard(self, run: StepState, mesh: DeviceMesh) -> None:
        shard_batches(run, *data_rank(mesh))
        # The mesh may have a dimension of tensor parallelism too, which has sharded every matrix before.
        replicated = REPLICATE in (mesh.mesh_dim_names or ())
        own_mesh = mesh[REPLICATE, SHARD] if replicated else mesh[SHARD]
        # Block by block: at most the weights of a block are gathered at a time.
        for block in run.model.blocks:
            fully_shard(block, mesh=own_mesh, reshard_after_forward=True)
        # Reshard the root too: by default it keeps the weights that an evaluation gathered until the next step.
        model = fully_shard(run.model, mesh=own_mesh, reshard_after_forward=True)
        # Generation calls `last_logits` instead of `forward`, and needs the gathered weights as well.
        register_fsdp_forward_method(run.model, "last_logits")
        if run.device.type == "cpu":
            # Gloo has no averaging all-reduce.
            for module in (*run.model.blocks, run.model):
                module.set_force_sum_reduction_for_comms(True)
        if self.settings.sync_each_batch:
            return
        inner = run.operations.loss

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            model.set_requires_gradient_sync(run.is_last_batch)
            return inner(inputs, targets)

        run.operations.loss = loss

    def verify(self, run: StepState) -> Verification:
        exchanged: list[int] = []

        def count() -> None:
            # A parameter has no gradient until its shard of the sum over all processes has arrived.
            exchanged.append(sum(each.grad is not None for each in run.model.parameters()))

        with observe_operation(run, "backward", after=count):
            yield
        mesh, parameters = mesh_of(run), [name for name, _ in run.model.named_parameters()]
        self.check_sharded(run, dict.fromkeys(parameters, 0))
        # A gradient that exists after an earlier micro-batch was exchanged too soon.
        early = [] if self.settings.sync_each_batch else exchanged[:-1]
        if any(early) or exchanged[-1] != len(parameters):
            raise self.not_active(
                f"after each micro-batch {exchanged} of {len(parameters)} gradients had been exchanged; all should be, "
                "after the last one only"
            )
        shards = sharded_parameters(run.model)
        full, local = sum(shards[n].nbytes for n in parameters), sum(shards[n].to_local().nbytes for n in parameters)
        sizes = {f"{name}_size": mesh[name].size() for name in mesh.mesh_dim_names or ()}
        exchanges = sum(count > 0 for count in exchanged)
        copies = f", in {mesh[REPLICATE].size()} copies" if REPLICATE in (mesh.mesh_dim_names or ()) else ""
        return Proof(
            f"{len(parameters)} parameters are sharded among {mesh[SHARD].size()} processes{copies}; this one has "
            f"{format_bytes(local)} of {format_bytes(full)}; gradients were exchanged "
            f"after {exchanges} of {len(exchanged)} micro-batches",
            parameters=len(parameters),
            processes=run.world.size,
            local_bytes=local,
            whole_bytes=full,
            batches=len(exchanged),
            exchanges=exchanges,
            **sizes,
        )


class Hsdp(Fsdp):
    name: ClassVar = "hsdp"
    summary: ClassVar = "shards like fsdp within a machine, and averages the gradients of the machines' copies"
    effect: ClassVar = "less communication between machines than fsdp; state memory is divided by the shards of a copy"
    reference: ClassVar = "arXiv 2304.11277, section 3.2.2; torch.distributed.fsdp.fully_shard with a 2-D mesh"
    settings: HsdpSettings
