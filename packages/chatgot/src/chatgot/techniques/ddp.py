"""Distributed data parallel: each process has the full model, and gradients are averaged while they are computed."""

from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from chatgot.techniques.base import Proof, StepState, Verification
from chatgot.techniques.distributed import FunctionModule, ParallelTechnique, distribute_muon, shard_batches
from chatgot.techniques.observe import few_rows, fingerprint, next_batch, observe_operation


class Ddp(ParallelTechnique):
    """Li et al., arXiv 2006.15704. Only the backward pass of a step's last batch exchanges gradients."""

    name: ClassVar = "ddp"
    aliases: ClassVar = ("data-parallel", "data-parallelism", "distributed-data-parallel")
    summary: ClassVar = "lets each process train its rows of every batch, and averages their gradients"
    effect: ClassVar = "nearly linear speed-up if the batch per device is large enough"
    reference: ClassVar = "arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel"

    parallel: DistributedDataParallel
    _reduced = 0

    def apply(self, run: StepState) -> None:
        shard_batches(run, run.world.rank, run.world.size)
        distribute_muon(run)
        # Without the model's buffers, which DDP would broadcast in every step. They never change.
        loss_module = FunctionModule(run.model.parameters(), run.operations.loss)
        # gradient_as_bucket_view saves a copy of the gradient.
        self.parallel = DistributedDataParallel(loss_module, gradient_as_bucket_view=True)

        def average(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            # Counted here, where DDP really communicates.
            self._reduced += bucket.buffer().numel()
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        self.parallel.register_comm_hook(None, average)

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            # Earlier micro-batches add up locally; DDP averages the sum in the last backward pass.
            with nullcontext() if run.is_last_batch else self.parallel.no_sync():
                value: Tensor = self.parallel(inputs, targets)
            return value

        run.operations.loss = loss

    def warm_up(self, run: StepState) -> None:
        """Compute a gradient and discard it, so that DDP rebuilds its buckets before the first step."""
        # The buckets decide the order of sums, and a resumed run must compute the same bits as an uninterrupted run.
        with next_batch(run) as (inputs, targets):
            # Only a few rows: with `compile` on, a whole batch would need more memory here than in the steps.
            self.parallel(*few_rows(inputs, targets)).backward()
        run.model.zero_grad()

    def verify(self, run: StepState) -> Verification:
        before, equal = self._reduced, False

        def compare() -> None:
            nonlocal equal
            gradients = (each.grad for each in run.model.parameters())
            equal = run.world.all_equal(*(fingerprint(each) for each in gradients if each is not None))

        # Before clipping: at that point the gradient is complete, and nothing has changed it.
        with observe_operation(run, "clip", before=compare):
            yield
        # Each number once: an exchange per micro-batch would be several times as much communication.
        parameters = sum(each.numel() for each in run.model.parameters() if each.requires_grad)
        reduced = self._reduced - before
        if reduced != parameters:
            raise self.not_active(
                f"the gradient has {parameters:,} numbers, and {reduced:,} were averaged over the processes"
            )
        if not equal:
            raise self.not_active("the processes have different gradients")
        summary = f"{reduced:,} numbers, the gradient once, were averaged over {run.world.size} processes"
        return Proof(summary, numbers=reduced, processes=run.world.size)
