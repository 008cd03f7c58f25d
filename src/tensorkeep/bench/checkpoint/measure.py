"""Measurement of one tool on one state: a durable save, then loads, which must return every bit of it.

First loads run in a new process each (`first_load`). Every other call runs twice: a warm-up that is not measured, then
the measured call. A training run saves many times, and only its first save writes from memory that was never touched.
On a virtual machine, which gets memory from its host on first touch, that first save can take several times as long.
"""

import errno
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tensorkeep.bench.checkpoint.first_load import FreshProcess
from tensorkeep.bench.checkpoint.gate import check_equal, read_state, touch_pages
from tensorkeep.bench.checkpoint.probes import (
    evict,
    files_of,
    make_cold,
    release_memory,
    remove,
    stored_bytes,
    sync_tree,
    warm,
)
from tensorkeep.bench.checkpoint.state_pair import StatePair, wipe
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes, written_bytes

SAVE = "save"
RETURNED = "returned"
FIRST = "load_first"
COLD = "load_cold"
WARM = "load_warm"
INTO_FIRST = "into_first"
INTO_COLD = "into_cold"
INTO_WARM = "into_warm"
STORED = "stored"
WRITTEN = "written"
FILES = "files"
PEAK = "peak_memory"

FIRST_LOADS = (FIRST, INTO_FIRST)
LOADS = (COLD, WARM, INTO_COLD, INTO_WARM)

_ALMOST_FULL_BYTES = 1024**2


def measure_tool(tool: Tool, arm: str, states: StatePair, path: Path, loads: Collection[str] = LOADS) -> Outcome:
    """Save a state at ``path``, load it in the ways that are asked for, and remove it.

    Errors call the tool ``arm``, and ``loads`` are among `FIRST_LOADS` and `LOADS`. The figure of a cold load is
    missing where the file system keeps its files in memory, that of a load into existing tensors where the state has
    values that cannot be filled.

    Raises GateError if a load does not return what was saved; OSError with ``ENOSPC`` if the disk is full, whatever the
    tool raises then.
    """
    outcome = Outcome()
    try:
        _save(tool, states, path, outcome)
        for measure in FIRST_LOADS:
            if measure in loads and (states.fillable or measure == FIRST):
                _load_first(measure, tool, arm, states, path, outcome)
        _warm_up_load(tool, path, outcome)
        for measure in LOADS:
            if measure in loads and (states.fillable or measure not in (INTO_COLD, INTO_WARM)):
                _load(measure, tool, arm, states, path, outcome)
        return outcome
    except Exception as error:
        # Some tools raise something else: torch's zip writer reports an unexpected position in the file.
        if _is_full(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        with outcome.clock("remove"):
            remove(path)


def _save(tool: Tool, states: StatePair, path: Path, outcome: Outcome) -> None:
    state = tool.view(states.source)
    with outcome.clock("warm-up"):
        _save_once(tool, state, path)
        remove(path)
    with outcome.clock("flush"):
        os.sync()
    outcome.figures |= _save_once(tool, state, path)
    outcome.figures[STORED] = stored_bytes(path)
    outcome.figures[FILES] = float(len(files_of(path)))


def _save_once(tool: Tool, state: Any, path: Path) -> dict[str, float]:
    release_memory()
    before, written = resident_bytes(), written_bytes()
    reset_peak_resident()
    returned, durable = save_durably(tool, state, path)
    return {
        SAVE: durable,
        RETURNED: returned,
        PEAK: float(peak_resident_bytes() - before),
        WRITTEN: float(written_bytes() - written),
    }


def save_durably(tool: Tool, state: Any, path: Path) -> tuple[float, float]:
    """Save; return after how many seconds the call returned, and after how many the checkpoint was on the disk."""
    begin = time.perf_counter()
    tool.save(state, path)
    returned = time.perf_counter()
    if not tool.durable:
        sync_tree(path)
    return returned - begin, time.perf_counter() - begin


def _load_first(measure: str, tool: Tool, arm: str, states: StatePair, path: Path, outcome: Outcome) -> None:
    release_memory()
    with outcome.clock("first loads"):
        warm(path)
        process = FreshProcess(tool, path, states.of(tool))
        [outcome.figures[measure]] = process.load(arm, into=measure == INTO_FIRST)


def _warm_up_load(tool: Tool, path: Path, outcome: Outcome) -> None:
    # Read from the device once: a disk or its host may cache what it reads for the first time.
    with outcome.clock("first read"):
        evict(path)
        warm(path)
    with outcome.clock("warm-up"):
        touch_pages(tool.load(path))


def _load(measure: str, tool: Tool, arm: str, states: StatePair, path: Path, outcome: Outcome) -> None:
    release_memory()
    with outcome.clock("prepare"):
        if measure in (COLD, INTO_COLD) and not make_cold(path):
            return
        if measure in (WARM, INTO_WARM):
            warm(path)
        if measure in (INTO_COLD, INTO_WARM):
            wipe(states.target)
    existing = tool.view(states.target) if measure in (INTO_COLD, INTO_WARM) else None
    begin = time.perf_counter()
    loaded = read_state(tool, path, existing)
    outcome.figures[measure] = time.perf_counter() - begin
    with outcome.clock("gate"):
        check_equal(loaded, tool.view(states.source), arm)


def _is_full(directory: Path) -> bool:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize < _ALMOST_FULL_BYTES or status.f_favail == 0 < status.f_files
