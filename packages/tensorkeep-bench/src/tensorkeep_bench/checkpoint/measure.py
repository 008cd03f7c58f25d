"""Measurement of one tool on one state: a durable save, then loads, which must return every bit of the state."""

import errno
import mmap
import os
import signal
import time
from collections.abc import Callable, Collection
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tensorkeep.errors import TensorkeepError, first_line
from tensorkeep.ext import machine
from tensorkeep.ext.state import flatten
from tensorkeep_bench.checkpoint import files
from tensorkeep_bench.checkpoint.states import Blueprint, Expected, StatePair, check_equal, digest, wipe
from tensorkeep_bench.checkpoint.tools import Tool
from tensorkeep_bench.workload import GateError, Outcome

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
_INTO = (INTO_FIRST, INTO_COLD, INTO_WARM)

_ALMOST_FULL_BYTES = 1024**2
_WARM_UP_ELEMENTS = 4096

# Starts new processes in milliseconds, from a server that has imported the libraries and loaded nothing.
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "safetensors.torch", __name__])


def measure_tool(
    tool: Tool,
    arm: str,
    states: StatePair,
    path: Path,
    loads: Collection[str] = LOADS,
    keep: Path | None = None,
) -> Outcome:
    """Save a state at ``path``, load it in the ways of ``loads``, and remove it; errors call the tool ``arm``.

    With ``keep``, the checkpoint is moved to that path instead, on the same disk, if every load was right.

    Raises GateError if a load does not return what was saved; OSError with ``ENOSPC`` if the disk is full, whatever the
    tool raises then.
    """
    outcome = Outcome()
    # A state with values that cannot be filled, such as numpy scalars, has no load into existing tensors.
    wanted = [each for each in (*FIRST_LOADS, *LOADS) if each in loads and (states.fillable or each not in _INTO)]
    try:
        _save(tool, states, path, outcome)
        for measure in wanted:
            if measure in FIRST_LOADS:
                _load_first(measure, tool, arm, states, path, outcome)
        _warm_up_load(tool, path, outcome)
        for measure in wanted:
            if measure in LOADS:
                _load(measure, tool, arm, states, path, outcome)
        if keep is not None:
            files.remove(keep)
            keep.parent.mkdir(exist_ok=True)
            path.rename(keep)
        return outcome
    except Exception as error:
        # Not every tool raises ENOSPC: torch's zip writer reports an unexpected position in the file.
        if _is_full(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        with outcome.clock("remove"):
            files.remove(path)


def outcome_of(arm: str, measure: Callable[[], Outcome]) -> Outcome:
    try:
        return measure()
    except (TensorkeepError, OSError, MemoryError):
        raise
    except Exception as error:
        # Each tool reports in its own way that it cannot store a state; errors of the system are failures.
        return Outcome("not-run", f"{arm} cannot store this state: {first_line(error)}")


def _save(tool: Tool, states: StatePair, path: Path, outcome: Outcome) -> None:
    # Saved twice, and only the second save is measured: a training run saves many times, and only its first save writes
    # from memory that was never touched. A virtual machine gets memory from its host on first touch, so that save can
    # take several times as long.
    state = tool.view(states.source)
    with outcome.clock("warm-up"):
        _save_once(tool, state, path)
        files.remove(path)
    # Dirty pages of earlier work would be written within the measured time.
    with outcome.clock("flush"):
        os.sync()
    outcome.figures |= _save_once(tool, state, path)
    outcome.figures[STORED] = files.stored_bytes(path)
    outcome.figures[FILES] = float(len(files.files_of(path)))


def _save_once(tool: Tool, state: Any, path: Path) -> dict[str, float]:
    files.release_memory()
    # After the release: freed memory that a save reuses would hide from its peak.
    before, written = machine.resident_bytes(), machine.written_bytes()
    machine.reset_peak_resident()
    returned, durable = save_durably(tool, state, path)
    return {
        SAVE: durable,
        RETURNED: returned,
        PEAK: float(machine.peak_resident_bytes() - before),
        WRITTEN: float(machine.written_bytes() - written),
    }


def save_durably(tool: Tool, state: Any, path: Path) -> tuple[float, float]:
    """Save; return the seconds until the call returned, and until the checkpoint was on the disk."""
    begin = time.perf_counter()
    tool.save(state, path)
    returned = time.perf_counter()
    # The clock of every tool ends when files and directories are on the disk.
    if not tool.durable:
        files.sync_tree(path)
    return returned - begin, time.perf_counter() - begin


def _load_first(measure: str, tool: Tool, arm: str, states: StatePair, path: Path, outcome: Outcome) -> None:
    files.release_memory()
    with outcome.clock("first loads"):
        files.warm(path)
        # The state is compared by its digest, because the new process has no copy.
        expected, into = states.expected_from(tool), measure == INTO_FIRST
        outcome.figures[measure] = first_load(tool, path, expected, arm, into=into)


def _warm_up_load(tool: Tool, path: Path, outcome: Outcome) -> None:
    # Read from the device once: a disk or its host may cache what it reads for the first time.
    with outcome.clock("first read"):
        files.evict(path)
        files.warm(path)
    with outcome.clock("warm-up"):
        _touch_pages(tool.load(path))


def _load(measure: str, tool: Tool, arm: str, states: StatePair, path: Path, outcome: Outcome) -> None:
    files.release_memory()
    with outcome.clock("prepare"):
        if measure in (WARM, INTO_WARM):
            files.warm(path)
        # No figure where the file system keeps its files in memory.
        elif not files.make_cold(path):
            return
        # Values of an earlier load must not pass the gate.
        if measure in _INTO:
            wipe(states.target)
    # Outside of the clock: the tensors of a user exist already.
    existing = tool.view(states.target) if measure in _INTO else None
    begin = time.perf_counter()
    loaded = read_state(tool, path, existing)
    outcome.figures[measure] = time.perf_counter() - begin
    with outcome.clock("gate"):
        check_equal(loaded, tool.view(states.source), arm)


def read_state(tool: Tool, path: Path, existing: Any = None) -> Any:
    if existing is not None:
        tool.load_into(path, existing)
        return existing
    loaded = tool.load(path)
    # A mapped file is read only when its pages are touched.
    if tool.maps_files:
        _touch_pages(loaded)
    return loaded


def _touch_pages(loaded: Any) -> None:
    for leaf in flatten(loaded).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None:
            # One byte a page is enough for the kernel to read the page.
            np.add.reduce(memory[:: mmap.PAGESIZE])


def _is_full(directory: Path) -> bool:
    status = os.statvfs(directory)
    # Blocks or inodes may run out; some file systems report no inodes at all.
    return status.f_bavail * status.f_frsize < _ALMOST_FULL_BYTES or status.f_favail == 0 < status.f_files


# First loads, in a process that has imported the tool and loaded nothing before, as in every job that starts. A process
# that has loaded once has memory, threads and buffers that make its next load faster.


def call_once(tool: Tool, folder: Path) -> None:
    path = folder / f"first-call{tool.suffix}"
    # A few kilobytes, so that no figure contains imports and other work of the first call.
    state = tool.view({"a": torch.ones(_WARM_UP_ELEMENTS), "b": torch.ones(2, 2)})
    try:
        tool.save(state, path)
        tool.load(path)
    finally:
        files.remove(path)


def first_load(tool: Tool, path: Path, expected: Expected, arm: str, *, into: bool = False) -> float:
    """Return the seconds of a load in a process that has loaded nothing before.

    Raises GateError if the load does not return what was saved; the error of the tool if it raises one.
    """
    blueprint = expected.blueprint if into else None
    seconds, found = run_in_new_process(_first_load, tool, path, blueprint)
    if found != expected.digest:
        raise GateError(f"{arm} loaded values that differ from the saved ones, in a new process")
    return float(seconds)


def start_process(function: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a new process; the function gets the other end of the connection as its first argument."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    # Otherwise `recv` would wait forever for a process that has died.
    theirs.close()
    return process, ours


def run_in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function in a new process, or raise its exception; ChildProcessError without one."""
    process, ours = start_process(_answer, function, *arguments)
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise ChildProcessError(f"the loading process ended with exit code {process.exitcode}") from None
    finally:
        # After the answer, too: nothing else of the process is needed.
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _answer(connection: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    # Ctrl-C reaches every process of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        answer = function(*arguments)
    except Exception as error:
        answer = error
    connection.send(answer)


def _first_load(tool: Tool, path: Path, blueprint: Blueprint | None) -> tuple[float, str]:
    with TemporaryDirectory(dir=path.parent) as folder:
        call_once(tool, Path(folder))
    files.release_memory()
    existing = None
    if blueprint is not None:
        # Wiped, so that its memory is touched before the clock starts, and a load that does nothing cannot pass.
        existing = tool.view(blueprint.allocate())
        wipe(existing)
    begin = time.perf_counter()
    loaded = read_state(tool, path, existing)
    seconds = time.perf_counter() - begin
    return seconds, digest(loaded)
