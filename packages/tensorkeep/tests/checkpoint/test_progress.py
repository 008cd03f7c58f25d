"""``progress=True`` draws a bar where stderr is a terminal."""

import io
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.testing.cases import case

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


@pytest.mark.parametrize("doing", CALLS)
def test_a_bar_is_drawn_on_a_terminal_only_and_a_function_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], doing: str
) -> None:
    tensorkeep.save(STATE, tmp_path / "a")
    tensorkeep.save({"w": torch.ones(2**20)}, tmp_path / "b")
    seen: list[tuple[int, int]] = []
    CALLS[doing](tmp_path, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (4 * 2**20, 4 * 2**20)
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    CALLS[doing](tmp_path, True)
    assert capsys.readouterr() == ("", "")
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    CALLS[doing](tmp_path, True)
    assert doing in terminal.getvalue()
    assert "4.2/4.2 MB" in terminal.getvalue()


def test_a_background_save_draws_no_bar(tmp_path: Path) -> None:
    for call in (partial(tensorkeep.save_async, STATE), CheckpointManager):
        with case(call), pytest.raises(tensorkeep.UsageError, match="progress=True draws a bar"):
            call(tmp_path / "c", progress=True)
    tensorkeep.save_async(STATE, tmp_path / "c", progress=False).wait()
