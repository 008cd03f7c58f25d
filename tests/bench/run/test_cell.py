"""A cell runs in its own process: every end is reported as an outcome, and all its files are removed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tensorkeep.bench.experiment.workload import GateError, Outcome, Task
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run import worker
from tensorkeep.bench.run.cell import command_of, run_cell
from tensorkeep.errors import StoreError
from tensorkeep.machine import written_bytes

SMALL = {"model": "openllama-3b:scale=0.0005:layers=1", "with_optimizer": None}
MEASURES = ["save", "load_cold", "load_warm"]


def task(folder: Path, settings: dict[str, object] | None = None, **changes: Any) -> Task:
    given = {"workload": "checkpoint", "arm": "one", "settings": settings or {"tool": "torch"}, "input": SMALL}
    return Task(**{**given, "measures": MEASURES, "directory": str(folder / "cell"), **changes})


def test_cell_has_figures_and_leaves_no_files(tmp_path: Path) -> None:
    result = run_cell(task(tmp_path), Limits(seconds=120))
    assert (result.status, result.reason) == ("ok", None)
    assert {"save", "returned", "load_warm", "stored", "written", "files", "peak_memory"} <= result.figures.keys()
    assert "into_warm" not in result.figures
    assert 0 < result.figures["returned"] <= result.figures["save"] < result.seconds
    assert {"import", "build", "warm-up", "gate"} <= result.clocks.keys()
    assert sum(result.clocks.values()) < result.seconds
    assert list(tmp_path.iterdir()) == []


def test_command_of_a_cell_runs_it_again(tmp_path: Path) -> None:
    command = [sys.executable, *command_of(task(tmp_path))[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(worker.MARK)
    assert json.loads(last.removeprefix(worker.MARK))["status"] == "ok"
    assert not (tmp_path / "cell").exists()


def test_cell_over_its_time_limit_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = run_cell(task(tmp_path, input={**SMALL, "model": "openllama-3b"}), Limits(seconds=1))
    assert time.monotonic() - begin < 20
    assert (result.status, result.figures) == ("timeout", {})
    assert result.reason == "took longer than its limit of 1.00 s"
    assert list(tmp_path.iterdir()) == []


def test_cell_over_its_memory_limit_is_ended(tmp_path: Path) -> None:
    result = run_cell(task(tmp_path), Limits(seconds=120, memory_bytes=20_000_000))
    assert result.status == "memory"
    assert "its limit is 20.0 MB" in str(result.reason)
    assert list(tmp_path.iterdir()) == []


def test_missing_package_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `find_spec` finds nothing of this name in the child, either.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nold = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'zipnn' else old(name, *a)\n"
    )
    result = run_cell(task(tmp_path, {"tool": "zipnn"}), Limits())
    assert (result.status, result.reason) == ("not-run", "the package 'zipnn' is not installed")


def test_process_that_ends_by_a_signal_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'tensorkeep.bench.run.worker' in sys.orig_argv: os.abort()\n"
    )
    result = run_cell(task(tmp_path), Limits())
    assert result.status == "failed"
    assert str(result.reason).startswith("its process was ended by SIGABRT")


def test_killed_process_is_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'tensorkeep.bench.run.worker' in sys.orig_argv: os.kill(os.getpid(), 9)\n"
    )
    assert run_cell(task(tmp_path), Limits()).status == "memory"


def failing(error: Exception) -> Any:
    class FailingWorkload:
        def parse_arm(self, settings: object) -> object:
            return settings

        def missing(self, arm: object) -> None:
            return None

        def measure(self, task: Task) -> Outcome:
            raise error

    return FailingWorkload()


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (
            GateError("torch loaded values that differ from the saved ones", name="w"),
            "gate",
            "w: torch loaded values that differ",
        ),
        (OSError(28, "No space left on device"), "disk", "OSError: [Errno 28]"),
        (caused(StoreError("cannot write"), OSError(28, "x")), "disk", "cannot write"),
        (RuntimeError("write failed: No space left on device [x]"), "disk", "RuntimeError: write failed"),
        (MemoryError(), "memory", "MemoryError: "),
        (ValueError("no such dtype\nand more"), "failed", "ValueError: no such dtype"),
    ],
)
def test_status_and_reason_of_an_error(
    error: Exception, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "get_workload", lambda name: failing(error))
    found = worker.run_task(task(tmp_path), time.perf_counter())
    assert found.status == status
    assert str(found.reason).startswith(reason)
    assert "\n" not in str(found.reason)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
@pytest.mark.parametrize(
    "tool", ["tensorkeep", *(pytest.param(name, marks=pytest.mark.slow) for name in ("torch", "safetensors"))]
)
def test_full_disk_is_reported_and_cleared(tmp_path: Path, tool: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        large = {**SMALL, "model": "openllama-3b:scale=0.002"}
        result = run_cell(task(small, {"tool": tool}, input=large), Limits())
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
