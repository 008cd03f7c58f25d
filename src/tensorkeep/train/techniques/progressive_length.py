"""Progressive length: training begins with short windows, many at once, and ends with whole ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.data.batches import Batch, BatchSource
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.drawing import Drawing

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

_WHOLE = 1e-6


class ProgressiveLengthSettings(Section, frozen=True):
    """How short, and for how long.

    Attributes
    ----------
    pieces : tuple of int
        For each stage: into how many pieces a window is cut. The last stage has whole windows, 1.
    shares : tuple of float
        For each stage: its share of the steps. Together 1.
    """

    pieces: tuple[int, ...] = (4, 2, 1)
    shares: tuple[float, ...] = (0.25, 0.25, 0.5)

    def __post_init__(self) -> None:
        for pieces in self.pieces:
            check_bounds("pieces", pieces, least=1)
        for share in self.shares:
            check_bounds("shares", share, above=0, most=1)
        falling = all(first > second for first, second in itertools.pairwise(self.pieces))
        if not falling or self.pieces[-1:] not in ((1,), [1]):
            raise UsageError(
                f"pieces is {list(self.pieces)}",
                remedy="give ever fewer, and 1 at last: a model learns all positions that it is evaluated at",
            )
        if len(self.shares) != len(self.pieces) or abs(sum(self.shares) - 1) > _WHOLE:
            raise UsageError(
                f"shares is {list(self.shares)}, for {len(self.pieces)} stages",
                remedy="give one for each, which are 1 together",
            )


class _Pieces(Drawing):
    def __init__(self, plain: BatchSource, length: Callable[[], int]) -> None:
        super().__init__(plain)
        self._length = length

    @property
    def context_length(self) -> int:
        """Tokens in a piece."""
        return self._length()

    def __next__(self) -> Batch:
        inputs, targets = next(self.plain)
        length = self.context_length
        return inputs.reshape(-1, length), targets.reshape(-1, length)


class ProgressiveLength(Technique):
    """Li et al., arXiv 2108.06084, but no token is thrown away.

    A window that is cut into pieces gives as many rows of a batch. So each step trains the tokens that it would have
    trained, and a resumed run goes on in the middle of a stage: the stage follows from the step. Evaluation has whole
    windows throughout. Where positions are learned, those that only whole windows reach are learned in the last stage.
    """

    name: ClassVar = "progressive-length"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "data"
    summary: ClassVar = "cuts windows into short pieces at first, and trains as many tokens in each step"
    effect: ClassVar = "faster steps at first where attention takes much of the time, from a context of about 1,024 on"
    reference: ClassVar = "arXiv 2108.06084"
    Settings: ClassVar = ProgressiveLengthSettings
    conflicts: ClassVar = {
        "cuda-graphs": "a graph is recorded for one shape, and the shape of batches changes",
        "pipeline-parallel": "stages send each other tensors of one shape, and the shape of batches changes",
    }
    # These draw whole windows.
    after: ClassVar = ("length-curriculum", "loss-curriculum")

    def configure(self, config: Config) -> Config:
        """Check that windows can be cut.

        Raises
        ------
        UsageError
            If the pieces would not be equally long.
        """
        length = config.model.context_length
        for pieces in self.settings.pieces:
            if length % pieces:
                raise UsageError(
                    f"a context of {length} cannot be cut into {pieces} equal pieces",
                    remedy="give others (techniques.progressive-length.pieces), or another model.context_length",
                )
        return config

    def apply(self, run: Run) -> None:
        """Cut the windows of the run's batches."""
        run.batches = _Pieces(run.batches, lambda: self._length(run))

    def stage(self, step: int, steps: int) -> int:
        """Return the number of the stage, from 0, that a step belongs to; steps are counted from 1."""
        ends = [round(end * steps) for end in itertools.accumulate(self.settings.shares)]
        return sum(step > end for end in ends[:-1])

    def _length(self, run: Run) -> int:
        pieces = self.settings.pieces[self.stage(run.progress.step, run.config.loop.steps)]
        return int(run.config.model.context_length // pieces)

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """See the shapes of what reaches the embedding of tokens."""
        proof = Proof()
        seen: Counter[tuple[int, ...]] = Counter()

        def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            # What a technique computes beside the training is none of it.
            if torch.is_grad_enabled():
                seen[tuple(inputs[0].shape)] += 1

        handle = run.model.tokens.register_forward_pre_hook(look)
        try:
            yield proof
        finally:
            handle.remove()
        length = self._length(run)
        if {shape[-1] for shape in seen} != {length}:
            found = ", ".join(map(str, sorted({shape[-1] for shape in seen}))) or "nothing"
            raise self.not_active(
                f"windows were to have {length} tokens, and had {found}",
                "report it, with the other techniques that are on",
            )
        tokens = sum(rows * width * count for (rows, width), count in seen.items())
        stage = self.stage(run.progress.step, run.config.loop.steps) + 1
        proof.is_that(
            f"{tokens // length} windows of {length} tokens, in stage {stage} of {len(self.settings.pieces)}",
            length=length,
            windows=tokens // length,
            tokens=tokens,
            stage=stage,
        )
