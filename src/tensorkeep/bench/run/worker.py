"""The process of one cell: ``python -m tensorkeep.bench.run.worker TASK``.

The last line of its output is the outcome. The task is a `tensorkeep.bench.experiment.workload.Task` in JSON;
`run_cell` starts the process.
"""

import errno
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from tensorkeep.bench.experiment.workload import DoesNotApplyError, GateError, Outcome, Task, get_workload
from tensorkeep.bench.results import Status
from tensorkeep.errors import MissingExtraError, TensorkeepError, is_out_of_memory
from tensorkeep.machine import libc
from tensorkeep.structs import prepared

MARK = "tensorkeep-cell "
"""The start of the line with the outcome; libraries print lines of their own."""

_PR_SET_PDEATHSIG = 1
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_REASON = 500


def main(text: str) -> int:
    """Run the task in JSON; return 0 whatever its outcome."""
    started = time.perf_counter()
    end_with_parent()
    task = msgspec.json.decode(text, type=prepared(Task))
    outcome = run_task(task, started)
    shutil.rmtree(task.directory, ignore_errors=True)
    print(f"\n{MARK}{msgspec.json.encode(outcome).decode()}", flush=True)
    return 0


def run_task(task: Task, started: float) -> Outcome:
    """Run a task in this process, which ``started`` at a `time.perf_counter`; every exception becomes an outcome."""
    try:
        workload = get_workload(task.workload)
        if reason := workload.missing(workload.parse_arm(task.settings)):
            return Outcome("not-run", reason)
        import torch  # noqa: F401

        imported = time.perf_counter() - started
        Path(task.directory).mkdir(parents=True, exist_ok=True)
        outcome = workload.measure(task)
    except Exception as error:
        return failed_outcome(error)
    return msgspec.structs.replace(outcome, clocks={"import": imported, **outcome.clocks})


def failed_outcome(error: Exception) -> Outcome:
    """Return the outcome of a cell that raised an exception."""
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
        cause = cause.__cause__ or cause.__context__


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, TensorkeepError) else str(error).strip()
    line = (text.splitlines() or [""])[0][:_LONGEST_REASON]
    if not isinstance(error, TensorkeepError):
        return f"{type(error).__name__}: {line}"
    return f"{error.name}: {line}" if error.name else line


def end_with_parent() -> None:
    """Ask the kernel to end this process with its parent, and to kill it first when memory runs out."""
    with suppress(OSError, AttributeError):
        libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
