"""Verifying a checkpoint: every byte that can be checked, checked."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, checked_path, thread_count
from tensorkeep.checkpoint.finding import find_format, get_format
from tensorkeep.checkpoint.load.ranges import read_all
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike
from tensorkeep.formats.base import OpenSettings, Problem, Reader
from tensorkeep.io.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Progress


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes
    ----------
    path, format : str
    ok : bool
        Whether nothing is wrong.
    checked : str or None
        What was checked ("xxh3-64 of every block"); None when the format stores no checksums, so that only the
        structure could be.
    tensors : int
    nbytes : int
        Raw bytes of the tensors that were read.
    problems : list of Problem
    """

    path: str
    format: str
    ok: bool
    checked: str | None
    tensors: int
    nbytes: int
    problems: list[Problem]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        return asdict(self)


class _Discard:
    """Takes what is read and keeps nothing."""

    def place(self, start: int, stop: int) -> None:
        return None

    def accept(self, start: int, data: Bytes) -> None:
        return None


def verify(
    path: PathLike,
    *,
    format: str | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
) -> VerifyReport:
    """Read a checkpoint to the end and check everything that the format lets one check.

    Parameters
    ----------
    path : path-like
    format : str, optional
        Do not look, take this one.
    progress : callable, optional
        Called with (bytes done, bytes in all).
    threads, memory_budget
        As for `load`.

    Returns
    -------
    VerifyReport
        With every problem found, not just the first.

    Raises
    ------
    NotACheckpointError, UnsupportedError, StoreError
        If it cannot be looked at in the first place. Damage is reported, not raised.
    """
    count = thread_count(threads)
    chosen = get_format(format) if format else find_format(checked_path(path))
    with budget_pool(memory_budget) as pool, ExitStack() as stack:
        try:
            reader = stack.enter_context(chosen.open(Path(checked_path(path)), OpenSettings(verify=True, pool=pool)))
        except CorruptCheckpointError as error:
            return VerifyReport(os.fspath(path), chosen.name, False, None, 0, 0, [_problem(error)])
        return verify_open(reader, pool, threads=count, progress=progress)


def verify_open(
    reader: Reader, pool: BufferPool, *, threads: int | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Verify an open checkpoint whose reader checks what it reads; see `verify`."""
    problems = _check(reader, thread_count(threads), pool, progress)
    return VerifyReport(
        path=os.fspath(reader.path),
        format=reader.format,
        ok=not problems,
        checked=reader.verifiable,
        tensors=len(reader.entries),
        nbytes=sum(map(reader.bytes_to_check, reader.flat.leaves)),
        problems=problems,
    )


def _check(reader: Reader, threads: int, pool: BufferPool, progress: Progress | None) -> list[Problem]:
    lock = threading.Lock()
    found: list[Problem] = []

    def note(error: Exception) -> None:
        if not isinstance(error, CorruptCheckpointError | NotACheckpointError):
            raise error
        with lock:
            found.append(_problem(error))

    try:
        found.extend(reader.audit())
    except CorruptCheckpointError as error:
        note(error)
    sink = _Discard()
    names = list(reader.flat.leaves)
    read_all(
        reader,
        ((name, sink) for name in names),
        threads=threads,
        pool=pool,
        progress=progress,
        on_error=note,
        extent=reader.bytes_to_check,
    )
    # Threads find problems in any order; people read them in the file's.
    order = {name: place for place, name in enumerate(names)}
    return sorted(
        dict.fromkeys(found), key=lambda p: (order.get(p.name or "", -1), p.block if p.block is not None else -1)
    )


def _problem(error: CorruptCheckpointError | NotACheckpointError) -> Problem:
    block = error.block if isinstance(error, CorruptCheckpointError) else None
    return Problem(error.message, error.path and Path(error.path).name, error.name, block)
