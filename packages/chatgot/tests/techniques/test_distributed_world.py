"""Runs of several processes: how they start, what only rank 0 does, and how they end together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chatgot.run.folder import RunFolder
from chatgot.run.resume import segment_settings
from chatgot.run.setup import check_settings, joined
from chatgot.testing import TINY, losses, train_run, trained
from techniques.several_processes import EXACT, FOUR_STEPS, ProcessPool, Results, check_trained_as, task
from tensorkeep.errors import UnsupportedError, UsageError
from tiny_training import TEXT, check_same

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

DDP = TINY.changed({"techniques.ddp": "on", **FOUR_STEPS})

CHANGING = [
    EXACT.changed({f"techniques.{name}": "on", "ema.decay": 0.9, "loop.steps": 5})
    for name in ("pipeline-parallel", "tensor-parallel", "fsdp", "pipeline-parallel")
]
"""Configurations of one run, which is resumed with another technique after each step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def killed(folder: Path, data: Path) -> ProcessPool:
    """Let two processes train until one of them is killed."""
    with ProcessPool(2, folder / "processes") as pool:
        pool.send({"killed": task("stop last", DDP, folder / "killed", data, after=3, killed=True)})
    return pool


@pytest.fixture(scope="module")
def two(folder: Path, killed: ProcessPool, data: Path, two_processes: ProcessPool) -> Results:
    """Let two processes do all other tasks, once; first they resume the run that lost a process."""
    tasks = {
        "killed": task("train", RunFolder(folder / "killed").record().config, folder / "killed", data, resume=True),
        "whole": task("train", DDP, folder / "whole", data),
        "stopped": task("stop last", DDP, folder / "stopped", data, after=3, killed=False),
        **{
            f"step {number}": task("train", config, folder / "changing", data, resume=True, stop_after=1)
            for number, config in enumerate(CHANGING, start=1)
        },
    }
    return two_processes.run(tasks)


def torchrun(monkeypatch: pytest.MonkeyPatch, *, size: int) -> None:
    """Set the environment that torchrun sets."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", size), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


def test_all_processes_end_when_one_is_killed(killed: ProcessPool) -> None:
    assert [each.exitcode for each in killed.processes] == [1, 9]
    assert "another rank of the run has ended" in killed.outputs()[0]


@pytest.mark.usefixtures("two")
def test_run_resumes_exactly_after_a_process_was_killed(folder: Path) -> None:
    check_same(folder / "killed", folder / "whole", "train", "evaluate")


@pytest.mark.usefixtures("two")
def test_run_resumes_with_another_technique_after_each_step(folder: Path, data: Path) -> None:
    alone = EXACT.changed({"ema.decay": 0.9, "loop.steps": 5})
    train_run(alone, folder / "changing", data, resume=True)
    check_trained_as(folder / "changing", trained(alone, data))


def test_all_processes_stop_after_the_step_in_which_one_is_asked_to(two: Results) -> None:
    for process in two:
        assert (process["stopped"]["step"], process["stopped"]["reason"]) == (3, "stopped")


@pytest.mark.usefixtures("two")
def test_only_techniques_for_several_processes_change_without_a_new_leg(folder: Path) -> None:
    run = RunFolder(folder / "stopped")
    config = run.record().config
    assert segment_settings(config, config.changed({"techniques.ddp": "off"}), run) == {}
    changed = config.changed({"techniques.activation-checkpointing": "on"})
    assert list(segment_settings(config, changed, run)) == ["techniques.activation-checkpointing"]


def test_missing_torchrun_is_an_error_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="torchrun --nproc-per-node 2 -m tensorkeep train"):
        check_settings(DDP, RunFolder(tmp_path))


def test_one_process_of_torchrun_trains_alone_and_several_need_a_technique(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun(monkeypatch, size=2)
    with pytest.raises(UsageError, match="started 2 processes, and no technique"), joined(TINY):
        pytest.fail("joined")
    torchrun(monkeypatch, size=1)
    with joined(TINY) as world:
        assert (world.rank, world.size) == (0, 1)


@pytest.mark.exhaustive
def test_command_line_prepares_writes_and_reports_once(tmp_path: Path) -> None:
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
    assert RunFolder(tmp_path / "run").record().numerics_environment["processes"] == 2
