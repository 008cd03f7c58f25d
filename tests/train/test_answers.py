"""Rows of conversations: only answers count, each once in an epoch; training on them resumes exactly."""

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.testing.equality import difference
from tensorkeep.train.answers import AnswerBatches, AnswerRows, AnswerWindows, training_batches
from tensorkeep.train.data.batches import Batches
from tensorkeep.train.data.dataset import TRAIN, VALIDATION, Dataset
from tensorkeep.train.data.documents import SplitRule
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.data.tokenizers.base import Tokens
from tensorkeep.train.data.tokenizers.char import ByteTokenizer
from tensorkeep.train.data.tokenizers.chat import ChatTokenizer
from tensorkeep.train.loop import make_step, take_step, train
from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.world import World
from train.tiny_training import CONFIG, Witness, last_state, lines, prepared, run

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


def test_targets_are_answers_and_their_ends() -> None:
    rows = AnswerRows(tokens([("system", "S"), ("user", "a"), ("assistant", "bc")]), 16, CHAT)
    inputs, targets = rows.row(0)
    assert CHAT.decode(inputs[:10]) == "<|system|>S<|end|><|user|>a<|end|><|assistant|>bc<|end|>"
    assert targets.tolist() == [IGNORED] * 6 + [ord("b"), ord("c"), CHAT.end] + [IGNORED] * 7
    # Each target is the token after its position.
    assert inputs[6:9].tolist() == [CHAT.begin["assistant"], ord("b"), ord("c")]


@pytest.mark.parametrize("length", [24, 40, 100, 1000])
def test_each_answer_counts_once_in_whole_conversations(length: int) -> None:
    text = tokens(*talks(40))
    rows = AnswerRows(text, length, CHAT)
    inputs, targets = rows.rows(np.arange(len(rows)))
    assert sorted(answers_in(targets)) == sorted([f"answer {n}" for n in range(40)] + [""] * 40)
    assert (inputs[:, 0] == CHAT.begin["user"]).all()


def test_beginning_of_a_conversation_longer_than_the_context_is_trained() -> None:
    text = tokens([("user", "q"), ("assistant", "x" * 50)], [("user", "q" * 50), ("assistant", "y")])
    rows = AnswerRows(text, 12, CHAT)
    # The answer of the second one begins beyond the context, so that its row would have no target.
    assert len(rows) == 1
    _, targets = rows.row(0)
    assert targets.tolist() == [IGNORED] * 3 + [ord("x")] * 9
    with pytest.raises(tensorkeep.UsageError, match="no answer begins within a context of 2 tokens"):
        AnswerRows(text, 2, CHAT)


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_batches_are_a_function_of_seed_and_number(order: str) -> None:
    def batches(seed: int) -> AnswerBatches:
        settings = {"context_length": 24, "batch_size": 3, "order": order}
        return AnswerBatches(tokens(*talks(20)), seed=seed, tokenizer=CHAT, **settings)  # type: ignore[arg-type]

    first, again = batches(1), batches(1)
    drawn = [next(first) for _ in range(14)]
    again.load_state_dict({"position": 9})
    assert all(torch.equal(one, other) for one, other in zip(next(again), drawn[9], strict=True))
    assert not torch.equal(next(batches(2))[1], drawn[0][1])
    if order == "shuffled":
        epoch = torch.cat([targets for _, targets in drawn])[: len(AnswerRows(tokens(*talks(20)), 24, CHAT))]
        assert sorted(answers_in(epoch))[20:] == sorted(f"answer {n}" for n in range(20))


def test_the_order_of_rows_is_pinned() -> None:
    """A run that was started with an earlier version resumes with the same rows."""
    rows = len(AnswerRows(tokens(*talks(20)), 24, CHAT))

    def drawn(order: str, seed: int) -> list[int]:
        settings = {"context_length": 24, "batch_size": 1, "order": order}
        found = AnswerBatches(tokens(*talks(20)), seed=seed, tokenizer=CHAT, **settings)  # type: ignore[arg-type]
        return found._offsets.take(0, 2 * rows).tolist()

    words = np.random.Philox(key=5).random_raw(2 * rows)
    assert drawn("random", 5) == (words % np.uint64(rows)).tolist()
    epochs = [np.arange(rows), np.arange(rows)]
    for number, epoch in enumerate(epochs):
        np.random.Generator(np.random.Philox(key=np.array([5, number + 1], np.uint64))).shuffle(epoch)
    assert drawn("shuffled", 5) == np.concatenate(epochs).tolist()


def test_evaluation_has_each_row_once() -> None:
    windows = AnswerWindows(tokens(*talks(20)), 24, CHAT)
    found = [targets for _, targets in windows.batches(3)]
    assert sorted(answers_in(torch.cat(found)))[20:] == sorted(f"answer {n}" for n in range(20))
    assert windows.targets == int((torch.cat(found) != IGNORED).sum())
    assert len(AnswerWindows(tokens(*talks(20)), 24, CHAT, most=48)) == 2


@pytest.fixture
def data(tmp_path: Path) -> Path:
    text = "".join(
        json.dumps({"messages": [{"role": role, "content": content} for role, content in each]}) + "\n"
        for each in talks(60)
    )
    (tmp_path / "talk.jsonl").write_text(text)
    return prepare(tmp_path / "talk.jsonl", tmp_path / "talk", tokenizer="byte").path


def test_a_validation_split_without_an_answer_in_the_context_is_refused_at_once(tmp_path: Path) -> None:
    rule = SplitRule(0.1, 0)
    lines_of = {
        split: json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]})
        for split, question in ((TRAIN, "q"), (VALIDATION, "q" * 90))
    }
    lines_in = [lines_of[rule.of_document(f"talk.jsonl:{number}")] for number in range(1, 41)]
    (tmp_path / "talk.jsonl").write_text("\n".join(lines_in))
    dataset = prepare(tmp_path / "talk.jsonl", tmp_path / "talk", tokenizer="byte")
    config = CONFIG.changed({"model.context_length": 64, "eval.every": 0})
    message = r"talk: in the validation split, no answer begins within a context of 64 tokens"
    with (
        pytest.raises(tensorkeep.UsageError, match=message),
        open_run(config, RunFolder(tmp_path / "run"), Dataset.open(dataset.path)),
    ):
        pass
    assert not (tmp_path / "run").exists()


ON_TALK = CONFIG.changed({"model.context_length": 32, "eval.every": 4, "checkpoint.every": 3, "loop.accumulate": 2})


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_training_on_answers_resumes_exactly(tmp_path: Path, data: Path, order: str) -> None:
    config = ON_TALK.changed({"data.order": order})
    run(config, tmp_path / "whole", data)
    run(config, tmp_path / "parts", data, stop_at=5)
    run(config, tmp_path / "parts", data, resume=True)
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None
    assert lines(tmp_path / "parts", "train", "evaluate") == lines(tmp_path / "whole", "train", "evaluate")


def test_a_step_weights_each_answer_token_equally(tmp_path: Path, data: Path) -> None:
    accumulated, at_once = ON_TALK.changed({"model.dropout": 0.0}), {"loop.accumulate": 1, "loop.batch_size": 6}
    figures = []
    for number, config in enumerate((accumulated, accumulated.changed(at_once))):
        with open_run(config, RunFolder(tmp_path / str(number)), Dataset.open(data)) as opened:
            figures.append((take_step(opened), opened.progress.tokens))
    assert figures[0][0] == pytest.approx(figures[1][0], rel=1e-5)
    assert figures[0][1] == figures[1][1]


def test_ranks_weight_each_answer_token_equally(tmp_path: Path, data: Path) -> None:
    class OfTwo(World):
        """Rank 0 of two, of which the other one has three times as many targets and a loss of 0."""

        def mean(self, value: torch.Tensor) -> torch.Tensor:
            return value * 2 if value.dtype == torch.float64 else value / 2

    with open_run(ON_TALK, RunFolder(tmp_path / "one"), Dataset.open(data)) as alone:
        expected = make_step(alone).loss.item()
        counted = alone.progress.tokens
    with open_run(ON_TALK, RunFolder(tmp_path / "two"), Dataset.open(data)) as opened:
        opened.world, opened.replicas = OfTwo(0, 2), 2
        # A quarter of all targets is here.
        assert make_step(opened).loss.item() == pytest.approx(expected / 4, rel=1e-5)
        assert opened.progress.tokens == 4 * counted


def test_techniques_that_need_the_whole_text_are_refused(tmp_path: Path, data: Path) -> None:
    for name, reason in (("length-curriculum", "draws windows"), ("progressive-length", "cuts rows into pieces")):
        with pytest.raises(tensorkeep.UsageError, match=f"{name} {reason}") as caught:
            training_batches(ON_TALK.changed({f"techniques.{name}": "on"}), Dataset.open(data))
        assert f"--techniques.{name} off" in str(caught.value.remedy)
    assert type(training_batches(CONFIG, Dataset.open(prepared(tmp_path)))) is Batches


def test_mfu_counts_all_positions_and_speed_those_that_count(tmp_path: Path, data: Path) -> None:
    config = ON_TALK.changed({"loop.steps": 3, "eval.every": 0})
    with open_run(config, RunFolder(tmp_path / "run"), Dataset.open(data)) as opened:
        train(opened, Witness())
        # The first step of a process is not timed. A step has two batches of three rows.
        positions = 2 * 2 * 3 * config.model.context_length
        assert opened.speed.flops == positions * opened.config.model.flops_per_token(config.model.context_length)
        assert 0 < opened.speed.tokens < positions / 2


def test_fewer_tokens_than_the_context_are_trained(tmp_path: Path, data: Path) -> None:
    config = ON_TALK.changed({"model.context_length": 4096, "loop.steps": 1, "loop.accumulate": 1})
    assert len(Dataset.open(data).train) < 4096
    assert run(config, tmp_path / "run", data).step == 1
