"""Start the process of one cell, and enforce its limits of time and memory."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from tensorkeep.bench.checkpoint.probes import remove
from tensorkeep.bench.experiment.workload import Outcome, Task
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run.worker import MARK
from tensorkeep.machine import family, private_bytes
from tensorkeep.structs import prepared
from tensorkeep.units import format_bytes, format_seconds

_POLL_SECONDS = 0.2
_LONGEST_OUTCOME = 64_000
_LONGEST_REASON = 4000


def command_of(task: Task) -> tuple[str, ...]:
    """Return the command that runs a cell."""
    return ("python", "-m", "tensorkeep.bench.run.worker", msgspec.json.encode(task).decode())


def run_cell(task: Task, limits: Limits) -> Outcome:
    """Run a task in a new interpreter, and remove its files; return the outcome also if it failed or was killed."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *command_of(task)[1:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            # A process group of its own: Ctrl-C reaches this process only, which then ends the group.
            start_new_session=True,
        )
        try:
            outcome = _wait(process, limits, begin)
        finally:
            # Also after the process has ended: processes that it started may still run.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            remove(Path(task.directory))
        if outcome is None:
            outcome = _read_outcome(process.returncode, _end_of(out), _end_of(err))
    return msgspec.structs.replace(outcome, seconds=time.perf_counter() - begin)


def _wait(process: subprocess.Popen[bytes], limits: Limits, begin: float) -> Outcome | None:
    """Wait until the process ends; return an outcome if it exceeds a limit first."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
            return None
        if limits.seconds is not None and time.perf_counter() - begin > limits.seconds:
            return Outcome("timeout", f"took longer than its limit of {format_seconds(limits.seconds)}")
        if limits.memory_bytes is not None:
            used = sum(private_bytes(each) for each in family(process.pid))
            if used > limits.memory_bytes:
                reason = f"used {format_bytes(used)} of memory, its limit is {format_bytes(limits.memory_bytes)}"
                return Outcome("memory", reason)


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LONGEST_OUTCOME))
    return file.read().decode(errors="replace")


def _read_outcome(code: int, out: str, err: str) -> Outcome:
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if code == 0 and lines:
        return msgspec.json.decode(lines[-1].removeprefix(MARK), type=prepared(Outcome))
    if code == -signal.SIGKILL:
        return Outcome("memory", "was killed by the kernel, most likely because memory ran out")
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = (err.strip().splitlines() or ["without an error message"])[-1]
    return Outcome("failed", f"its process {ending}: {last[:_LONGEST_REASON]}")
