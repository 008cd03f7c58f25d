"""One visit to one tool: save, load cold, load warm, load into memory that exists; every load gated.

Every call is rehearsed: done once off the clock, then again on it. A training run saves many times, and only its first
save meets memory that nobody has touched; on a virtual machine, which gets memory from its host on first touch and
gives back what lies free for seconds, that can take several times as long, or not, as it happens.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorkeep.bench.checkpoint.gate import check_same, touch
from tensorkeep.bench.checkpoint.probes import (
    evict,
    files_of,
    make_cold,
    release_memory,
    seconds_of,
    size_on_disk,
    sync_tree,
    warm,
)
from tensorkeep.bench.checkpoint.subject import Subject
from tensorkeep.bench.checkpoint.tools.base import Tool
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes, written_bytes

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

_NEARLY_NOTHING = 1024**2

LOADS = (COLD, WARM, INTO_COLD, INTO_WARM)


@dataclass(slots=True)
class Visited:
    """What one visit measured.

    Attributes
    ----------
    figures : dict of str to float
        Seconds, or bytes. A cold load is missing where the file system keeps its files in memory, a load into
        existing memory where the state has values that cannot be filled.
    clocks : dict of str to float
        Seconds of what is not part of any figure.
    """

    figures: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add what the block takes to a clock."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.clocks[name] = self.clocks.get(name, 0.0) + time.perf_counter() - begin


def visit(tool: Tool, name: str, subject: Subject, path: Path, loads: Collection[str] = LOADS) -> Visited:
    """Save a subject once at ``path``, load it in the ways asked for, and remove it.

    Raises
    ------
    GateError
        If a load does not give back what was saved.
    """
    found = Visited()
    try:
        _save(tool, subject, path, found)
        _rehearse_load(tool, path, found)
        for measure in LOADS:
            if measure in loads and (subject.fillable or measure not in (INTO_COLD, INTO_WARM)):
                _load(measure, tool, name, subject, path, found)
        return found
    except Exception as error:
        # Some tools do not say so: torch's zip writer stumbles over its own position in the file.
        if _is_full(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise
    finally:
        with found.clock("remove"):
            remove(path)


def _save(tool: Tool, subject: Subject, path: Path, found: Visited) -> None:
    state = tool.view(subject.state)
    with found.clock("rehearsal"):
        _save_once(tool, state, path, found)
        remove(path)
    with found.clock("flush"):
        os.sync()
    _save_once(tool, state, path, found)
    found.figures[STORED] = float(size_on_disk(path))
    found.figures[FILES] = float(len(files_of(path)))


def _save_once(tool: Tool, state: Any, path: Path, found: Visited) -> None:
    release_memory()
    before, written = resident_bytes(), written_bytes()
    reset_peak_resident()
    begin = time.perf_counter()
    tool.save(state, path)
    returned = time.perf_counter()
    if not tool.durable:
        sync_tree(path)
    durable = time.perf_counter()
    found.figures[SAVE] = durable - begin
    found.figures[RETURNED] = returned - begin
    found.figures[PEAK] = float(peak_resident_bytes() - before)
    found.figures[WRITTEN] = float(written_bytes() - written)


def _rehearse_load(tool: Tool, path: Path, found: Visited) -> None:
    """Load once, off the clock."""
    # From the device once: a disk below, or its host, may cache what it reads for the first time.
    with found.clock("first read"):
        evict(path)
        warm(path)
    with found.clock("rehearsal"):
        touch(tool.load(path))


def _load(measure: str, tool: Tool, name: str, subject: Subject, path: Path, found: Visited) -> None:
    release_memory()
    with found.clock("prepare"):
        if measure in (COLD, INTO_COLD) and not make_cold(path):
            return
        if measure in (WARM, INTO_WARM):
            warm(path)
        if measure in (INTO_COLD, INTO_WARM):
            subject.wipe()
    load = _load_new if measure in (COLD, WARM) else _load_into
    found.figures[measure] = load(tool, name, subject, path, found)


def _load_new(tool: Tool, name: str, subject: Subject, path: Path, found: Visited) -> float:
    loaded: list[Any] = []

    def call() -> None:
        loaded.append(tool.load(path))
        if tool.maps:
            touch(loaded[0])

    seconds = seconds_of(call)
    with found.clock("gate"):
        check_same(loaded.pop(), tool.view(subject.state), name)
    return seconds


def _load_into(tool: Tool, name: str, subject: Subject, path: Path, found: Visited) -> float:
    target = tool.view(subject.target)
    seconds = seconds_of(lambda: tool.load_into(path, target))
    with found.clock("gate"):
        check_same(target, tool.view(subject.state), name)
    return seconds


def _is_full(directory: Path) -> bool:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize < _NEARLY_NOTHING or status.f_favail == 0 < status.f_files


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
