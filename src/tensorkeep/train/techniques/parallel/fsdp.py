"""Fully sharded data parallel: each process keeps a shard of every tensor, and gathers a block to compute it."""

from typing import ClassVar

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Verification
from tensorkeep.train.techniques.parallel import shard_batches
from tensorkeep.train.techniques.parallel.sharding import (
    ShardedParallel,
    ShardLayout,
    sharded_parameters,
    use_sharded_parameters,
)
from tensorkeep.units import format_bytes


class Fsdp(ShardedParallel):
    """Zhao et al., arXiv 2304.11277, with torch's FSDP2: weights, gradients and optimizer states are sharded."""

    name: ClassVar = "fsdp"
    summary: ClassVar = "shards weights, gradients and optimizer states among processes, and gathers block by block"
    effect: ClassVar = "state memory is divided by the number of devices; 1.5 times the communication of ddp"
    reference: ClassVar = "arXiv 2304.11277; torch.distributed.fsdp.fully_shard"

    def apply(self, run: Run) -> None:
        """Shard the model, block by block, and the batches."""
        shard_batches(run)
        before = dict(run.model.named_parameters())
        mesh = init_device_mesh(run.device.type, (run.world.size,))
        for block in run.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # The root too: by default it would keep what it gathered in an evaluation until the next step.
        fully_shard(run.model, mesh=mesh, reshard_after_forward=True)
        # Generation calls this instead of the model.
        register_fsdp_forward_method(run.model, "last_logits")
        if run.device.type == "cpu":
            # Gloo has no averages.
            for module in (*run.model.blocks, run.model):
                module.set_force_sum_reduction_for_comms(True)
        use_sharded_parameters(run, before, ShardLayout(run.world))

    def verify(self, run: Run) -> Verification:
        """Check that every parameter is sharded, and what the optimizers update."""
        yield
        self.check_sharded(run, {name: Shard(0) for name, _ in run.model.named_parameters()})
        shards = sharded_parameters(run.model)
        own = [shards[name] for name, _ in run.model.named_parameters()]
        full, local = sum(each.nbytes for each in own), sum(each.to_local().nbytes for each in own)
        return Proof(
            f"{len(own)} parameters are sharded among {run.world.size} processes; this one has {format_bytes(local)} "
            f"of {format_bytes(full)}",
            parameters=len(own),
            processes=run.world.size,
            local_bytes=local,
            whole_bytes=full,
        )
