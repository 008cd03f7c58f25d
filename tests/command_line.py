"""Fixtures that call the command line in this process, and two small checkpoints that differ."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tensorkeep
from tensorkeep.cli.main import main


class Shown(NamedTuple):
    out: str
    err: str


def results(folder: Path) -> dict[str, Any]:
    """Return the results that a bench has written."""
    return json.loads((folder / "results.json").read_text())


def run_on_terminal(terminal: str, words: list[str], environment: dict[str, str]) -> None:
    """Run a command on a pseudo-terminal; the body of a process of its own."""
    os.setsid()
    # A terminal that the leader of a session opens controls the session, to which it sends SIGHUP.
    device = os.open(terminal, os.O_RDWR)
    for standard in range(3):
        os.dup2(device, standard)
    os.environ.update(environment)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.exit(main(words))


Call = Callable[..., Shown]
RunJson = Callable[..., Any]


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied embedding, an optimizer, a plain value; 3 tensors of its own and a view."""
    path = tmp_path_factory.mktemp("cli") / "first"
    embedding = torch.arange(4096, dtype=torch.float32).reshape(64, 64).bfloat16()
    model = {"wte.weight": embedding, "lm_head.weight": embedding, "bias": torch.zeros(7)}
    state = {"model": model, "optimizer": {"exp_avg": torch.ones(64, 64), "lr": 3e-4}}
    tensorkeep.save(state, path, metadata={"run": "unit"})
    return path


@pytest.fixture(scope="session")
def second(first: Path) -> Path:
    """The first checkpoint with one changed element, one more tensor and another learning rate."""
    state = tensorkeep.load(first)
    state["model"]["bias"][3] = 0.5
    state["model"]["extra"] = torch.ones(2)
    state["optimizer"]["lr"] = 1e-4
    tensorkeep.save(state, first.with_name("second"))
    return first.with_name("second")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint with one flipped byte in the middle of its only tensor."""
    path = tmp_path / "damaged"
    tensorkeep.save({"model": {"w": torch.ones(100_000)}}, path)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call the command line, which must exit with a code, and return what it printed."""

    def call(*words: object, code: int = 0) -> Shown:
        capsys.readouterr()
        found = main([*map(str, words)])
        shown = Shown(*capsys.readouterr())
        assert found == code, shown
        return shown

    return call


@pytest.fixture
def run_json(call: Call) -> RunJson:
    """Call the command line with ``--json``, which must exit with a code, and return the one document."""
    return lambda *words, code=0: json.loads(call(*words, "--json", code=code).out)


@pytest.fixture
def check_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> Callable[..., list[str]]:
    """Call the command line, which must end with a code and an error; return the error and its remedy."""

    def check(arguments: list[str], code: int, message: str) -> list[str]:
        monkeypatch.chdir(tmp_path)
        out, err = call(*arguments, code=code)
        assert out == ""
        assert message in err
        assert "Traceback" not in err
        lines = err.splitlines()
        assert len(lines) == 2
        return lines

    return check
