"""The process of one cell: ``python -m tensorkeep.bench.run.worker TASK`` prints its outcome as the last line.

The task is a JSON object with the fields of `tensorkeep.bench.experiment.workload.Task`; `run_cell` starts it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.bench.checkpoint.gate import GateError
from tensorkeep.bench.experiment import workload
from tensorkeep.bench.experiment.workload import DoesNotApplyError
from tensorkeep.errors import MissingExtraError, TensorkeepError, is_out_of_memory

MARK = "tensorkeep-cell "
"""What the last line of its output begins with; libraries print too."""

_PR_SET_PDEATHSIG = 1
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_REASON = 500


def main(text: str) -> int:
    """Run the task; return 0 if it has an outcome, whichever."""
    started = time.perf_counter()
    _die_first()
    task = msgspec.json.decode(text, type=workload.Task)
    document = _measured(task, started)
    shutil.rmtree(task.directory, ignore_errors=True)
    print(f"\n{MARK}{json.dumps(document)}", flush=True)
    return 0


def _measured(task: workload.Task, started: float) -> dict[str, Any]:
    try:
        home = workload.get(task.workload)
        if reason := home.missing(task.settings):
            return {"status": "not-run", "reason": reason}
        import torch  # noqa: F401

        imported = time.perf_counter() - started
        Path(task.directory).mkdir(parents=True, exist_ok=True)
        outcome = home.measure(task)
    except Exception as error:
        return {"status": _status(error), "reason": _reason(error)}
    return {"status": "ok", "reason": None, **asdict(outcome), "clocks": {"import": imported, **outcome.clocks}}


def _status(error: Exception) -> str:
    if isinstance(error, GateError):
        return "gate"
    if any(_is_full(each) for each in _causes(error)):
        return "disk"
    if any(is_out_of_memory(each) for each in _causes(error)):
        return "memory"
    return "not-run" if isinstance(error, MissingExtraError | DoesNotApplyError) else "failed"


def _is_full(error: BaseException) -> bool:
    # TensorStore and torch say it in words only.
    return (isinstance(error, OSError) and error.errno in _FULL) or "no space left" in str(error).lower()


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, TensorkeepError) else str(error).strip()
    where = f"{error.name}: " if isinstance(error, TensorkeepError) and error.name else ""
    line = (text.splitlines() or [""])[0][:_LONGEST_REASON]
    return f"{where}{line}" if isinstance(error, TensorkeepError) else f"{type(error).__name__}: {line}"


def _die_first() -> None:
    """Ask the kernel to end this process with the one that started it, and to choose it when memory runs out."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
