"""Runs of several processes as a whole: how they begin, what one of them does alone, and how they end together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.testing.equality import difference
from tensorkeep.testing.technique_suite import TINY, last_state, losses
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import changed_settings, check_settings, joined
from tensorkeep.train.techniques.stack import Stack
from train.techniques.several_processes import done_by, started, task

TEXT = "the quick brown fox jumps over the lazy dog; " * 60
DDP = TINY.changed({"techniques.ddp": "on"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(TEXT)
    prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return folder / "prepared"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def killed(place: Path, data: Path) -> list[subprocess.CompletedProcess[str]]:
    """Let two processes train until one of them is killed."""
    return started(2, [task("stop one", DDP, place / "killed", data, after=3, killed=True)], place / "first")


@pytest.fixture(scope="module")
def two(place: Path, killed: list[subprocess.CompletedProcess[str]], data: Path) -> list[dict[str, Any]]:
    """Let two processes do, once, all else that tests look at; the run of which one was killed goes on first."""
    tasks = {
        "killed": task("train", RunFolder(place / "killed").record().config, place / "killed", data, resume=True),
        "whole": task("train", DDP, place / "whole", data),
        "stopped": task("stop one", DDP, place / "stopped", data, after=3, killed=False),
        "one step": task("train", DDP, place / "one-step", data, stop_after=1),
    }
    return done_by(2, tasks, place / "second")


def torchrun(monkeypatch: pytest.MonkeyPatch, *, size: int) -> None:
    """Let this process look as if torchrun had started it."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", size), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_all_processes_end_when_one_is_killed(killed: list[subprocess.CompletedProcess[str]]) -> None:
    first, second = killed
    assert second.returncode == 9
    assert first.returncode == 1
    assert "another rank of the run has ended" in first.stderr


@pytest.mark.usefixtures("two")
def test_a_run_goes_on_exactly_after_a_process_was_killed(place: Path) -> None:
    assert losses(place / "killed") == losses(place / "whole")
    assert difference(last_state(place / "killed"), last_state(place / "whole")) is None


def test_all_processes_stop_after_the_step_in_which_one_is_asked_to(two: list[dict[str, Any]]) -> None:
    for process in two:
        assert (process["stopped"]["step"], process["stopped"]["reason"]) == (3, "stopped")


@pytest.mark.usefixtures("two")
def test_only_techniques_that_share_out_processes_may_change_when_a_run_goes_on(place: Path) -> None:
    folder = RunFolder(place / "one-step")
    config = folder.record().config
    assert list(changed_settings(folder.record(), config.changed({"techniques.ddp": "off"}), folder)) == [
        "techniques.ddp"
    ]
    with pytest.raises(UsageError, match="activation-checkpointing"):
        changed_settings(folder.record(), config.changed({"techniques.activation-checkpointing": "on"}), folder)


def test_processes_are_started_by_torchrun(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="torchrun --nproc-per-node 2 -m tensorkeep train"):
        check_settings(DDP, RunFolder(tmp_path))


def test_several_processes_without_a_technique_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, size=2)
    with pytest.raises(UsageError, match="started 2 processes, and no technique"), joined(TINY):
        pytest.fail("joined")


def test_one_process_of_torchrun_trains_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, size=1)
    with joined(TINY) as world:
        assert (world.rank, world.size) == (0, 1)


def test_processes_are_shared_out_once() -> None:
    with pytest.raises(UsageError, match="ddp and fsdp cannot be combined"):
        Stack.of({"ddp": {}, "fsdp": {}})


def test_the_command_line_prepares_writes_and_speaks_once(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    words = (
        "--technique ddp --loop.device cpu --loop.steps 4 --model.context_length 16 --model.d_model 16 "
        "--model.n_layers 1 --checkpoint.every 2 --log.every 1 --eval.every 2 --schedule.warmup_steps 0 --json"
    )
    place = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tensorkeep"]
        + ["train", "shakespeare-char-cpu", *place, *words.split()],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    summary = json.loads(ended.stdout)
    assert summary["techniques"]["ddp"]["processes"] == 2
    assert [step for step, kind, _ in losses(tmp_path / "run") if kind == "train"] == [1, 2, 3, 4]
    assert RunFolder(tmp_path / "run").record().surroundings["processes"] == 2
