"""Gradient accumulation: a batch is computed in micro-batches, and their gradients add up to the batch gradient."""

from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from torch import Tensor

from chatgot.data.batches import Batch, BatchSource
from chatgot.techniques.base import MemoryEffects, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import count_updates, observe_operation
from chatgot.techniques.wrapped_batches import WrappedBatches, with_loop
from tensorkeep.errors import UsageError


class AccumulationSettings(Section, frozen=True):
    """How many micro-batches a batch has."""

    # Micro-batches in one batch; a divisor of loop.batch_size.
    batches: Annotated[int, msgspec.Meta(ge=2)] = 2


class GradientAccumulation(Technique):
    """Splits each batch; the setting ``loop.gradient_accumulation_steps`` alone takes more sequences in each step."""

    name: ClassVar = "gradient-accumulation"
    aliases: ClassVar = ("accumulate-grad-batches", "optimized-gradient-accumulation")
    changes: ClassVar = "data"
    # With dropout, micro-batches draw other zeros; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    summary: ClassVar = "computes each batch in micro-batches, and updates the weights once, with the sum of gradients"
    effect: ClassVar = "activations take only the memory of one micro-batch; small ones leave a GPU idle"
    reference: ClassVar = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
    predicts_memory: ClassVar = True
    conflicts: ClassVar = {"pipeline-parallel": "a pipeline splits batches itself"}
    # These techniques draw whole batches, which are split afterwards.
    after: ClassVar = ("progressive-length", "length-curriculum", "loss-curriculum")
    settings: AccumulationSettings

    def apply(self, run: StepState) -> None:
        loop, count = run.config.loop, self.settings.batches
        if loop.batch_size % count:
            raise UsageError(
                f"a batch of {loop.batch_size} sequences cannot be split into {count} equal micro-batches",
                remedy=f"give a batch size (--loop.batch_size) that is a multiple of techniques.{self.name}.batches",
            )
        self._batches = MicroBatches(run.batches, count)
        run.batches = self._batches
        # For this process only: the stored configuration has whole batches, and a resumed run may split them in another
        # way.
        size, steps = loop.batch_size // count, loop.gradient_accumulation_steps * count
        run.config = with_loop(run.config, batch_size=size, gradient_accumulation_steps=steps)

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.micro_batches = self.settings.batches

    def verify(self, run: StepState) -> Verification:
        rows, early_steps = list[int](), 0

        def count(inputs: Tensor, targets: Tensor) -> None:
            nonlocal early_steps
            # An update between two micro-batches would not be accumulation.
            early_steps = updates.optimizer_steps.total()
            rows.append(len(inputs))

        with observe_operation(run, "loss", before=count), count_updates(run) as updates:
            yield
        expected, most = run.config.loop.gradient_accumulation_steps, max(rows, default=0)
        batch = self._batches.batch_rows
        if len(rows) != expected or most != -(-batch // self.settings.batches) or early_steps:
            raise self.not_active(
                f"{len(rows)} micro-batches of up to {most} sequences were computed instead of {expected}, from "
                f"batches of {batch}, and optimizers were stepped {early_steps} times between them"
            )
        summary = f"{expected} micro-batches of {most} sequences, without an update between them"
        return Proof(summary, parts=expected, sequences=most)


class MicroBatches(WrappedBatches):
    """Batches split into micro-batches; ``batch_rows`` is the number of sequences in the last whole batch."""

    # `state_dict`, called between two steps, has the position in whole batches: a resumed run may split them in another
    # way.

    def __init__(self, inner: BatchSource, count: int) -> None:
        super().__init__(inner, self._split)
        self._count = count
        self.batch_rows = 0
        self._waiting: deque[Batch] = deque()

    def _split(self, batches: BatchSource) -> Batch:
        if not self._waiting:
            inputs, targets = next(batches)
            self.batch_rows = len(inputs)
            self._waiting.extend(zip(inputs.tensor_split(self._count), targets.tensor_split(self._count), strict=True))
        return self._waiting.popleft()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        # These micro-batches belong to the position before.
        self._waiting.clear()
