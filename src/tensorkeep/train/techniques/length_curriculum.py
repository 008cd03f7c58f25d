"""Curriculum by length: training begins with short documents, and longer ones come in stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds
from tensorkeep.train.config.sections import Section
from tensorkeep.train.data.batches import Batch, Batches
from tensorkeep.train.data.dataset import TRAIN
from tensorkeep.train.data.tokenizers.base import Tokens
from tensorkeep.train.techniques.base import Proof, Technique
from tensorkeep.train.techniques.drawing import Drawing, given_inputs, same_tokens

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class LengthCurriculumSettings(Section, frozen=True):
    """How long documents come in.

    Attributes
    ----------
    stages : int
        N: stage n draws from the shortest documents that have n/N of all tokens, the last one from all documents.
    share : float
        The share of the steps until the last stage begins; the others are equally long.
    """

    stages: int = 4
    share: float = 0.5

    def __post_init__(self) -> None:
        check_bounds("stages", self.stages, least=2, most=100)
        check_bounds("share", self.share, above=0, most=1)


@dataclass(frozen=True)
class _Stage:
    """What a stage draws from: its batches, and how many documents and tokens there are in it."""

    batches: Batches
    documents: int
    tokens: int


class _ShortFirst(Drawing):
    """Draws from the stages; the place is that of the last one, which has the whole text."""

    def __init__(self, stages: Sequence[_Stage], now: Callable[[], int]) -> None:
        self._whole = stages[-1].batches
        super().__init__(self._whole)
        self.stages = stages
        self.now = now

    def __next__(self) -> Batch:
        batch = self.stages[self.now()].batches.at(self._whole.position)
        self._whole.position += 1
        return batch


class LengthCurriculum(Technique):
    """Platanios et al., arXiv 1903.09848: what is easy comes first, and the longer a document the harder it is.

    The documents of a stage stand in a row, shortest first, and windows are drawn from that as they are from any text,
    at places that follow from the number of the batch alone. All but the longest documents, as many as the last stage
    but one has, are copied into memory. Evaluation is of all documents throughout.
    """

    name: ClassVar = "length-curriculum"
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "data"
    summary: ClassVar = "draws windows from short documents at first, and lets longer ones in by stages"
    effect: ClassVar = "none on speed; a lower loss early on, rarely at the end: compare at the same number of tokens"
    reference: ClassVar = "arXiv 1903.09848"
    Settings: ClassVar = LengthCurriculumSettings
    conflicts: ClassVar = {
        "loss-curriculum": "each chooses the windows that are trained",
        "ddp": "it draws the batches of one process, and they are not divided",
        "fsdp": "it draws the batches of one process, and they are not divided",
        "pipeline-parallel": "it draws one batch after the other, and all those of a step are to be one",
    }

    def apply(self, run: Run) -> None:
        """Sort the documents, and put batches of them in place of the run's.

        Raises
        ------
        UsageError
            If the text has no documents, or the first stage has no room for a window.
        """
        lengths = _document_lengths(run)
        self._lengths = np.sort(lengths)
        whole = _Stage(_batches(run, run.dataset.train), len(lengths), int(lengths.sum()))
        stages = [*_stages(run, lengths, self.settings.stages), whole]
        self._drawing = _ShortFirst(stages, now=lambda: self._stage(run))
        run.batches = self._drawing

    def _stage(self, run: Run) -> int:
        # Before the first step a batch may be drawn to rehearse it.
        done = max(0, run.progress.step - 1) / (self.settings.share * run.config.loop.steps)
        stages: int = self.settings.stages
        return min(int(done * (stages - 1)), stages - 1)

    @contextmanager
    def verify(self, run: Run) -> Iterator[Proof]:
        """Compare what is trained with what the stage has at these places."""
        proof = Proof()
        begin = self._drawing.position
        with given_inputs(run) as given:
            yield proof
        number = self._stage(run)
        stage = self._drawing.stages[number]
        wanted = [stage.batches.at(place)[0] for place in range(begin, self._drawing.position)]
        if not wanted or not same_tokens(given, wanted):
            raise self.not_active(
                f"what was trained is not from the {stage.documents:,} shortest documents",
                "report it, with the other techniques that are on",
            )
        mean, of_all = stage.tokens / stage.documents, float(self._lengths.mean())
        proof.is_that(
            f"windows came from the {stage.documents:,} shortest of {len(self._lengths):,} documents, which have "
            f"{mean:,.0f} tokens on average where all have {of_all:,.0f}",
            stage=number + 1,
            documents=stage.documents,
            mean_length=mean,
            mean_length_of_all=of_all,
        )


def _document_lengths(run: Run) -> npt.NDArray[np.int64]:
    """Return the length of each document of the training split, with the token that ends it."""
    documents = run.dataset.about["splits"][TRAIN]["documents"]
    if documents is None or documents < 2:
        raise UsageError(
            "length-curriculum needs documents of different lengths, and the text is one",
            path=run.dataset.path,
            remedy="prepare a folder of files, or .jsonl, or leave length-curriculum out",
        )
    ends = np.flatnonzero(run.dataset.train == run.dataset.tokenizer.end_of_document) + 1
    return np.diff(ends, prepend=0)


def _stages(run: Run, lengths: npt.NDArray[np.int64], stages: int) -> list[_Stage]:
    """Return all stages but the last."""
    order = np.argsort(lengths, kind="stable")
    sizes = np.cumsum(lengths[order])
    counts = [int(np.searchsorted(sizes, sizes[-1] * number / stages, side="right")) for number in range(1, stages)]
    length = run.config.model.context_length
    first = int(sizes[counts[0] - 1]) if counts[0] else 0
    if first <= length:
        raise UsageError(
            f"the {counts[0]:,} shortest documents have {first:,} tokens, and a context of {length:,} needs "
            f"{length + 1:,}",
            remedy="give fewer stages (techniques.length-curriculum.stages), or prepare more text",
        )
    text = _in_a_row(run.dataset.train, lengths, order[: counts[-1]])
    return [_Stage(_batches(run, text[: sizes[count - 1]]), count, int(sizes[count - 1])) for count in counts]


def _in_a_row(tokens: Tokens, lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> Tokens:
    ends = np.cumsum(lengths)
    return np.concatenate([tokens[ends[each] - lengths[each] : ends[each]] for each in order])


def _batches(run: Run, text: Tokens) -> Batches:
    return Batches(
        text,
        context_length=run.config.model.context_length,
        batch_size=run.config.loop.batch_size,
        seed=run.config.loop.seed,
        order=run.config.data.order,
    )
