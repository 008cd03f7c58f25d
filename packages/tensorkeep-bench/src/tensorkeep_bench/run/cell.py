"""The process of one cell: ``python -m tensorkeep_bench.run.cell TASK``, with a `Task` in JSON."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from tensorkeep.errors import MissingExtraError, TensorkeepError, is_out_of_memory
from tensorkeep.ext import format_bytes, format_seconds, machine, prepared
from tensorkeep_bench.checkpoint.files import remove
from tensorkeep_bench.results import Limits, Status
from tensorkeep_bench.workload import DoesNotApplyError, GateError, Outcome, Task, get_workload

MARK = "tensorkeep-cell "  # the start of the line with the outcome; libraries print lines of their own

_PR_SET_PDEATHSIG = 1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS = 0.2
_LONGEST_OUTCOME = 64_000
_LONGEST_REASON = 500
_LONGEST_ERROR = 4000


def command_of(task: Task) -> tuple[str, ...]:
    return ("python", "-m", "tensorkeep_bench.run.cell", msgspec.json.encode(task).decode())


def run_cell(task: Task, limits: Limits) -> Outcome:
    """Run a task in a new interpreter, and remove its files; failed and killed cells have an outcome, too."""
    begin = time.perf_counter()
    # Files, because nothing reads a pipe while the process runs, and a full one would block it.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *command_of(task)[1:]],
            # A library that asks a question must not wait for the terminal of the run.
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
            # Without a wait, the killed process would remain as a zombie.
            process.wait()
            remove(Path(task.directory))
        if outcome is None:
            outcome = _read_outcome(process.returncode, _end_of(out), _end_of(err))
    return msgspec.structs.replace(outcome, seconds=time.perf_counter() - begin)


def _wait(process: subprocess.Popen[bytes], limits: Limits, begin: float) -> Outcome | None:
    while True:
        with suppress(subprocess.TimeoutExpired):
            # The result is known as soon as the process ends; only the limits are polled.
            process.wait(_POLL_SECONDS)
            return None
        if limits.seconds is not None and time.perf_counter() - begin > limits.seconds:
            return Outcome("timeout", f"took longer than its limit of {format_seconds(limits.seconds)}")
        if limits.memory_bytes is not None:
            # Private memory only: pages that processes share would count several times.
            used = sum(machine.private_bytes(each) for each in machine.family(process.pid))
            if used > limits.memory_bytes:
                reason = f"used {format_bytes(used)} of memory, its limit is {format_bytes(limits.memory_bytes)}"
                return Outcome("memory", reason)


def _end_of(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    # Libraries may log without end; the outcome is the last line.
    file.seek(max(0, size - _LONGEST_OUTCOME))
    return file.read().decode(errors="replace")


def _read_outcome(code: int, out: str, err: str) -> Outcome:
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if code == 0 and lines:
        return msgspec.json.decode(lines[-1].removeprefix(MARK), type=prepared(Outcome))
    # Our own kill has an outcome already, so another SIGKILL comes from outside.
    if code == -signal.SIGKILL:
        return Outcome("memory", "was killed by the kernel, most likely because memory ran out")
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Outcome("failed", f"its process {ending}: {last_line(err)}")


def last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["without an error message"])[-1][:_LONGEST_ERROR]


# Inside the process


def main(text: str) -> int:
    started = time.perf_counter()
    end_with_parent()
    task = msgspec.json.decode(text, type=prepared(Task))
    outcome = run_task(task, started)
    # The parent removes it as well, if this process does not come so far.
    shutil.rmtree(task.directory, ignore_errors=True)
    # On a line of its own, even if a library ended its output without a newline. The exit code is 0 whatever the
    # outcome.
    print(f"\n{MARK}{msgspec.json.encode(outcome).decode()}", flush=True)
    return 0


def run_task(task: Task, started: float) -> Outcome:
    """Run a task in this process, which ``started`` at a `time.perf_counter`; exceptions become outcomes."""
    try:
        workload = get_workload(task.workload)
        if reason := workload.missing(workload.parse_arm(task.settings)):
            return Outcome("not-run", reason)
        # Imported here, so that its seconds have a clock of their own and are in no figure.
        import torch  # noqa: F401

        imported = time.perf_counter() - started
        Path(task.directory).mkdir(parents=True, exist_ok=True)
        outcome = workload.measure(task)
    except Exception as error:
        return failed_outcome(error)
    return msgspec.structs.replace(outcome, clocks={"import": imported, **outcome.clocks})


def failed_outcome(error: Exception) -> Outcome:
    return Outcome(_status(error), _reason(error))


def _status(error: Exception) -> Status:
    if isinstance(error, GateError):
        return "gate"
    causes = list(_causes(error))
    # TensorStore and torch report a full disk in the message only.
    if any(getattr(each, "errno", 0) in _DISK_FULL or "no space left" in str(each).lower() for each in causes):
        return "disk"
    if any(map(is_out_of_memory, causes)):
        return "memory"
    return "not-run" if isinstance(error, MissingExtraError | DoesNotApplyError) else "failed"


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        # A tool may wrap the error of the system, and only that one has the number.
        cause = cause.__cause__ or cause.__context__


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, TensorkeepError) else str(error).strip()
    # Compilers and C++ libraries append whole stack traces.
    line = (text.splitlines() or [""])[0][:_LONGEST_REASON]
    if not isinstance(error, TensorkeepError):
        return f"{type(error).__name__}: {line}"
    return f"{error.name}: {line}" if error.name else line


def end_with_parent() -> None:
    """Ask the kernel to end this process with its parent, and to kill it first when memory runs out."""
    with suppress(OSError, AttributeError):
        # The kernel ends this process with its parent: a killed run must not leave cells that measure and write.
        machine.libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        # The kernel kills this process first when memory runs out, not the run or another program.
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
