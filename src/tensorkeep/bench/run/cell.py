"""Running one cell in a process of its own, under limits of time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from tensorkeep.bench.checkpoint.measure import remove
from tensorkeep.bench.experiment.workload import Task
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run.worker import MARK
from tensorkeep.machine import private_bytes
from tensorkeep.units import format_bytes, format_seconds

_LOOK_SECONDS = 0.2
_TAIL_BYTES = 4000


@dataclass(slots=True)
class CellResult:
    """How a cell ended; ``docs/reference/results.md`` says what each field means."""

    status: str
    reason: str | None
    seconds: float
    figures: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)


def command_of(task: Task) -> list[str]:
    """Return the command that runs a cell."""
    return ["python", "-m", "tensorkeep.bench.run.worker", msgspec.json.encode(asdict(task)).decode()]


def run_cell(task: Task, limits: Limits) -> CellResult:
    """Run a task in a fresh interpreter; whatever happens to it, what it wrote is removed.

    Returns
    -------
    CellResult
        Also of a cell that failed or was killed.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *command_of(task)[1:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            # A group of its own: Ctrl-C goes to this process, which decides.
            start_new_session=True,
        )
        try:
            killed = _watch(process, limits, begin)
        finally:
            _kill(process)
            remove(Path(task.directory))
        seconds = time.perf_counter() - begin
        if killed is not None:
            return CellResult(*killed, seconds)
        return _told(process.returncode, _tail(out), _tail(err), seconds)


def _watch(process: subprocess.Popen[bytes], limits: Limits, begin: float) -> tuple[str, str] | None:
    """Wait for the end; return status and reason if a limit is exceeded first."""
    while True:
        try:
            process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        else:
            return None
        if limits.seconds is not None and time.perf_counter() - begin > limits.seconds:
            return "timeout", f"took longer than its limit of {format_seconds(limits.seconds)}"
        if limits.memory_bytes is not None and (held := private_bytes(process.pid)) > limits.memory_bytes:
            return "memory", f"held {format_bytes(held)}, its limit is {format_bytes(limits.memory_bytes)}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    # Also when it ended by itself: what it started may live on.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    # The outcome is one line, a few kilobytes at most.
    file.seek(max(0, size - 16 * _TAIL_BYTES))
    return file.read().decode(errors="replace")


def _told(code: int, out: str, err: str, seconds: float) -> CellResult:
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if code == 0 and lines:
        return _parsed(lines[-1].removeprefix(MARK), seconds)
    if code == -signal.SIGKILL:
        return CellResult("memory", "was killed by the kernel, most likely because memory ran out", seconds)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    last = (err.strip().splitlines() or ["and said nothing"])[-1]
    return CellResult("failed", f"its process {how}: {last[:_TAIL_BYTES]}", seconds)


def _parsed(text: str, seconds: float) -> CellResult:
    document: dict[str, Any] = json.loads(text)
    found = {key: document[key] for key in ("figures", "clocks", "observed") if key in document}
    return CellResult(document["status"], document["reason"], seconds, **found)
