"""``progress=True`` draws a bar where stderr is a terminal."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager

STATE = {"w": torch.zeros(2**20)}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


CALLS: dict[str, Callable[[Path, Any], Any]] = {
    "saving": lambda path, shown: tensorkeep.save(STATE, path / "new", progress=shown),
    "loading": lambda path, shown: tensorkeep.load(path / "a", progress=shown),
    "verifying": lambda path, shown: tensorkeep.verify(path / "a", progress=shown),
    "comparing": lambda path, shown: tensorkeep.diff(path / "a", path / "b", progress=shown),
    "converting": lambda path, shown: tensorkeep.convert(path / "a", path / "new", progress=shown),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensorkeep.save(STATE, tmp_path / "a")
    tensorkeep.save({"w": torch.ones(2**20)}, tmp_path / "b")
    return tmp_path


@pytest.mark.parametrize("doing", CALLS)
def test_a_bar_is_drawn_on_a_terminal(path: Path, monkeypatch: pytest.MonkeyPatch, doing: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    CALLS[doing](path, True)
    assert doing in terminal.getvalue()
    assert "4.2/4.2 MB" in terminal.getvalue()


@pytest.mark.parametrize("doing", CALLS)
def test_nothing_is_drawn_elsewhere(path: Path, capsys: pytest.CaptureFixture[str], doing: str) -> None:
    CALLS[doing](path, True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("doing", CALLS)
def test_a_function_is_called(path: Path, doing: str) -> None:
    seen: list[tuple[int, int]] = []
    CALLS[doing](path, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4 * 2**20, 4 * 2**20)


def test_a_background_save_draws_no_bar(tmp_path: Path) -> None:
    for call in (
        lambda: tensorkeep.save_async(STATE, tmp_path / "c", progress=True),
        lambda: CheckpointManager(tmp_path / "run", progress=True),
    ):
        with pytest.raises(tensorkeep.UsageError, match="progress=True draws a bar"):
            call()
    tensorkeep.save_async(STATE, tmp_path / "c", progress=False).wait()
