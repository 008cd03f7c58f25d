"""The examples run, and a run that was killed and went on ends where an uninterrupted one ends."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorkeep import CheckpointManager

EXAMPLES = Path(__file__).parents[1] / "examples"


def start(name: str, out: Path, steps: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLES / name), "--out", str(out), "--steps", str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=out.parent)


def finish(process: subprocess.Popen[str]) -> str:
    """Return the last line that an example prints."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output.strip().splitlines()[-1]


def kill_after_a_save(process: subprocess.Popen[str], out: Path) -> None:
    while not any(out.glob("step*")):
        assert process.poll() is None, finish(process)
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode < 0, "it ended before it was killed: give it more steps"


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("plain_loop.py", 2000),
        pytest.param("transformers_trainer.py", 100, marks=needs("transformers")),
    ],
)
def test_a_killed_run_ends_like_a_whole_one(tmp_path: Path, name: str, steps: int) -> None:
    whole = finish(start(name, tmp_path / "whole", steps))
    assert whole.startswith(f"step {steps}:")
    kill_after_a_save(start(name, tmp_path / "killed", steps), tmp_path / "killed")
    assert finish(start(name, tmp_path / "killed", steps)) == whole


WITH_LIGHTNINGS_OWN = """
import runpy, sys
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
sys.argv = sys.argv[1:]
example = runpy.run_path(sys.argv[0])
example["main"].__globals__["TensorkeepIO"] = lambda **options: TorchCheckpointIO()
example["main"]()
"""


@needs("lightning")
def test_lightning_goes_on_as_from_its_own_checkpoints(tmp_path: Path) -> None:
    lines = {}
    saved = {}
    for way in ([], ["-c", WITH_LIGHTNINGS_OWN]):
        out = tmp_path / f"run{len(way)}"
        for steps in (60, 150):
            command = [sys.executable, *way, str(EXAMPLES / "lightning_checkpoints.py"), "--out", str(out)]
            command += ["--steps", str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
            assert done.returncode == 0, done.stderr
            lines[len(way), steps] = done.stdout.strip().splitlines()[-1]
        assert all(path.is_dir() == (not way) for path in out.iterdir())
        saved[len(way)] = sorted(path.name for path in out.iterdir())
    assert lines[0, 150].startswith("step 150:")
    assert lines[0, 60] == lines[2, 60]
    assert lines[0, 150] == lines[2, 150]
    assert saved[0] == saved[2]
    assert "step=150.ckpt" in saved[0]


@needs("transformers")
def test_the_checkpoints_of_the_transformers_trainer_are_steps_of_the_manager(tmp_path: Path) -> None:
    finish(start("transformers_trainer.py", tmp_path / "run", 30))
    manager = CheckpointManager(tmp_path / "run")
    assert [step.number for step in manager.steps()] == [20, 30]
    assert float(manager.steps()[-1].metrics["loss"]) > 0
