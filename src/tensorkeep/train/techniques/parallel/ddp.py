"""Distributed data parallel: each process has the full model, and gradients are averaged while they are computed."""

from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Verification
from tensorkeep.train.techniques.observe import fingerprint, replace_operation
from tensorkeep.train.techniques.parallel import Parallel, before_each_batch, shard_batches, share_muon
from tensorkeep.train.techniques.warm_up import Loss, few_rows, next_batch


class Ddp(Parallel):
    """Li et al., arXiv 2006.15704. Only the backward pass of a step's last batch exchanges gradients."""

    name: ClassVar = "ddp"
    summary: ClassVar = "lets each process train its rows of every batch, and averages their gradients"
    effect: ClassVar = "nearly linear speed-up if the batch per device is large enough"
    reference: ClassVar = "arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel"

    parallel: DistributedDataParallel
    _reduced = 0
    _last = False

    def apply(self, run: Run) -> None:
        """Shard the batches, and wrap the loss so that its gradient is averaged over the processes."""
        shard_batches(run, run.world.rank, run.world.size)
        share_muon(run)
        operations, inner = run.operations, run.operations.loss
        self.parallel = DistributedDataParallel(_LossModule(run.model, inner), gradient_as_bucket_view=True)

        def average(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
            self._reduced += bucket.buffer().numel()
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        self.parallel.register_comm_hook(None, average)

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with nullcontext() if self._last else self.parallel.no_sync():
                value: Tensor = self.parallel(inputs, targets)
            return value

        operations.loss = loss
        before_each_batch(run, lambda last: setattr(self, "_last", last))

    def warm_up(self, run: Run) -> None:
        """Compute a gradient and discard it: DDP rebuilds its buckets after the first one.

        Sums of more than two numbers depend on their order, and a resumed run must compute the same bits as one that
        was never interrupted.
        """
        with next_batch(run) as (inputs, targets):
            # A few rows: beside `compile`, a whole batch would need more memory here than in the steps.
            self.parallel(*few_rows(inputs, targets)).backward()
        run.model.zero_grad()

    def verify(self, run: Run) -> Verification:
        """Count the averaged numbers, and compare the gradients of the processes."""
        clip, before, equal = run.operations.clip, self._reduced, False

        def observed_clip() -> Tensor:
            nonlocal equal
            gradients = (each.grad for each in run.model.parameters())
            equal = run.world.all_equal(*(fingerprint(each) for each in gradients if each is not None))
            return clip()

        with replace_operation(run, "clip", observed_clip):
            yield
        parameters = sum(each.numel() for each in run.model.parameters() if each.requires_grad)
        reduced = self._reduced - before
        if reduced != parameters:
            raise self.not_active(
                f"the gradient has {parameters:,} numbers, and {reduced:,} were averaged over the processes"
            )
        if not equal:
            raise self.not_active("the processes have different gradients")
        return Proof(
            f"{reduced:,} numbers, the gradient once, were averaged over {run.world.size} processes",
            numbers=reduced,
            processes=run.world.size,
        )


class _LossModule(nn.Module):
    """The loss as a module with the model's parameters, for DDP to wrap.

    It has no buffers: DDP would send them in every step, and they never change.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.of_model = nn.ParameterList(model.parameters())
        self._loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return self._loss(inputs, targets)
