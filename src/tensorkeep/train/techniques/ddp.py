"""Distributed data parallel: each process has the whole model, and gradients are averaged while they are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import Proof
from tensorkeep.train.techniques.data_parallel import share_batches
from tensorkeep.train.techniques.parallel import Parallel, others_than
from tensorkeep.train.techniques.rehearsal import Loss

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class Ddp(Parallel):
    """Li et al., arXiv 2006.15704. Of a step's batches, only the last one's backward pass exchanges gradients."""

    name: ClassVar = "ddp"
    # Of a run with dropout, which draws other zeros in each process; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    summary: ClassVar = "lets each process train its rows of every batch, and averages their gradients"
    effect: ClassVar = "almost as many times the speed as there are devices, while a batch keeps each of them busy"
    reference: ClassVar = "arXiv 2006.15704; torch.nn.parallel.DistributedDataParallel"
    conflicts: ClassVar = others_than("ddp")

    def __init__(self, settings: Section) -> None:
        super().__init__(settings)
        self.parallel: DistributedDataParallel
        self._reduced = 0
        self._done = 0

    def apply(self, run: Run) -> None:
        """Share out the batches; let the loss be one whose gradient is averaged over the processes."""
        share_batches(run)
        operations = run.operations
        backward, clip = operations.backward, operations.clip
        self.parallel = DistributedDataParallel(_Loss(run.model, operations.loss), gradient_as_bucket_view=True)
        # Without annotations, which DDP would compare with types, and here they are texts.
        self.parallel.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            last = self._done == run.config.loop.accumulate - 1
            with nullcontext() if last else self.parallel.no_sync():
                found: Tensor = self.parallel(inputs, targets)
            return found

        def counted_backward(value: Tensor) -> None:
            backward(value)
            self._done += 1

        def clip_at_the_end() -> Tensor:
            self._done = 0
            return clip()

        operations.loss, operations.backward, operations.clip = loss, counted_backward, clip_at_the_end

    def _reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self._reduced += bucket.buffer().numel()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    def rehearse(self, run: Run) -> None:
        """Compute a gradient and forget it: after the first one, gradients are exchanged in the order they came in.

        Sums of more than two numbers depend on their order, and a run that goes on is to compute what one does that was
        never interrupted.
        """
        place = run.batches.state_dict()
        run.progress.step += 1
        try:
            inputs, targets = (each.to(run.device) for each in next(run.batches))
            with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
                self.parallel(inputs, targets).backward()
        finally:
            run.batches.load_state_dict(place)
            run.progress.step -= 1
        run.model.zero_grad()

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count what is averaged, and compare the gradients of the processes."""
        proof = Proof()
        clip, before = run.operations.clip, self._reduced
        equal = False

        def watched_clip() -> Tensor:
            nonlocal equal
            equal = run.world.all_equal(*_fingerprints(run.model))
            return clip()

        run.operations.clip = watched_clip
        try:
            yield proof
        finally:
            run.operations.clip = clip
        parameters = sum(each.numel() for each in run.model.parameters())
        reduced = self._reduced - before
        if reduced != parameters:
            raise self.not_active(
                f"of the gradient of {parameters:,} weights, {reduced:,} numbers were averaged over the processes",
                "report it, with the other techniques that are on",
            )
        if not equal:
            raise self.not_active("the processes ended up with different gradients", "report it")
        proof.is_that(
            f"{reduced:,} numbers, each of the gradient once, were averaged over {run.world.size} processes",
            numbers=reduced,
            processes=run.world.size,
        )


class _Loss(nn.Module):
    """The loss as a module, which DDP wraps, with the model's parameters.

    Without its buffers, which DDP would send in every step: none of them ever changes.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.of_model = nn.ParameterList(model.parameters())
        self._loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return self._loss(inputs, targets)


def _fingerprints(model: nn.Module) -> list[int]:
    """Return the sum of the bits of each gradient, read as whole numbers, which another one hardly has."""
    gradients = (each.grad for each in model.parameters())
    return [int(each.view(torch.int32).sum(dtype=torch.int64)) for each in gradients if each is not None]
