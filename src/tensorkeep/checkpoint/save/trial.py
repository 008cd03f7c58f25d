"""A trial before a save: how fast a few blocks of the state are gathered and coded, and the destination takes bytes.

Each of the three is measured for at most about a tenth of a second, by the code and with the threads that the save
itself will use.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tensorkeep.codecs import probe
from tensorkeep.formats.base import BLOCK_BYTES, WriteSettings, thread_bytes
from tensorkeep.formats.blockfile.plan import Block, BlockFileOptions, plan_files, tasks_of
from tensorkeep.formats.blockfile.stream import copy_and_hash, raw_bytes
from tensorkeep.formats.sealed import digest, new_hasher
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool, round_up
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import Bytes, DirectFile
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat

PATIENCE = 0.1
"""Seconds after which a measurement begins no further block."""

_FEWEST, _MOST = 4, 8

# A disk takes writes of 1 MiB as fast as those of 64 MiB, and a slow one shall not hold each thread for long.
_WRITE = 4 * 1024**2
_RAW_BYTES_PER_BLOCK = 256 * 1024**2

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a trial measured, in bytes per second of all threads together.

    Attributes
    ----------
    gather, code : float
        Raw bytes copied and hashed, and raw bytes coded and hashed.
    share : float
        Stored bytes per raw byte, coded.
    disk : float
        Bytes that the destination takes.
    """

    gather: float
    code: float
    share: float
    disk: float

    def seconds(self, nbytes: int) -> dict[str, float]:
        """Return how long a save of that many raw bytes takes, by compression.

        Computing and writing overlap, but not wholly: the root of the sum of their squares fitted measured saves better
        than the larger of the two.
        """
        return {
            "none": math.hypot(nbytes / self.gather, nbytes / self.disk),
            "lossless": math.hypot(nbytes / self.code, nbytes * self.share / self.disk),
        }


def measure(flat: Flat[Source], destination: Path, settings: WriteSettings) -> Rates:
    """Measure on blocks spread over a state, and in a temporary file beside the destination, which is removed.

    Parameters
    ----------
    flat : Flat
        Of at least a byte.
    destination : Path
    settings : WriteSettings

    Raises
    ------
    DestinationExistsError, StoreError
        As a save to this destination would.
    """
    pieces = _sample(flat)
    # As many as the writer takes of this budget.
    threads = settings.pool.threads(settings.threads, thread_bytes(BLOCK_BYTES, buffers=3))
    # The temporary of a save: the same errors, and the next save to this place removes it if this process is killed.
    with Commit(destination, directory=False, overwrite=settings.overwrite, replaceable=lambda _: True) as commit:
        disk = _disk_rate(commit.path, pieces, settings, threads)
    gather = _BlockTrial(pieces, partial(_gather, settings.pool)).rate(threads)
    coding = _BlockTrial(pieces, partial(_code, settings.pool))
    return Rates(gather, coding.rate(threads), coding.stored_bytes / coding.raw_bytes, disk)


def nearest_folder(destination: Path) -> Path:
    """Return the deepest folder on the way to a destination that exists."""
    folder = destination.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _sample(flat: Flat[Source]) -> list[list[Block]]:
    """Return a few of the tasks of a save, spread evenly."""
    tasks = [task for plan in plan_files(flat) for task in tasks_of(plan, BLOCK_BYTES)]
    total = sum(leaf.nbytes for leaf in flat.leaves.values())
    count = min(len(tasks), max(_FEWEST, min(_MOST, total // _RAW_BYTES_PER_BLOCK)))
    return [tasks[place] for place in np.linspace(0, len(tasks) - 1, count).astype(int)]


class _BlockTrial:
    """Blocks that many threads work on until all are done or the time is up, whichever comes first.

    Parameters
    ----------
    pieces : sequence of list of Block
    work : callable
        Does something with a block, and returns the bytes that it becomes.

    Attributes
    ----------
    raw_bytes, stored_bytes : int
        Of the blocks that were worked on.
    """

    def __init__(
        self, pieces: Sequence[list[Block]], work: Callable[[Block], int], clock: Clock = time.perf_counter
    ) -> None:
        self.raw_bytes = self.stored_bytes = 0
        self._pieces = pieces
        self._work = work
        self._clock = clock
        self._lock = threading.Lock()
        self._end = 0.0

    def rate(self, threads: int) -> float:
        """Return raw bytes per second of all threads together; the first block is always done."""
        begin = self._clock()
        self._end = begin + PATIENCE
        parallel.run([partial(self._piece, piece) for piece in self._pieces], threads)
        return self.raw_bytes / max(self._clock() - begin, 1e-9)

    def _piece(self, piece: list[Block]) -> None:
        for block in piece:
            if self.raw_bytes and self._clock() > self._end:
                return
            stored = self._work(block)
            with self._lock:
                self.raw_bytes += block.nbytes
                self.stored_bytes += stored


def _gather(pool: BufferPool, block: Block) -> int:
    with pool.acquire(block.nbytes) as buffer:
        copy_and_hash(block, buffer[: block.nbytes], new_hasher(wide=False))
        return block.nbytes


def _code(pool: BufferPool, block: Block) -> int:
    room = round_up(probe.bound(block.nbytes))
    staging = 0 if block.leaf.source.host_bytes() is not None else block.nbytes
    with pool.acquire(room + staging) as buffer:
        raw = raw_bytes(block, buffer[room:])
        length = probe.encode(raw, block.leaf.source.dtype, buffer[:room])[1]
        digest(raw)
        digest(buffer[:length])
    return length


def _disk_rate(path: Path, pieces: Sequence[list[Block]], settings: WriteSettings, threads: int) -> float:
    """Return the bytes per second that a new file takes from so many threads."""
    file = DirectFile(path, direct=settings.options_as(BlockFileOptions).direct_io)
    try:
        with ExitStack() as stack:
            # As large as coding will need them, so that they are touched before that is measured.
            size = round_up(probe.bound(BLOCK_BYTES))
            lent = [stack.enter_context(settings.pool.acquire(size)) for _ in range(threads)]
            contents = [_filled(buffer, pieces[place % len(pieces)]) for place, buffer in enumerate(lent)]
            return _WriteTrial(file, contents).rate(threads)
    finally:
        file.close()


class _WriteTrial:
    """Blocks that many threads write until some are written or the time is up, whichever comes first."""

    def __init__(self, file: DirectFile, contents: list[Bytes], clock: Clock = time.perf_counter) -> None:
        self._file = file
        self._free = contents
        self._lock = threading.Lock()
        self._clock = clock
        self._written = 0
        self._end = 0.0

    def rate(self, threads: int) -> float:
        """Return bytes per second; the first block is always written."""
        size = _MOST * BLOCK_BYTES
        self._file.preallocate(size)
        begin = self._clock()
        self._end = begin + PATIENCE
        parallel.run([partial(self._write, offset) for offset in range(0, size, _WRITE)], threads)
        seconds = self._clock() - begin
        self._file.finish(size)
        # What lies in the page cache is not written yet. The flush of direct writes costs either save the same.
        if not self._file.direct:
            seconds = self._clock() - begin
        return self._written / max(seconds, 1e-9)

    def _write(self, offset: int) -> None:
        if self._written and self._clock() > self._end:
            return
        content = self._free.pop()  # there are as many as threads
        start = offset % len(content)
        self._file.write(offset, content[start : start + _WRITE])
        self._free.append(content)
        with self._lock:
            self._written += _WRITE


def _filled(buffer: Bytes, piece: list[Block]) -> Bytes:
    """Fill a buffer with a piece's bytes, again and again: the device may shrink what it stores."""
    content = buffer[:BLOCK_BYTES]
    used = 0
    for block in piece:
        copy_and_hash(block, content[used : used + block.nbytes], new_hasher(wide=False))
        used += block.nbytes
    for at in range(used, BLOCK_BYTES, used):
        content[at : at + used] = content[: min(used, BLOCK_BYTES - at)]
    return content
