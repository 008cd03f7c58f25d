"""``tensorkeep chat``: on a terminal, line by line without one, and as JSON."""

import io
import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from tensorkeep.cli.main import main
from tensorkeep.train.chat import ChatSession
from tensorkeep.train.data.prepare import prepare
from train.tiny_training import CONFIG, prepared
from train.tiny_training import run as train_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has learned one answer."""
    folder = tmp_path_factory.mktemp("chat")
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes."}]})
    (folder / "talk.jsonl").write_text(f"{line}\n" * 60)
    data = prepare(folder / "talk.jsonl", folder / "talk", tokenizer="byte").path
    config = CONFIG.changed(
        {"model.context_length": 48, "model.d_model": 32, "model.dropout": 0, "loop.steps": 60, "optim.lr": 2e-2}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
        train_run(config, folder / "run", data)
    return folder / "run"


def test_each_line_of_standard_input_is_a_message(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["hi", "/reset", "/help me", "/exit", "hi"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(lines)))
    assert main(["chat", str(run), "--tokens", "2", "--json"]) == 0
    out, errors = capsys.readouterr()
    assert [each["content"] for each in json.loads(out)["messages"] if each["role"] == "user"] == lines
    assert "commands" not in errors
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", str(run), "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "yes.\n"


def test_json_is_one_document(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", str(run), "--temperature", "0", "--json", "--system", "S", "--stop", "s."]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["messages"][0]) == (60, {"role": "system", "content": "S"})
    assert [each["role"] for each in document["messages"]] == ["system", "user", "assistant"]
    assert "s." not in document["messages"][2]["content"]


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, run: Path, *options: str) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
            words = [sys.executable, "-m", "tensorkeep", "chat", str(run), *options]
            os.execve(sys.executable, words, environment)
        self.pid = pid
        self.shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, signal.SIGKILL)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str, seconds: float = 90) -> str:
        """Wait until a text is shown; return what was shown since the last call, up to its end."""
        limit = time.monotonic() + seconds
        while text not in self.shown:
            assert select.select([self._fd], [], [], max(0, limit - time.monotonic()))[0], self.shown
            try:
                read = os.read(self._fd, 4096).decode(errors="replace")
            except OSError as error:  # the process has closed its end
                raise AssertionError(self.shown) from error
            self.shown += read
        before, found, self.shown = self.shown.partition(text)
        return before + found

    def ended(self) -> int:
        while True:
            try:
                if not os.read(self._fd, 4096):
                    break
            except OSError:
                break
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_on_a_terminal_there_is_a_prompt_and_ctrl_d_leaves(run: Path) -> None:
    with Terminal(run, "--temperature", "0") as terminal:
        assert "parameters, step 60; commands: /reset" in terminal.until("> ")
        terminal.type("hi\n")
        assert "yes." in terminal.until("> ")
        # A message that does not fit ends nothing.
        terminal.type("x" * 60 + "\n")
        assert "error: the message needs 63 tokens" in terminal.until("> ")
        terminal.type("/help\n")
        assert "commands: /reset" in terminal.until("> ")
        terminal.type("/reset\n")
        assert "the conversation is forgotten" in terminal.until("> ")
        terminal.type("\x04")
        assert terminal.ended() == 0


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["hi", KeyboardInterrupt, "again", EOFError])
    answers = iter([["yes", KeyboardInterrupt], ["no"]])

    def read() -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    def answer(self: ChatSession, text: str) -> Generator[str]:
        for piece in next(answers):
            if isinstance(piece, str):
                yield piece
            else:
                raise piece

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(ChatSession, "answer", answer)
    assert main(["chat", str(run)]) == 0
    out, errors = capsys.readouterr()
    assert out == "yes\nno\n"
    assert errors.count("> ") == 4
    # The first Ctrl-C ended an answer, the second one came at the prompt.
    assert "interrupted\n> \ncommands: /reset" in errors


def test_run_of_other_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)
    train_run(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", prepared(tmp_path))
    assert main(["chat", str(tmp_path / "run")]) == 2
    errors = capsys.readouterr().err
    assert "error: the model was not trained on conversations: its tokenizer (char)" in errors
    assert "docs/how-to/chat.md" in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-p", "2"], "min_p is 2.0"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0"),
        (["--top-p", "0"], "top_p is 0.0"),
    ],
)
def test_options_out_of_range_are_usage_errors(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    for command in (["chat", str(run)], ["generate", str(run)]):
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err


def test_generate_ends_before_a_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The prompt may contain it.
    command = ["generate", str(run), "--prompt", "hi yes", "--tokens", "30", "--temperature", "0", "--json"]
    assert main(command) == 0
    whole = json.loads(capsys.readouterr().out)["text"]
    stop = whole[len("hi yes") :][2:4]
    assert main([*command, "--stop", stop, "--stop", "unseen"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert text == whole[: whole.index(stop, len("hi yes"))]


@pytest.mark.parametrize(
    ("left_out", "note"),
    [(1, "1 turn is left out, the oldest one\n"), (2, "2 turns are left out, the oldest ones\n")],
)
def test_turns_that_are_left_out_are_noted(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left_out: int, note: str
) -> None:
    def answer(self: ChatSession, text: str) -> Generator[str]:
        self.left_out = left_out
        return (piece for piece in ["yes"])

    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setattr(ChatSession, "answer", answer)
    assert main(["chat", str(run)]) == 0
    assert capsys.readouterr().err == f"the context is full: {note}"
