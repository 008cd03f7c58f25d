"""``tensorkeep eval``: the loss of a text, bits per byte, and multiple-choice questions."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from tensorkeep.cli.main import main
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.run.trained import load_trained_at
from train.tiny_training import CONFIG, TEXT, lines, prepared
from train.tiny_training import run as train_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    config = CONFIG.changed({"loop.steps": 60, "optim.lr": 1e-2, "model.dropout": 0.0, "checkpoint.every": 20})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        train_run(config, folder / "run", prepared(folder))
    return folder / "run"


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["eval", *map(str, words)])
    return code, capsys.readouterr().err


def test_validation_split_has_the_loss_of_the_log(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated(capsys, run)
    (logged,) = lines(run, "evaluate")
    assert found["loss"] == pytest.approx(logged["validation_loss"], rel=1e-6)
    assert (found["step"], found["tokens"], found["bytes"]) == (60, logged["tokens"], logged["tokens"])
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    # Characters are one byte each here.
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert evaluated(capsys, f"{run}@40")["loss"] > found["loss"]
    assert evaluated(capsys, run, "--batch-size", 1)["loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert evaluated(capsys, run, "--tokens", 32)["tokens"] == 32


def test_text_is_shown_in_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run)]) == 0
    out, errors = capsys.readouterr()
    assert errors == ""
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        *("model", "text", "loss", "perplexity", "bits per byte", "time")
    ]


def test_text_file_is_tokenized_as_the_run_needs_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, strange = tmp_path / "seen.txt", tmp_path / "strange.txt"
    seen.write_text(TEXT[:400])
    strange.write_text(TEXT[:400][::-1])
    found = evaluated(capsys, run, "--data", seen)
    # The first character has nothing before it.
    assert (found["tokens"], found["bytes"], found["data"]) == (399, 399, str(seen))
    assert found["bits_per_byte"] < 0.7 * evaluated(capsys, run, "--data", strange)["bits_per_byte"]


def test_bits_per_byte_count_bytes_and_not_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "größer als drei Äpfel, größer als zwölf Öfen; " * 60
    (tmp_path / "text.txt").write_text(text)
    documents = "".join(json.dumps({"text": text[begin : begin + 100]}) + "\n" for begin in range(0, len(text), 100))
    (tmp_path / "text.jsonl").write_text(documents)
    prepare(tmp_path / "text.jsonl", tmp_path / "prepared", tokenizer="bpe", vocab_size=280)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        train_run(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", tmp_path / "prepared")
    found = evaluated(capsys, tmp_path / "run", "--data", tmp_path / "text.jsonl")
    # Tokens that end a document have no bytes. One comes first, so that every byte is predicted.
    assert found["bytes"] == len(text.encode()) > found["tokens"]
    stream = evaluated(capsys, tmp_path / "run", "--data", tmp_path / "text.txt")
    assert (stream["bytes"], stream["tokens"] < found["tokens"]) == (found["bytes"], True)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])


def test_bytes_of_conversations_are_those_of_the_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = "fünf Öfen"
    talk = {"messages": [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": answer}]}
    (tmp_path / "talk.jsonl").write_text(f"{json.dumps(talk)}\n" * 60)
    data = prepare(tmp_path / "talk.jsonl", tmp_path / "data", tokenizer="byte").path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        train_run(CONFIG.changed({"loop.steps": 1, "model.context_length": 64}), tmp_path / "run", data)
    found = evaluated(capsys, tmp_path / "run")
    # The token that ends an answer is predicted, and has no bytes.
    answers, size = found["tokens"] // (len(answer.encode()) + 1), len(answer.encode())
    assert (found["tokens"], found["bytes"]) == (answers * (size + 1), answers * size)
    assert answers > 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])
    code, errors = refused(capsys, tmp_path / "run", "--data", tmp_path / "talk.jsonl")
    assert code == 2
    assert "talk.jsonl: consists of conversations" in errors and "--tokenizer from:RUN" in errors


def test_remedy_for_conversations_longer_than_the_context_is_no_option_of_eval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, length in (("short", 1), ("long", 90)):
        talk = [{"role": "user", "content": "q" * length}, {"role": "assistant", "content": "a"}]
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 60)
        prepare(tmp_path / f"{name}.jsonl", tmp_path / name, tokenizer="byte")
    monkeypatch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
    train_run(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", tmp_path / "short")
    code, errors = refused(capsys, tmp_path / "run", "--data", tmp_path / "long")
    assert code == 2 and "no answer begins within a context of 16 tokens" in errors
    assert "use shorter conversations, or a model that was started with a longer context (tensorkeep train" in errors


def test_prepared_data_of_another_text(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "and again the lazy dog; " * 30)
    data = prepare(other, tmp_path / "same", tokenizer="char").path
    assert evaluated(capsys, run, "--data", data)["tokens"] > 0
    data = prepare(other, tmp_path / "other", tokenizer="byte").path
    code, errors = refused(capsys, run, "--data", data)
    assert code == 2
    assert "was prepared with another tokenizer (byte) than the data of the run (char)" in errors


def test_missing_data_of_a_run_names_the_option(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["data"]["path"] = str(tmp_path / "gone")
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    code, errors = refused(capsys, tmp_path / "run")
    assert code == 5
    assert "the data of the run is no longer there" in errors and "--data PATH" in errors


def test_precision_is_that_of_the_run_unless_given(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["config"]["techniques"] = {"mixed-precision": {"dtype": "bf16"}, "quantised-forward": {}}
    record["data"]["path"] = str(run.parent / "prepared")
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert main(["eval", str(tmp_path / "run"), "--json"]) == 0
    out, errors = capsys.readouterr()
    found, plain = json.loads(out), evaluated(capsys, tmp_path / "run", "--precision", "float32")
    assert (found["precision"], plain["precision"]) == ("bf16", "float32")
    assert found["loss"] != plain["loss"] == pytest.approx(found["loss"], rel=0.01)
    assert errors.startswith("quantised-forward, which the run was trained with, is off")


@pytest.mark.parametrize("attention", ["same", "float32"])
def test_loss_of_mixed_precision_is_that_of_the_log(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], attention: str
) -> None:
    mixed = {"techniques.mixed-precision": {"dtype": "bf16", "attention": attention}}
    config = CONFIG.changed({"loop.steps": 30, "optim.lr": 1e-2, "model.dropout": 0.0, "model.d_model": 64, **mixed})
    with pytest.MonkeyPatch.context() as patch:
        for module in ("run.setup", "techniques.mixed_precision"):
            patch.setattr(f"tensorkeep.train.{module}.measured_peak", lambda *_: 1e9)
        train_run(config, tmp_path / "run", run.parent / "prepared")
    (logged,) = lines(tmp_path / "run", "evaluate")
    assert evaluated(capsys, tmp_path / "run")["loss"] == pytest.approx(logged["validation_loss"], rel=1e-6)


def test_weights_that_are_not_finite_have_no_accuracy(run: Path) -> None:
    from tensorkeep.train.scoring.multiple_choice import Question, score_choices

    model, tokenizer = load_trained_at(run, device="cpu")[:2]
    model.norm.weight.data.fill_(math.nan)
    with pytest.raises(tensorkeep.UsageError, match="question 1: the log-probability of an ending is nan") as caught:
        score_choices(model, [Question("the", ("fox", "dog"), 0)], tokenizer, rows=2)
    assert "use an earlier checkpoint" in str(caught.value.remedy)


def test_mistakes_are_usage_errors(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unknown.txt").write_text("the quick Ω")
    (tmp_path / "short.txt").write_text("t")
    for words, message in (
        (("--data", tmp_path / "unknown.txt"), "Ω"),
        (("--data", tmp_path / "short.txt"), "fewer than two tokens"),
        (("--data", "x", "--multiple-choice", "y"), "--multiple-choice takes no text"),
        (("--tokens", "0"), "--tokens"),
    ):
        code, errors = refused(capsys, run, *words)
        assert (code, message in errors) == (2, True), errors
    assert refused(capsys, run, "--data", tmp_path / "none.txt")[0] == 5
    assert refused(capsys, run, "--multiple-choice", tmp_path / "none.jsonl")[0] == 5


def questions(path: Path, *given: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in given))
    return path


def test_accuracies_are_those_of_the_most_probable_endings(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    found = evaluated(capsys, run, "--multiple-choice", file)
    assert (found["questions"], found["truncated"], found["task"]) == (5, 5, "multiple-choice")
    assert found["acc_norm"] == 0.8
    assert found["acc_norm_stderr"] == pytest.approx(math.sqrt(0.8 * 0.2 / 5))
    for rows in (1, 3):
        again = evaluated(capsys, run, "--multiple-choice", file, "--batch-size", rows)
        assert (again["acc"], again["acc_norm"]) == (found["acc"], found["acc_norm"])
    assert main(["eval", str(run), "--multiple-choice", str(file)]) == 0
    assert "80.00% (standard error 17.89%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a question"),
        ('{"ctx": "a", "endings": ["b", "c"]}', "missing required field `label`"),
        ('{"ctx": "a", "endings": ["b"], "label": 0}', "line 2 is not a question"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 2}', "line 2 has the label 2, and 2 endings"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": ""}', "line 2 is not a question"),
    ],
)
def test_line_that_is_not_a_question_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    good = '{"ctx": "the", "endings": ["fox", "dog"], "label": 0}'
    (tmp_path / "questions.jsonl").write_text(f"{good}\n{line}\n")
    code, errors = refused(capsys, run, "--multiple-choice", tmp_path / "questions.jsonl")
    assert code == 2
    assert message in errors and str(tmp_path / "questions.jsonl") in errors


def test_empty_file_and_unknown_characters_in_a_question(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no questions" in refused(capsys, run, "--multiple-choice", tmp_path / "empty.jsonl")[1]
    file = questions(tmp_path / "odd.jsonl", {"ctx": "the", "endings": ["fox", "Ω"], "label": 0})
    code, errors = refused(capsys, run, "--multiple-choice", file)
    assert code == 2
    assert "question 1: " in errors and "Ω" in errors


def test_log_probabilities_are_those_of_single_tokens(run: Path) -> None:
    """Computed without batches and padding, token by token."""
    import torch

    from tensorkeep.train.scoring.multiple_choice import Question, _encoded, _log_probabilities

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
