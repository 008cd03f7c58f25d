"""Progressive length: training starts with short windows, many at once, and ends with full ones."""

import itertools
from typing import Annotated, ClassVar

from msgspec import Meta

from chatgot.data.batches import Batch, BatchSource
from chatgot.settings import Count
from chatgot.techniques.base import Config, Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import observe_inputs, record_inputs
from chatgot.techniques.wrapped_batches import WrappedBatches
from tensorkeep.errors import UsageError

_SUM_TOLERANCE = 1e-6


class ProgressiveLengthSettings(Section, frozen=True):
    """The length of the windows in each stage, and how long the stages are."""

    # For each stage: the number of pieces that a window is cut into. The last stage has full windows, 1.
    pieces: tuple[Count, ...] = (4, 2, 1)
    # For each stage: its fraction of the steps. They sum to 1.
    shares: tuple[Annotated[float, Meta(gt=0, le=1)], ...] = (0.25, 0.25, 0.5)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Configuration files give lists, code gives tuples.
        falling = all(first > second for first, second in itertools.pairwise(self.pieces))
        if not falling or self.pieces[-1:] not in ((1,), [1]):
            raise UsageError(
                f"pieces is {list(self.pieces)}",
                remedy="give falling numbers that end with 1: the model must train all positions of an evaluation",
            )
        if len(self.shares) != len(self.pieces) or abs(sum(self.shares) - 1) > _SUM_TOLERANCE:
            raise UsageError(
                f"shares is {list(self.shares)}, for {len(self.pieces)} stages",
                remedy="give one fraction for each stage, with the sum 1",
            )


class ProgressiveLength(Technique):
    """Li et al., arXiv 2108.06084, but no token is dropped: the pieces of a window become rows of the batch."""

    name: ClassVar = "progressive-length"
    aliases: ClassVar = ("progressive-growing-sequence-length", "sequence-length-warmup")
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "data"
    summary: ClassVar = "cuts windows into short pieces at first, and trains as many tokens in each step"
    effect: ClassVar = "faster steps at first where attention takes much of the time, from a context of about 1,024 on"
    reference: ClassVar = "arXiv 2108.06084"
    refuses_conversations: ClassVar = "cuts rows into pieces, and an answer would be trained without its question"
    predicts_memory: ClassVar = True
    depends_on_steps: ClassVar = True
    conflicts: ClassVar = {
        "cuda-graphs": "a graph is captured for one shape, and the shape of batches changes",
        "pipeline-parallel": "stages send each other tensors of one shape, and the shape of batches changes",
    }
    # The curricula draw full windows, which are cut afterwards.
    after: ClassVar = ("length-curriculum", "loss-curriculum")
    settings: ProgressiveLengthSettings

    def configure(self, config: Config) -> Config:
        length = config.model.context_length
        for pieces in self.settings.pieces:
            if length % pieces:
                raise UsageError(
                    f"a context of {length} cannot be cut into {pieces} equal pieces",
                    remedy="give other pieces (techniques.progressive-length.pieces), or another model.context_length",
                )
        return config

    def apply(self, run: StepState) -> None:
        def cut(batches: BatchSource) -> Batch:
            # Neighbouring pieces stay in order, so the targets still follow their inputs.
            inputs, targets = (each.reshape(-1, self._length(run)) for each in next(batches))
            return inputs, targets

        run.batches = WrappedBatches(run.batches, cut, lambda: self._length(run))

    def stage(self, step: int, steps: int) -> int:
        """Return the number of a step's stage, from 0; steps are counted from 1."""
        # Rounded ends of cumulative shares: every step belongs to one stage.
        ends = [round(end * steps) for end in itertools.accumulate(self.settings.shares)]
        return sum(step > end for end in ends[:-1])

    def _length(self, run: StepState) -> int:
        # By the step alone, so that a run resumes within a stage.
        pieces = self.settings.pieces[self.stage(run.progress.step, run.config.loop.steps)]
        return run.config.model.context_length // pieces

    def verify(self, run: StepState) -> Verification:
        lengths: set[int] = set()
        with (
            record_inputs(run) as inputs,
            observe_inputs([run.model.tokens], lambda module, tokens: lengths.add(tokens.shape[-1])),
        ):
            yield
        length = self._length(run)
        if lengths != {length}:
            found = ", ".join(map(str, sorted(lengths))) or "none"
            raise self.not_active(f"windows had {found} tokens instead of {length}")
        tokens = sum(each.numel() for each in inputs)
        stage = self.stage(run.progress.step, run.config.loop.steps) + 1
        summary = f"{tokens // length} windows of {length} tokens, in stage {stage} of {len(self.settings.pieces)}"
        return Proof(summary, length=length, windows=tokens // length, tokens=tokens, stage=stage)
