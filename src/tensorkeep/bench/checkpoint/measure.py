"""Measurement of one tool on one state: a durable save, then cold and warm loads, which must return every bit of it.

Every call runs twice: a warm-up that is not measured, then the measured call. A training run saves many times, and only
its first save writes from memory that was never touched. On a virtual machine, which gets memory from its host on first
touch, that first save can take several times as long.
"""

import errno
import mmap
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.bench.checkpoint.probes import evict, files_of, make_cold, release_memory, remove, sync_tree, warm
from tensorkeep.bench.checkpoint.state_pair import StatePair
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.bench.experiment.workload import GateError, Outcome
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes, written_bytes
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.tree import flatten

SAVE = "save"
RETURNED = "returned"
COLD = "load_cold"
WARM = "load_warm"
INTO_COLD = "into_cold"
INTO_WARM = "into_warm"
STORED = "stored"
WRITTEN = "written"
FILES = "files"
PEAK = "peak_memory"

LOADS = (COLD, WARM, INTO_COLD, INTO_WARM)

_ALMOST_FULL_BYTES = 1024**2
_PIECE_BYTES = 4 * 1024**2


def measure_tool(tool: Tool, arm: str, states: StatePair, path: Path, loads: Collection[str] = LOADS) -> Outcome:
    """Save a state at ``path``, load it in the ways that are asked for, and remove it.

    Errors call the tool ``arm``, and ``loads`` are among `LOADS`. The figure of a cold load is missing where the file
    system keeps its files in memory, that of a load into existing tensors where the state has values that cannot be
    filled.

    Raises GateError if a load does not return what was saved; OSError with ``ENOSPC`` if the disk is full, whatever the
    tool raises then.
    """
    outcome = Outcome()
    try:
        _save(tool, states, path, outcome)
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
    outcome.figures[STORED] = float(sum(file.stat().st_size for file in files_of(path)))
    outcome.figures[FILES] = float(len(files_of(path)))


def _save_once(tool: Tool, state: Any, path: Path) -> dict[str, float]:
    release_memory()
    before, written = resident_bytes(), written_bytes()
    reset_peak_resident()
    begin = time.perf_counter()
    tool.save(state, path)
    returned = time.perf_counter()
    if not tool.durable:
        sync_tree(path)
    durable = time.perf_counter()
    return {
        SAVE: durable - begin,
        RETURNED: returned - begin,
        PEAK: float(peak_resident_bytes() - before),
        WRITTEN: float(written_bytes() - written),
    }


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
            states.wipe_target()
    existing = tool.view(states.target) if measure in (INTO_COLD, INTO_WARM) else None
    begin = time.perf_counter()
    loaded = _read(tool, path, existing)
    outcome.figures[measure] = time.perf_counter() - begin
    with outcome.clock("gate"):
        check_equal(loaded, tool.view(states.source), arm)


def _read(tool: Tool, path: Path, existing: Any) -> Any:
    """Load into existing tensors if there are any, else into new ones; return them."""
    if existing is not None:
        tool.load_into(path, existing)
        return existing
    loaded = tool.load(path)
    if tool.maps_files:
        touch_pages(loaded)
    return loaded


def _is_full(directory: Path) -> bool:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize < _ALMOST_FULL_BYTES or status.f_favail == 0 < status.f_files


def check_equal(loaded: Any, saved: Any, arm: str) -> None:
    """Compare two states: structure, plain values, dtypes, shapes and every bit.

    Raises GateError if they differ. It names the arm and the first tensor that differs.
    """
    found, expected = flatten(loaded), flatten(saved)
    if found.skeleton != expected.skeleton or found.leaves.keys() != expected.leaves.keys():
        raise GateError(f"{arm} loaded a structure that differs from the saved one")
    for name, leaf in expected.leaves.items():
        other = found.leaves[name]
        # Compared as integers, because NaN != NaN and -0.0 == 0.0. In pieces that fit into the processor's cache.
        if (other.dtype, other.shape) != (leaf.dtype, leaf.shape) or not all(
            np.array_equal(a, b) for a, b in zip(_pieces(other), _pieces(leaf), strict=True)
        ):
            raise GateError(f"{arm} loaded values that differ from the saved ones", name=name)


def touch_pages(loaded: Any) -> None:
    """Read one byte of every page of a state, so that a file that is only mapped is read."""
    for leaf in flatten(loaded).leaves.values():
        memory = leaf.host_bytes()
        if memory is not None:
            np.add.reduce(memory[:: mmap.PAGESIZE])


def _pieces(leaf: Leaf) -> Iterator[np.ndarray[Any, Any]]:
    whole = leaf.host_bytes()
    for start in range(0, leaf.nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, leaf.nbytes)
        piece = np.empty(stop - start, np.uint8) if whole is None else whole[start:stop]
        if whole is None:
            leaf.read(start, stop, piece)
        yield piece.view(np.uint64) if piece.size % 8 == 0 else piece
