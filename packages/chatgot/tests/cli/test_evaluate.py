"""``tensorkeep eval``: the loss of a text, bits per byte, and multiple-choice questions."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from chatgot.data.prepare import prepare
from chatgot.run.weights import load_trained_at
from chatgot.scoring import Question, _encoded, _log_probabilities, score_choices
from command_line import Call
from tensorkeep.testing.cases import case
from tiny_training import CONFIG, TEXT, conversations, follow, lines, prepared
from tiny_training import run as train_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    config = CONFIG.changed({"loop.steps": 60, "optim.lr": 1e-2, "model.dropout": 0.0, "checkpoint.every": 20})
    train_run(config, folder / "run", prepared(folder))
    return folder / "run"


def evaluated(call: Call, *words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call("eval", *words, "--json").out)
    return found


def refused(call: Call, *words: object, code: int = 2) -> str:
    return call("eval", *words, code=code).err


def test_validation_split_has_the_loss_of_the_log(run: Path, call: Call) -> None:
    found = evaluated(call, run)
    (logged,) = lines(run, "evaluate")
    assert found["loss"] == pytest.approx(logged["validation_loss"], rel=1e-6)
    assert (found["step"], found["tokens"], found["bytes"]) == (60, logged["tokens"], logged["tokens"])
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    # Characters are one byte each here.
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert evaluated(call, f"{run}@40")["loss"] > found["loss"]
    assert evaluated(call, run, "--batch-size", 1)["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert evaluated(call, run, "--tokens", 32)["tokens"] == 32
    out, errors = call("eval", run)
    rows = ["model", "text", "loss", "perplexity", "bits per byte", "time"]
    assert ([line.split("  ")[0] for line in out.splitlines()], errors) == (rows, "")


def test_other_text_is_tokenized_as_the_run_needs_it(run: Path, tmp_path: Path, call: Call) -> None:
    seen, strange, other = (tmp_path / f"{name}.txt" for name in ("seen", "strange", "other"))
    seen.write_text(TEXT[:400])
    strange.write_text(TEXT[:400][::-1])
    found = evaluated(call, run, "--data", seen)
    # The first character has nothing before it.
    assert (found["tokens"], found["bytes"], found["data"]) == (399, 399, str(seen))
    assert found["bits_per_byte"] < 0.7 * evaluated(call, run, "--data", strange)["bits_per_byte"]
    other.write_text(TEXT + "and again the lazy dog; " * 30)
    data = prepare(other, tmp_path / "same", tokenizer="char").path
    assert evaluated(call, run, "--data", data)["tokens"] > 0
    data = prepare(other, tmp_path / "other", tokenizer="byte").path
    errors = refused(call, run, "--data", data)
    assert "was prepared with another tokenizer (byte) than the data of the run (char)" in errors


def test_bits_per_byte_count_bytes_and_not_tokens(tmp_path: Path, call: Call) -> None:
    text = "größer als drei Äpfel, größer als zwölf Öfen; " * 60
    (tmp_path / "text.txt").write_text(text)
    documents = "".join(json.dumps({"text": text[begin : begin + 100]}) + "\n" for begin in range(0, len(text), 100))
    (tmp_path / "text.jsonl").write_text(documents)
    prepare(tmp_path / "text.jsonl", tmp_path / "prepared", tokenizer="bpe", vocab_size=280)
    train_run(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", tmp_path / "prepared")
    found = evaluated(call, tmp_path / "run", "--data", tmp_path / "text.jsonl")
    # Tokens that end a document have no bytes. One comes first, so that every byte is predicted.
    assert found["bytes"] == len(text.encode()) > found["tokens"]
    stream = evaluated(call, tmp_path / "run", "--data", tmp_path / "text.txt")
    assert (stream["bytes"], stream["tokens"] < found["tokens"]) == (found["bytes"], True)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])


def test_bytes_of_conversations_are_those_of_the_answers(tmp_path: Path, call: Call) -> None:
    answer = "fünf Öfen"
    data = conversations(tmp_path, [[("user", "how many?"), ("assistant", answer)]] * 60)
    train_run(CONFIG.changed({"loop.steps": 1, "model.context_length": 64}), tmp_path / "run", data)
    found = evaluated(call, tmp_path / "run")
    # The token that ends an answer is predicted, and has no bytes.
    answers, size = found["tokens"] // (len(answer.encode()) + 1), len(answer.encode())
    assert (found["tokens"], found["bytes"]) == (answers * (size + 1), answers * size)
    assert answers > 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])
    errors = refused(call, tmp_path / "run", "--data", tmp_path / "talk.jsonl")
    assert "talk.jsonl: consists of conversations" in errors
    follow(errors, SOURCE=tmp_path / "talk.jsonl", RUN=tmp_path / "run", NEW=tmp_path / "again")
    assert evaluated(call, tmp_path / "run", "--data", tmp_path / "again")["tokens"] == found["tokens"]


def test_remedy_for_conversations_longer_than_the_context_is_no_option_of_eval(tmp_path: Path, call: Call) -> None:
    for name, length in (("short", 1), ("long", 90)):
        (tmp_path / name).mkdir()
        conversations(tmp_path / name, [[("user", "q" * length), ("assistant", "a")]] * 60)
    train_run(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", tmp_path / "short" / "talk")
    errors = refused(call, tmp_path / "run", "--data", tmp_path / "long" / "talk")
    assert "no answer begins within a context of 16 tokens" in errors
    assert "use shorter conversations, or a model that was started with a longer context (tensorkeep train" in errors


def copied(run: Path, folder: Path, change: Callable[[Any], object]) -> None:
    """Copy a run, and change its record."""
    shutil.copytree(run, folder)
    record = json.loads((folder / "run.json").read_text())
    change(record)
    (folder / "run.json").write_text(json.dumps(record))


def test_precision_is_that_of_the_run_unless_given(run: Path, tmp_path: Path, call: Call) -> None:
    techniques = {"mixed-precision": {"dtype": "bf16"}, "quantised-forward": {}}
    copied(run, tmp_path / "run", lambda record: record["config"].update(techniques=techniques))
    out, errors = call("eval", tmp_path / "run", "--json")
    found, plain = json.loads(out), evaluated(call, tmp_path / "run", "--precision", "float32")
    assert (found["precision"], plain["precision"]) == ("bf16", "float32")
    assert found["loss"] != plain["loss"] == pytest.approx(found["loss"], rel=0.01)
    assert errors.startswith("quantised-forward, which the run was trained with, is off")


def test_missing_data_of_a_run_names_the_option(run: Path, tmp_path: Path, call: Call) -> None:
    copied(run, tmp_path / "run", lambda record: record["data"].update(path=str(tmp_path / "gone")))
    errors = refused(call, tmp_path / "run", code=5)
    assert "the data of the run is no longer there" in errors and "--data PATH" in errors


@pytest.mark.parametrize("attention", ["same", "float32"])
def test_loss_of_mixed_precision_is_that_of_the_log(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    monkeypatch.setattr("chatgot.techniques.mixed_precision.measured_peak", lambda *_: 1e9)
    mixed = {"techniques.mixed-precision": {"dtype": "bf16", "attention": attention}}
    config = CONFIG.changed({"loop.steps": 8, "optim.lr": 1e-2, "model.dropout": 0.0, "model.d_model": 64, **mixed})
    train_run(config, tmp_path / "run", run.parent / "prepared")
    (logged,) = lines(tmp_path / "run", "evaluate")
    assert evaluated(call, tmp_path / "run")["loss"] == pytest.approx(logged["validation_loss"], rel=1e-6)


def test_weights_that_are_not_finite_have_no_accuracy(run: Path) -> None:
    model, tokenizer = load_trained_at(run, device="cpu")[:2]
    model.norm.weight.data.fill_(math.nan)
    with pytest.raises(tensorkeep.UsageError, match="question 1: the log-probability of an ending is nan") as caught:
        score_choices(model, [Question("the", ("fox", "dog"), 0)], tokenizer, rows=2)
    assert "use an earlier checkpoint" in str(caught.value.remedy)


def test_mistakes_are_usage_errors(run: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "unknown.txt").write_text("the quick Ω")
    (tmp_path / "short.txt").write_text("t")
    for code, words, message in (
        (2, ("--data", tmp_path / "unknown.txt"), "Ω"),
        (2, ("--data", tmp_path / "short.txt"), "fewer than two tokens"),
        (2, ("--data", "x", "--multiple-choice", "y"), "--multiple-choice takes no text"),
        (2, ("--tokens", "0"), "--tokens"),
        (5, ("--data", tmp_path / "none.txt"), "none.txt"),
        (5, ("--multiple-choice", tmp_path / "none.jsonl"), "none.jsonl"),
    ):
        with case(message):
            assert message in refused(call, run, *words, code=code)
    file = tmp_path / "questions.jsonl"
    good = '{"ctx": "the", "endings": ["fox", "dog"], "label": 0}\n'
    for content, message in (
        ("\n", "holds no questions"),
        ('{"ctx": "the", "endings": ["fox", "Ω"], "label": 0}', "question 1: the character 'Ω'"),
        (good + "{", "line 2 is not a question"),
        (good + '{"ctx": "a", "endings": ["b", "c"]}', "missing required field `label`"),
        (good + '{"ctx": "a", "endings": ["b"], "label": 0}', "line 2 is not a question"),
        (good + '{"ctx": "a", "endings": ["b", "c"], "label": 2}', "line 2 has the label 2, and 2 endings"),
        (good + '{"ctx": "a", "endings": ["b", "c"], "label": ""}', "line 2 is not a question"),
    ):
        with case(content):
            file.write_text(content)
            errors = refused(call, run, "--multiple-choice", file)
            assert message in errors and (str(file) in errors or "Ω" in content)


def questions(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    return path


def test_accuracies_are_those_of_the_most_probable_endings(run: Path, tmp_path: Path, call: Call) -> None:
    words = TEXT.split("; ")[0]
    start, end = words[:20], words[21:30]
    file = questions(
        tmp_path / "questions.jsonl",
        {"ctx": start, "endings": [end, end[::-1]], "label": 0, "source_id": "ignored"},
        {"ctx": start, "endings": [end[::-1], end], "label": "1"},
        {"ctx": start, "endings": [end, end[::-1]], "label": 1},
        # Shorter: more probable in total, less probable per token.
        {"ctx": start, "endings": [end, "zzz"], "label": 0},
        # Longer than the model's context of 16.
        {"ctx": words * 2, "endings": [end[::-1], end], "label": 1},
    )
    found = evaluated(call, run, "--multiple-choice", file)
    assert (found["questions"], found["truncated"], found["task"]) == (5, 5, "multiple-choice")
    assert found["acc_norm"] == 0.8
    assert found["acc_norm_stderr"] == pytest.approx(math.sqrt(0.8 * 0.2 / 5))
    for rows in (1, 3):
        again = evaluated(call, run, "--multiple-choice", file, "--batch-size", rows)
        assert (again["acc"], again["acc_norm"]) == (found["acc"], found["acc_norm"])
    assert "80.00% (standard error 17.89%)" in call("eval", run, "--multiple-choice", file).out


def test_log_probabilities_are_those_of_single_tokens(run: Path) -> None:
    """Computed without batches and padding, token by token."""
    model, tokenizer = load_trained_at(run, device="cpu")[:2]
    rows = _encoded(0, Question("the q", ("uick", "brown fox"), 0), tokenizer)
    expected = []
    with torch.no_grad():
        for row in rows:
            total = 0.0
            for place in range(len(row.tokens) - row.scored, len(row.tokens)):
                logits = model(torch.tensor([row.tokens[:place]]))[0, -1]
                total += float(logits.log_softmax(-1)[row.tokens[place]])
            expected.append(total)
    assert _log_probabilities(model, rows, 2, None) == pytest.approx(expected, rel=1e-5)
    assert [row.scored for row in rows] == [5, 10]
