"""A cell runs in its own process: every end is reported as an outcome, and all its files are removed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from forked_modules import FORKING, forks
from tensorkeep.errors import StoreError
from tensorkeep.machine import written_bytes
from tensorkeep.testing.cases import case
from tensorkeep_bench.results import Limits
from tensorkeep_bench.run import cell
from tensorkeep_bench.run.cell import command_of, run_cell
from tensorkeep_bench.workload import GateError, Task
from tiers import exhaustive

SMALL = {"model": "openllama-3b:scale=0.0005:layers=1", "with_optimizer": None}
LARGE = {**SMALL, "model": "openllama-3b"}  # it takes minutes, and gigabytes of memory, unless it is ended
MEASURES = ["save", "load_cold", "load_warm"]


def task(folder: Path, settings: dict[str, object] | None = None, **changes: Any) -> Task:
    given = {"workload": "checkpoint", "arm": "one", "settings": settings or {"tool": "torch"}, "input": SMALL}
    return Task(**{**given, "measures": MEASURES, "directory": str(folder / "cell"), **changes})


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process of a cell: a new interpreter takes seconds to import torch."""
    monkeypatch.setattr(cell, "subprocess", FORKING)


@forks
@pytest.mark.parametrize("fork", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_cell_has_figures_and_leaves_no_files(fork: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if fork:
        request.getfixturevalue("forked")
    result = run_cell(task(tmp_path), Limits(seconds=120))
    assert (result.status, result.reason) == ("ok", None)
    assert {"save", "returned", "load_warm", "stored", "written", "files", "peak_memory"} <= result.figures.keys()
    assert "into_warm" not in result.figures
    assert 0 < result.figures["returned"] <= result.figures["save"] < result.seconds
    assert {"import", "build", "warm-up", "gate"} <= result.clocks.keys()
    assert sum(result.clocks.values()) < result.seconds
    assert list(tmp_path.iterdir()) == []


@forks
def test_command_of_a_cell_runs_it_again(tmp_path: Path) -> None:
    done = FORKING.run([sys.executable, *command_of(task(tmp_path))[1:]])
    mark, last = done.stdout.splitlines()[-1].split(cell.MARK, 1)
    assert (mark, json.loads(last)["status"]) == ("", "ok")
    assert not (tmp_path / "cell").exists()


@forks
@pytest.mark.usefixtures("forked")
def test_cell_over_its_limit_of_time_or_memory_is_ended(tmp_path: Path) -> None:
    for status, limits, reason in (
        ("timeout", Limits(seconds=0.2), "took longer than its limit of 200 ms"),
        ("memory", Limits(seconds=120, memory_bytes=20_000_000), "its limit is 20.0 MB"),
    ):
        with case(status):
            result = run_cell(task(tmp_path, input=LARGE), limits)
            assert (result.status, result.figures) == (status, {})
            assert reason in str(result.reason)
            assert list(tmp_path.iterdir()) == []


@pytest.mark.integration
def test_missing_package_is_not_run_and_process_ended_by_a_signal_has_failed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # `find_spec` finds nothing of this name in the child, either.
    code = "import importlib.util as u, os, sys\nold = u.find_spec\n"
    code += "u.find_spec = lambda name, *a: None if name == 'zipnn' else old(name, *a)\n"
    kill = "os.kill(os.getpid(), int(os.environ['END']))"
    code += f"if 'END' in os.environ and 'tensorkeep_bench.run.cell' in sys.orig_argv: {kill}\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    result = run_cell(task(tmp_path, {"tool": "zipnn"}), Limits())
    assert (result.status, result.reason) == ("not-run", "the package 'zipnn' is not installed")
    for number, status, reason in (
        (signal.SIGABRT, "failed", "its process was ended by SIGABRT"),
        (signal.SIGKILL, "memory", "was killed by the kernel, most likely because memory ran out"),
    ):
        monkeypatch.setenv("END", f"{number:d}")
        result = run_cell(task(tmp_path), Limits())
        assert (result.status, str(result.reason).startswith(reason)) == (status, True), result


def test_status_and_reason_of_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = StoreError("cannot write")
    wrapped.__cause__ = OSError(28, "x")
    for error, status, reason in (
        (GateError("torch loaded values that differ", name="w"), "gate", "w: torch loaded values that differ"),
        (OSError(28, "No space left on device"), "disk", "OSError: [Errno 28]"),
        (wrapped, "disk", "cannot write"),
        (RuntimeError("write failed: No space left on device [x]"), "disk", "RuntimeError: write failed"),
        (MemoryError(), "memory", "MemoryError: "),
        (ValueError("no such dtype\nand more"), "failed", "ValueError: no such dtype"),
    ):
        failing = mock.Mock(**{"missing.return_value": None, "measure.side_effect": error})
        monkeypatch.setattr(cell, "get_workload", mock.Mock(return_value=failing))
        found = cell.run_task(task(tmp_path), time.perf_counter())
        with case(repr(error)):
            assert found.status == status
            assert str(found.reason).startswith(reason) and "\n" not in str(found.reason)


@forks
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
@pytest.mark.parametrize("tool", ["tensorkeep", *exhaustive("torch", "safetensors")])
def test_full_disk_is_reported_and_cleared(tmp_path: Path, tool: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        result = run_cell(task(small, {"tool": tool}, input={**SMALL, "model": "openllama-3b:scale=0.002"}), Limits())
        assert result.status == "disk", result
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_written_bytes_are_counted_by_the_kernel(tmp_path: Path) -> None:
    before = written_bytes()
    with (tmp_path / "x").open("wb") as file:
        file.write(bytes(3_000_000))
        file.flush()
        os.fsync(file.fileno())
    # A file system in memory writes to no disk.
    assert written_bytes() - before in range(2_990_000, 3_200_000) or written_bytes() == before
