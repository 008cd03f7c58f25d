"""A run that is killed repeatedly ends like an uninterrupted run, bit for bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tensorkeep import CheckpointManager
from tensorkeep.testing.equality import difference

pytestmark = pytest.mark.exhaustive

EXAMPLE = Path(__file__).parents[4] / "examples" / "plain_loop.py"
STEPS = 1000
KILLS = 20


def start(out: Path, *arguments: str, steps: int = STEPS) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE), "--out", str(out), "--steps", str(steps), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output.splitlines()


def wait_for_a_save(process: subprocess.Popen[str], out: Path) -> None:
    before = saved(out)
    while saved(out) == before:
        assert process.poll() is None, finish(process)
        time.sleep(0.005)


def saved(out: Path) -> int:
    """Return the number of the last visible step."""
    return max((int(path.name.removeprefix("step-")) for path in out.glob("step-*")), default=0)


def test_a_run_killed_twenty_times(tmp_path: Path, record_property: Any) -> None:
    finish(start(tmp_path / "whole"))
    draw = random.Random(20)
    place = tmp_path / "killed"
    for _ in range(KILLS):
        process = start(place, "--pause", "0.02")
        wait_for_a_save(process, place)
        # At a random time in the following steps and saves.
        time.sleep(draw.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish(start(place))
    whole, killed = (CheckpointManager(root).restore(STEPS) for root in (tmp_path / "whole", place))
    # The example does not use numpy's generator.
    for state in (whole, killed):
        del state["rng"]["numpy"]
    assert difference(whole, killed) is None
    record_property("cases", KILLS)
