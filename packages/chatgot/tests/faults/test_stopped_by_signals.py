"""On a signal a run saves and ends; resumed, it ends like an uninterrupted run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from faults.test_resumed_runs import finish, start, wait_for_a_save
from tensorkeep import CheckpointManager

pytestmark = pytest.mark.exhaustive


def test_the_example_saves_on_sigterm_and_resumes(tmp_path: Path, record_property: Any) -> None:
    whole = finish(start(tmp_path / "whole", steps=120))
    assert whole[-1].startswith("step 120:")
    place = tmp_path / "stopped"
    stopped = start(place, "--pause", "0.02", steps=120)
    wait_for_a_save(stopped, place)
    stopped.send_signal(signal.SIGTERM)
    output = finish(stopped)[-1]
    assert output.startswith("stopped after step ")
    last = int(output.split()[-1])
    latest = CheckpointManager(place).latest()
    assert latest.number == last < 120
    resumed = finish(start(place, steps=120))
    assert resumed[0].endswith(f"step {last + 1}")
    assert resumed[1:] == [whole[-1]]
    record_property("cases", 1)


_COMPILER = """#!/bin/sh
# The C++ compiler, but the first compilation of a kernel waits to be ended; those that torch still starts then fail.
case "$*" in *.main.cpp*) [ ! -e "$COMPILING" ] || exit 1; touch "$COMPILING"; exec sleep 60;; esac
exec g++ "$@"
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_ends_the_compiler_too_stops_the_run(tmp_path: Path, number: int) -> None:
    """As Ctrl-C does in a terminal, whose signal goes to every process of the command."""
    compiler, compiling = tmp_path / "compiler", tmp_path / "compiling"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    environment = {"CXX": compiler, "COMPILING": compiling, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    command = [sys.executable, "-m", "tensorkeep", "train", "shakespeare-char-cpu", "--technique", "compile"]
    process = subprocess.Popen(
        [*command, "--data", __file__, "--out", str(tmp_path / "run"), "--loop.steps", "2"],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not compiling.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "stopped while torch compiled" in errors
    assert "resume with: tensorkeep train" in errors
