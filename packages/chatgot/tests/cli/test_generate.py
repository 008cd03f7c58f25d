"""``tensorkeep generate``: text is printed as it is generated."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatgot.cli import generate as command
from command_line import Call
from forked import ended, start
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case
from tiny_training import CONFIG, prepared
from tiny_training import run as train_run

PROMPT = [*("--prompt", "the "), *("--seed", "4")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    train_run(CONFIG.changed({"loop.steps": 1}), folder / "run", prepared(folder))
    return folder / "run"


def watched(monkeypatch: pytest.MonkeyPatch, before_token: Any) -> None:
    """Call a function before each token, with the number of tokens so far."""
    real = command.generate_stream

    def stream(*arguments: Any, **options: Any) -> Iterator[list[int]]:
        for number, tokens in enumerate(real(*arguments, **options)):
            before_token(number)
            yield tokens

    monkeypatch.setattr(command, "generate_stream", stream)


def test_tokens_print_at_once(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []
    watched(monkeypatch, lambda number: printed.append(capsys.readouterr().out))
    assert main(["generate", str(run), *PROMPT, "--max-new-tokens", "5"]) == 0
    out, errors = capsys.readouterr()
    # The prompt is printed character by character, too: characters are the tokens of this run.
    assert (printed[0], [len(each) for each in printed[1:]]) == ("the ", [1] * 4)
    streamed = "".join([*printed, out])
    assert streamed.endswith("\n") and errors.startswith("5 tokens after step 1: ")
    assert main(["generate", str(run), *PROMPT, "--tokens", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"].rstrip("\n"), document["tokens"]) == (streamed.rstrip("\n"), 5)


@pytest.mark.parametrize("options", [[], ["--json"], ["-q"]])
def test_ctrl_c_ends_the_line(run: Path, monkeypatch: pytest.MonkeyPatch, call: Call, options: list[str]) -> None:
    def interrupt(number: int) -> None:
        if number == 3:
            raise KeyboardInterrupt

    watched(monkeypatch, interrupt)
    out, errors = call("generate", run, *PROMPT, *options, code=130)
    assert errors == "interrupted\n"
    if options == ["--json"]:
        assert json.loads(out)["error"]["kind"] == "interrupted"
    else:
        assert [len(line) for line in out.split("\n")] == ([0] if options else [len("the ") + 3, 0])


def print_into(pipe: str, words: list[str]) -> None:
    os.dup2(os.open(pipe, os.O_WRONLY), 1)
    sys.stdout = os.fdopen(1, "w")
    sys.exit(main(words))


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
def test_closed_output_ends_it_quietly(run: Path, tmp_path: Path) -> None:
    pipe, errors = tmp_path / "pipe", tmp_path / "errors"
    os.mkfifo(pipe)
    process = start(print_into, str(pipe), ["generate", str(run), *PROMPT, "--tokens", "100000"], output=errors)
    with pipe.open("rb") as read:
        assert read.read(4) == b"the "
    assert (ended(process), errors.read_text()) == (141, "")


def test_bad_input_to_generate_is_one_clear_line(run: Path, check_refused: Callable[..., list[str]]) -> None:
    for option, value, message in (
        *(("--device", "meta", "the device 'meta' cannot be used"), ("--prompt", "%", "%")),
        *(("--tokens", "0", "--tokens"), ("--tokens", "9999999999999", "--tokens")),
        *(("--top-k", "0", "top_k is 0"), ("--temperature", "nan", "temperature is nan")),
    ):
        with case((option, value)):
            check_refused(["generate", run, option, value], 2, message)
