"""Curriculum by length: training starts with short documents, and adds longer ones stage by stage."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from chatgot.data.batches import Batch, Batches, BatchSource
from chatgot.data.dataset import TRAIN
from chatgot.data.tokenizers.base import Tokens
from chatgot.techniques.base import Proof, Section, StepState, Technique, Verification
from chatgot.techniques.observe import record_inputs
from chatgot.techniques.wrapped_batches import WrappedBatches, same_tokens
from tensorkeep.errors import UsageError


class LengthCurriculumSettings(Section, frozen=True):
    """When longer documents are added."""

    # The number of stages N: stage n draws from the shortest documents with n/N of all tokens.
    stages: Annotated[int, Meta(ge=2, le=100)] = 4
    # The fraction of the steps before the last stage; the other stages have equal parts.
    share: Annotated[float, Meta(gt=0, le=1)] = 0.5


@dataclass(frozen=True)
class _Stage:
    batches: Batches
    documents: int
    tokens: int


class LengthCurriculum(Technique):
    """Platanios et al., arXiv 1903.09848: easy examples first; the longer a document, the harder it is."""

    name: ClassVar = "length-curriculum"
    aliases: ClassVar = ("curriculum", "curriculum-based-training")
    kind: ClassVar = "algorithmic"
    changes: ClassVar = "data"
    summary: ClassVar = "draws windows from short documents at first, and adds longer ones in stages"
    effect: ClassVar = (
        "no change in speed; a lower loss early on, rarely at the end: compare at the same number of tokens"
    )
    reference: ClassVar = "arXiv 1903.09848"
    refuses_conversations: ClassVar = "draws windows of the text, and rows of conversations begin with one"
    predicts_memory: ClassVar = True
    depends_on_steps: ClassVar = True
    conflicts: ClassVar = {
        "loss-curriculum": "each chooses the windows that are trained",
        **dict.fromkeys(("ddp", "fsdp", "hsdp"), "it draws the batches of one process, and they are not sharded"),
        "pipeline-parallel": "it draws one batch after the other, and a pipeline needs all of a step as one",
    }
    settings: LengthCurriculumSettings

    def apply(self, run: StepState) -> None:
        self._lengths = _document_lengths(run)
        everything = _Stage(_batches(run, run.dataset.train), len(self._lengths), int(self._lengths.sum()))
        self._stages = [*_first_stages(run, self._lengths, self.settings.stages), everything]

        def draw(batches: BatchSource) -> Batch:
            # `batches` belongs to the last stage, and counts the position for all stages.
            batch = self._stages[self._stage(run)].batches.at(batches.position)
            next(batches)
            return batch

        run.batches = WrappedBatches(everything.batches, draw)

    def _stage(self, run: StepState) -> int:
        # 0 in a warm-up, which draws a batch before the first step.
        # The last stage begins when the fraction `share` of the steps is done.
        done = max(0, run.progress.step - 1) / (self.settings.share * run.config.loop.steps)
        stages = self.settings.stages
        return min(int(done * (stages - 1)), stages - 1)

    def verify(self, run: StepState) -> Verification:
        # The position counts the drawn batches, so the step's batches can be drawn again.
        everything = self._stages[-1].batches
        begin = everything.position
        with record_inputs(run) as inputs:
            yield
        number = self._stage(run)
        stage = self._stages[number]
        expected = [stage.batches.at(position)[0] for position in range(begin, everything.position)]
        if not expected or not same_tokens(inputs, expected):
            raise self.not_active(f"the trained windows are not from the {stage.documents:,} shortest documents")
        mean, mean_of_all = stage.tokens / stage.documents, float(self._lengths.mean())
        return Proof(
            f"windows came from the {stage.documents:,} shortest of {len(self._lengths):,} documents, with "
            f"{mean:,.0f} tokens on average; the average of all is {mean_of_all:,.0f}",
            stage=number + 1,
            documents=stage.documents,
            mean_length=mean,
            mean_length_of_all=mean_of_all,
        )


def _document_lengths(run: StepState) -> npt.NDArray[np.int64]:
    if run.dataset.mixture:
        raise UsageError(
            "length-curriculum sorts the documents of one text, and the data is a mixture",
            path=run.dataset.path,
            remedy="prepare one source, or leave length-curriculum out",
        )
    documents = run.dataset.description["splits"][TRAIN]["documents"]
    if documents is None or documents < 2:
        raise UsageError(
            "length-curriculum needs documents of different lengths, and the text is one document",
            path=run.dataset.path,
            remedy="prepare a folder of files, or .jsonl, or leave length-curriculum out",
        )
    # The token that ends a document belongs to it.
    ends = np.flatnonzero(run.dataset.train == run.dataset.tokenizer.end_of_document) + 1
    return np.diff(ends, prepend=0)


def _first_stages(run: StepState, lengths: npt.NDArray[np.int64], stages: int) -> list[_Stage]:
    # Stable, so that documents of equal length keep their order, and a resumed run draws the same windows.
    order = np.argsort(lengths, kind="stable")
    tokens = np.cumsum(lengths[order])
    counts = [int(np.searchsorted(tokens, tokens[-1] * number / stages, side="right")) for number in range(1, stages)]
    length = run.config.model.context_length
    first = int(tokens[counts[0] - 1]) if counts[0] else 0
    # The shortest stage must have a window and its last target.
    if first <= length:
        raise UsageError(
            f"the {counts[0]:,} shortest documents have {first:,} tokens, and a context of {length:,} needs "
            f"{length + 1:,}",
            remedy="give fewer stages (techniques.length-curriculum.stages), or prepare more text",
        )
    # The earlier stages are prefixes of one text, so one copy serves all stages.
    ends = np.cumsum(lengths)
    # In memory: the documents of the earlier stages are not neighbours in the file.
    text = np.concatenate([run.dataset.train[ends[each] - lengths[each] : ends[each]] for each in order[: counts[-1]]])
    return [_Stage(_batches(run, text[: tokens[count - 1]]), count, int(tokens[count - 1])) for count in counts]


def _batches(run: StepState, text: Tokens) -> Batches:
    return Batches(
        text,
        context_length=run.config.model.context_length,
        batch_size=run.config.loop.batch_size,
        seed=run.config.loop.seed,
        order=run.config.data.order,
    )
