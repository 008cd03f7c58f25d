"""``tensorkeep chat``: on a terminal, line by line without one, and as JSON."""

import io
import json
import os
import select
import time
from collections.abc import Generator
from pathlib import Path
from typing import Self

import pytest

from chatgot.generate import ChatSession
from command_line import Call, run_on_terminal
from forked import ended, kill, start
from tiny_training import CONFIG, conversations, prepared
from tiny_training import run as train_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that has learned one answer."""
    folder = tmp_path_factory.mktemp("chat")
    data = conversations(folder, [[("user", "hi"), ("assistant", "yes.")]] * 60)
    config = CONFIG.changed(
        {"model.context_length": 48, "model.d_model": 32, "model.dropout": 0, "loop.steps": 60, "optim.lr": 2e-2}
    )
    train_run(config, folder / "run", data)
    return folder / "run"


def test_each_line_is_a_message_and_json_one_document(run: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    lines = ["hi", "/reset", "/help me", "/exit", "hi"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n".join(lines)))
    out, errors = call("chat", run, "--tokens", "2", "--json")
    assert [each["content"] for each in json.loads(out)["messages"] if each["role"] == "user"] == lines
    assert "commands" not in errors
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert call("chat", run, "--temperature", "0").out == "yes.\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    document = json.loads(call("chat", run, "--temperature", "0", "--json", "--system", "S", "--stop", "s.").out)
    assert (document["step"], document["messages"][0]) == (60, {"role": "system", "content": "S"})
    assert [each["role"] for each in document["messages"]] == ["system", "user", "assistant"]
    assert "s." not in document["messages"][2]["content"]


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, run: Path, *options: str) -> None:
        self._fd, theirs = os.openpty()
        words, output = ["chat", str(run), *options], run.with_name("output")
        self.process = start(run_on_terminal, os.ttyname(theirs), words, {"TERM": "dumb"}, output=output)
        self.shown = ""
        self._theirs = theirs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.process)
        os.close(self._fd)
        os.close(self._theirs)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str, seconds: float = 90) -> str:
        """Wait until a text is shown; return what was shown since the last call, up to its end."""
        limit = time.monotonic() + seconds
        while text not in self.shown:
            assert select.select([self._fd], [], [], max(0, limit - time.monotonic()))[0], self.shown
            self.shown += os.read(self._fd, 4096).decode(errors="replace")
        before, found, self.shown = self.shown.partition(text)
        return before + found


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
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
        assert ended(terminal.process) == 0


def test_ctrl_c_ends_an_answer_and_not_the_conversation(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
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
    out, errors = call("chat", run)
    assert out == "yes\nno\n"
    assert errors.count("> ") == 4
    # The first Ctrl-C ended an answer, the second one came at the prompt.
    assert "interrupted\n> \ncommands: /reset" in errors


def test_run_of_other_text_is_refused(tmp_path: Path, call: Call) -> None:
    train_run(CONFIG.changed({"loop.steps": 1}), tmp_path / "run", prepared(tmp_path))
    errors = call("chat", tmp_path / "run", code=2).err
    assert "error: the model was not trained on conversations: its tokenizer (char)" in errors
    assert "docs/how-to/chat.md" in errors


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize("option", ["--min-p 2", "--repetition-penalty 0", "--top-p 0"])
def test_options_out_of_range_are_usage_errors(run: Path, call: Call, command: str, option: str) -> None:
    name, value = option.removeprefix("--").replace("-", "_").split()
    assert f"{name} is {float(value)}" in call(command, run, *option.split(), code=2).err


def test_generate_ends_before_a_text(run: Path, call: Call) -> None:
    # The prompt may contain it.
    command = ["generate", str(run), "--prompt", "hi yes", "--tokens", "30", "--temperature", "0", "--json"]
    whole = json.loads(call(*command).out)["text"]
    stop = whole[len("hi yes") :][2:4]
    text = json.loads(call(*command, "--stop", stop, "--stop", "unseen").out)["text"]
    assert text == whole[: whole.index(stop, len("hi yes"))]


def test_turns_that_are_left_out_are_noted(run: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    def answer(self: ChatSession, text: str) -> Generator[str]:
        self.left_out = int(text)
        return (piece for piece in ["yes"])

    monkeypatch.setattr("sys.stdin", io.StringIO("1\n2\n"))
    monkeypatch.setattr(ChatSession, "answer", answer)
    notes = ["1 turn is left out, the oldest one", "2 turns are left out, the oldest ones"]
    assert call("chat", run).err.splitlines() == [f"the context is full: {note}" for note in notes]
