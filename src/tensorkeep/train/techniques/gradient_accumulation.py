"""Gradient accumulation: a batch is computed in parts, whose gradients add up to that of the whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from torch import Tensor

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.drawing import Drawing
from tensorkeep.train.techniques.updates import seen_updates

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class AccumulationSettings(Section, frozen=True):
    """How much is computed at once.

    Attributes
    ----------
    batches : int
        Parts of the configuration's batch, which has ``loop.batch_size`` sequences; they must divide evenly.
    """

    batches: int = 2

    def __post_init__(self) -> None:
        check_bounds("batches", self.batches, least=2)


class GradientAccumulation(Technique):
    """The loop's own accumulation, of the same sequences: ``loop.accumulate`` takes more of them instead."""

    name: ClassVar = "gradient-accumulation"
    kind: ClassVar = "systems"
    changes: ClassVar = "data"
    # Of a run with dropout, whose parts draw zeros of their own; without it, only the order of sums differs.
    tolerance: ClassVar = 0.05
    summary: ClassVar = "computes each batch in parts, and updates the weights once, with the gradient of all of it"
    effect: ClassVar = "activations take as little memory as those of one part, and small parts make a GPU wait"
    reference: ClassVar = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
    Settings: ClassVar = AccumulationSettings
    conflicts: ClassVar = {"pipeline-parallel": "a pipeline divides batches by itself"}
    # What draws other batches draws whole ones.
    after: ClassVar = ("progressive-length", "length-curriculum", "loss-curriculum")

    def apply(self, run: Run) -> None:
        """Divide the batches, and let the loop add up as many more of them.

        Raises
        ------
        UsageError
            If a batch does not divide.
        """
        loop, parts = run.config.loop, self.settings.batches
        if loop.batch_size % parts:
            raise UsageError(
                f"a batch of {loop.batch_size} sequences does not divide into {parts} parts",
                remedy="give a batch size (--loop.batch_size) that is a multiple of techniques."
                "gradient-accumulation.batches",
            )
        self._batches = Parts(run.batches, parts)
        run.batches = self._batches
        # Of this run, not of its folder: what is asked for stays one batch, in as many parts as may be.
        loop = msgspec.structs.replace(loop, batch_size=loop.batch_size // parts, accumulate=loop.accumulate * parts)
        run.config = msgspec.structs.replace(run.config, loop=loop)

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Count the losses and their sequences, and the updates between them, of which there must be none."""
        proof = Proof()
        rows: list[int] = []
        early = 0
        inner = run.operations.loss

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            nonlocal early
            early = updates.steps.total()
            rows.append(len(inputs))
            return inner(inputs, targets)

        run.operations.loss = loss
        try:
            with seen_updates(run) as updates:
                yield proof
        finally:
            run.operations.loss = inner
        wanted, most = run.config.loop.accumulate, max(rows, default=0)
        large = -(-self._batches.whole // self.settings.batches)
        if len(rows) != wanted or most != large or early:
            raise self.not_active(
                f"{len(rows)} parts of up to {most} sequences were computed, where {wanted} were to be, of batches of "
                f"{self._batches.whole}, and optimizers were stepped {early} times between them",
                "report it, with the other techniques that are on",
            )
        proof.is_that(f"{wanted} parts of {most} sequences, and no update between them", parts=wanted, sequences=most)


class Parts(Drawing):
    """Batches in parts, one after the other.

    Its state, which is saved between two steps, is that of the whole batches: a run goes on with the same data in
    however many parts.

    Parameters
    ----------
    plain : BatchSource
        Whole ones.
    parts : int
        Of each batch.

    Attributes
    ----------
    whole : int
        Sequences of the batch that was divided last.
    """

    def __init__(self, plain: BatchSource, parts: int) -> None:
        super().__init__(plain)
        self._parts = parts
        self.whole = 0
        self._waiting: deque[Batch] = deque()

    @property
    def position(self) -> int:
        """The number of the next part, from 0."""
        return self.plain.position * self._parts - len(self._waiting)

    def __next__(self) -> Batch:
        if not self._waiting:
            inputs, targets = next(self.plain)
            self.whole = len(inputs)
            parts = (each.tensor_split(self._parts) for each in (inputs, targets))
            self._waiting.extend(zip(*parts, strict=True))
        return self._waiting.popleft()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where others were saved."""
        super().load_state_dict(state)
        self._waiting.clear()
