"""Rows of conversations: only answers count, each once in an epoch; training on them resumes exactly."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from chatgot.data.batches import Batches
from chatgot.data.corpus import SplitRule
from chatgot.data.dataset import TRAIN, VALIDATION, Dataset
from chatgot.data.sft_batches import AnswerBatches, AnswerRows, AnswerWindows, training_batches
from chatgot.data.tokenizers.base import Tokens
from chatgot.data.tokenizers.char import ByteTokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.loop import train
from chatgot.model.gpt import IGNORED
from chatgot.run.data import check_data
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.step.train_step import train_step
from chatgot.step.world import World
from chatgot.techniques.stack import Stack
from tiny_training import CONFIG, Witness, check_resumes_exactly, conversations, prepared, run

CHAT = ChatTokenizer(ByteTokenizer(documents=True))


def tokens(*conversations: list[tuple[str, str]]) -> Tokens:
    parts = [[*(CHAT.message(*turn) for turn in each), [CHAT.end_of_document]] for each in conversations]
    return np.concatenate([*chain(*parts)]).astype(np.uint16)


def talks(count: int) -> list[list[tuple[str, str]]]:
    return [
        [("user", "u" * (n % 5)), ("assistant", f"answer {n}"), ("user", "?"), ("assistant", "")] for n in range(count)
    ]


def answers_in(targets: torch.Tensor) -> list[str]:
    """Return the answers that count, each with its end."""
    counted = [int(each) for each in targets.flatten() if each != IGNORED]
    return CHAT.decode(counted).split("<|end|>")[:-1]


def test_targets_are_answers_and_their_ends_each_once_in_whole_conversations() -> None:
    rows = AnswerRows(tokens([("system", "S"), ("user", "a"), ("assistant", "bc")]), 16, CHAT)
    inputs, targets = rows.row(0)
    assert CHAT.decode(inputs[:10]) == "<|system|>S<|end|><|user|>a<|end|><|assistant|>bc<|end|>"
    assert targets.tolist() == [IGNORED] * 6 + [ord("b"), ord("c"), CHAT.end] + [IGNORED] * 7
    # Each target is the token after its position.
    assert inputs[6:9].tolist() == [CHAT.begin["assistant"], ord("b"), ord("c")]
    for length in (24, 40, 100, 1000):
        rows = AnswerRows(tokens(*talks(40)), length, CHAT)
        inputs, targets = rows.rows(np.arange(len(rows)))
        assert sorted(answers_in(targets)) == sorted([f"answer {n}" for n in range(40)] + [""] * 40), length
        assert (inputs[:, 0] == CHAT.begin["user"]).all(), length
    # An evaluation has each row once.
    windows = AnswerWindows(tokens(*talks(20)), 24, CHAT)
    found = torch.cat([targets for _, targets in windows.batches(3)])
    assert sorted(answers_in(found))[20:] == sorted(f"answer {n}" for n in range(20))
    assert windows.targets == int((found != IGNORED).sum())
    assert len(AnswerWindows(tokens(*talks(20)), 24, CHAT, most=48)) == 2


def test_beginning_of_a_conversation_longer_than_the_context_is_trained() -> None:
    text = tokens([("user", "q"), ("assistant", "x" * 50)], [("user", "q" * 50), ("assistant", "y")])
    rows = AnswerRows(text, 12, CHAT)
    # The answer of the second one begins beyond the context, so that its row would have no target.
    assert len(rows) == 1
    assert rows.note == (
        "text: 2 of 2 conversations are longer than the context of 12 tokens: the beginning of 1 is used, and 1 with "
        "later answers are left out; 44 of 53 tokens of answers are not used"
    )
    # All but the end of the conversation, which is not an answer.
    assert AnswerRows(text, 54, CHAT).note is None
    assert "2 of 53 tokens of answers are not used" in str(AnswerRows(text, 53, CHAT).note)
    _, targets = rows.row(0)
    assert targets.tolist() == [IGNORED] * 3 + [ord("x")] * 9
    with pytest.raises(tensorkeep.UsageError, match="no answer begins within a context of 2 tokens"):
        AnswerRows(text, 2, CHAT)


def batches(order: str, seed: int, batch_size: int) -> AnswerBatches:
    settings: dict[str, Any] = {"context_length": 24, "batch_size": batch_size, "order": order}
    return AnswerBatches(tokens(*talks(20)), seed=seed, tokenizer=CHAT, **settings)


def test_batches_are_a_function_of_seed_and_number() -> None:
    for order in ("random", "shuffled"):
        first, again = batches(order, 1, 3), batches(order, 1, 3)
        drawn = [next(first) for _ in range(14)]
        again.load_state_dict({"position": 9})
        assert all(torch.equal(one, other) for one, other in zip(next(again), drawn[9], strict=True)), order
        assert not torch.equal(next(batches(order, 2, 3))[1], drawn[0][1]), order
    epoch = torch.cat([targets for _, targets in drawn])[: len(AnswerRows(tokens(*talks(20)), 24, CHAT))]
    assert sorted(answers_in(epoch))[20:] == sorted(f"answer {n}" for n in range(20))


def test_the_order_of_rows_is_pinned() -> None:
    """A run that was started with an earlier version resumes with the same rows."""
    rows = len(AnswerRows(tokens(*talks(20)), 24, CHAT))
    words = np.random.Philox(key=5).random_raw(2 * rows)
    assert batches("random", 5, 1)._offsets.take(0, 2 * rows).tolist() == (words % np.uint64(rows)).tolist()
    epochs = [np.arange(rows), np.arange(rows)]
    for number, epoch in enumerate(epochs):
        np.random.Generator(np.random.Philox(key=np.array([5, number + 1], np.uint64))).shuffle(epoch)
    assert batches("shuffled", 5, 1)._offsets.take(0, 2 * rows).tolist() == np.concatenate(epochs).tolist()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversations(tmp_path_factory.mktemp("talk"), talks(60))


def test_a_validation_split_without_an_answer_in_the_context_is_refused_at_once(tmp_path: Path) -> None:
    rule = SplitRule(0.1, 0)
    questions = {TRAIN: "q", VALIDATION: "q" * 90}
    splits = [rule.of_document(f"talk.jsonl:{number}") for number in range(1, 41)]
    data = conversations(tmp_path, [[("user", questions[split]), ("assistant", "a")] for split in splits])
    message = r"talk: in the validation split, no answer begins within a context of 64 tokens"
    with pytest.raises(tensorkeep.UsageError, match=message):
        run(CONFIG.changed({"model.context_length": 64}), tmp_path / "run", data)
    assert not (tmp_path / "run").exists()


ON_TALK = CONFIG.changed(
    {
        "model.context_length": 32,
        "eval.every": 4,
        "checkpoint.every": 3,
        "loop.gradient_accumulation_steps": 2,
        "loop.steps": 8,
    }
)


@pytest.mark.parametrize("order", ["shuffled", pytest.param("random", marks=pytest.mark.exhaustive)])
def test_training_on_answers_resumes_exactly(tmp_path: Path, data: Path, order: str) -> None:
    check_resumes_exactly(ON_TALK.changed({"data.order": order}), tmp_path, data, "train", "evaluate", stop_at=5)


def test_a_step_and_ranks_weight_each_answer_token_equally(tmp_path: Path, data: Path) -> None:
    class OfTwo(World):
        """Rank 0 of two, of which the other one has three times as many targets and a loss of 0."""

        def mean(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2 if value.dtype == torch.float64 else value / 2

    accumulated, at_once = (
        ON_TALK.changed({"model.dropout": 0.0}),
        {"loop.gradient_accumulation_steps": 1, "loop.batch_size": 6},
    )
    figures = []
    for number, config in enumerate((accumulated, accumulated.changed(at_once), accumulated)):
        with open_run(config, RunFolder(tmp_path / str(number)), Dataset.open(data)) as opened:
            if number == 2:
                opened.world, opened.replicas = OfTwo(0, 2), 2
            figures.append((train_step(opened).loss.item(), opened.progress.tokens))
    (loss, counted), large, of_two = figures
    assert large == (pytest.approx(loss, rel=1e-5), counted)
    # A quarter of all targets is here.
    assert of_two == (pytest.approx(loss / 4, rel=1e-5), 4 * counted)


def test_techniques_that_need_the_whole_text_are_refused(tmp_path: Path, data: Path) -> None:
    for name, reason in (("length-curriculum", "draws windows"), ("progressive-length", "cuts rows into pieces")):
        with pytest.raises(tensorkeep.UsageError, match=f"{name} {reason}") as caught:
            check_data(ON_TALK, Dataset.open(data), Stack.of({name: {}}))
        assert f"--techniques.{name} off" in str(caught.value.remedy)
    assert type(training_batches(CONFIG, Dataset.open(prepared(tmp_path)))) is Batches


def test_mfu_counts_all_positions_and_speed_those_that_count(tmp_path: Path, data: Path) -> None:
    config = ON_TALK.changed({"loop.steps": 3, "eval.every": 0, "schedule.warmup_steps": 5, "model.context_length": 20})
    with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        noted = ["training split", "validation split", "schedule.warmup_steps is 5, and the schedule has 3 steps"]
        assert [each.partition(":")[0] for each in opened.notes] == noted
        train(opened, Witness())
        # The first step of a process is not timed. A step has two batches of three rows.
        positions = 2 * 2 * 3 * config.model.context_length
        assert opened.speed.flops == positions * opened.config.model.flops_per_token(config.model.context_length)
        assert 0 < opened.speed.tokens < 0.6 * positions


def test_fewer_tokens_than_the_context_are_trained(tmp_path: Path) -> None:
    data, one = (
        conversations(tmp_path, talks(20)),
        {"loop.batch_size": 1, "loop.gradient_accumulation_steps": 1, "loop.steps": 1},
    )
    assert len(Dataset.open(data).train) < 1024
    assert run(ON_TALK.changed({"model.context_length": 1024, **one}), tmp_path / "run", data).step == 1
