"""Measuring a few blocks before a save: how fast they are gathered, coded, and written to the destination.

Each of the three is measured for at most about a tenth of a second, with the code and the threads of the save itself.
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
from tensorkeep.formats.blockfile.gather import copy_and_hash, raw_bytes
from tensorkeep.formats.blockfile.plan import Block, BlockFileOptions, plan_files, tasks_of
from tensorkeep.formats.sealed import digest, new_hasher
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool, round_up
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import Bytes, DirectFile
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat

PATIENCE = 0.1
"""Seconds after which no further block is begun."""

_FEWEST, _MOST = 4, 8

# Disks write 1 MiB at a time as fast as 64 MiB; on a slow one, no thread should be busy for long.
_WRITE = 4 * 1024**2
_RAW_BYTES_PER_BLOCK = 256 * 1024**2

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates, in bytes per second of all threads together.

    Attributes
    ----------
    gather : float
        Raw bytes copied and hashed.
    code : float
        Raw bytes coded and hashed.
    share : float
        Stored bytes per raw byte, if coded.
    disk : float
        Bytes written to the destination.
    """

    gather: float
    code: float
    share: float
    disk: float

    def seconds(self, nbytes: int) -> dict[str, float]:
        """Return the predicted duration of a save of that many raw bytes, by compression.

        Computing and writing overlap, but not completely: the root of the sum of their squares fitted measured saves
        better than the larger of the two.
        """
        return {
            "none": math.hypot(nbytes / self.gather, nbytes / self.disk),
            "lossless": math.hypot(nbytes / self.code, nbytes * self.share / self.disk),
        }


def measure(flat: Flat[Source], destination: Path, settings: WriteSettings) -> Rates:
    """Measure blocks spread over a state, and writing to a temporary file beside the destination, which is removed.

    Parameters
    ----------
    flat : Flat
        With at least one byte.
    destination : Path
    settings : WriteSettings

    Raises
    ------
    DestinationExistsError, StoreError
        As a save to this destination would.
    """
    pieces = _sample(flat)
    # As many as the writer will use with this budget.
    threads = settings.pool.threads(settings.threads, thread_bytes(BLOCK_BYTES, buffers=3))
    # The same temporary as that of a save: the same errors, and the next save removes it if this process is killed.
    with Commit(destination, directory=False, overwrite=settings.overwrite, replaceable=lambda _: True) as commit:
        disk = _disk_rate(commit.path, pieces, settings, threads)
    gather = _BlockTrial(pieces, partial(_gather, settings.pool)).rate(threads)
    coding = _BlockTrial(pieces, partial(_code, settings.pool))
    return Rates(gather, coding.rate(threads), coding.stored_bytes / coding.raw_bytes, disk)


def nearest_folder(destination: Path) -> Path:
    """Return the deepest existing folder above a destination."""
    folder = destination.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _sample(flat: Flat[Source]) -> list[list[Block]]:
    """Return a few evenly spread tasks of the save."""
    tasks = [task for plan in plan_files(flat) for task in tasks_of(plan)]
    total = sum(leaf.nbytes for leaf in flat.leaves.values())
    count = min(len(tasks), max(_FEWEST, min(_MOST, total // _RAW_BYTES_PER_BLOCK)))
    return [tasks[place] for place in np.linspace(0, len(tasks) - 1, count).astype(int)]


class _BlockTrial:
    """Work on blocks with many threads until all are done or the time is up.

    Parameters
    ----------
    pieces : sequence of list of Block
    work : callable
        Takes a block, and returns the number of bytes that it is stored in.

    Attributes
    ----------
    raw_bytes, stored_bytes : int
        Totals of the blocks that were worked on.
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
    coded_bytes = round_up(probe.bound(block.nbytes))
    staging = 0 if block.leaf.source.host_bytes() is not None else block.nbytes
    with pool.acquire(coded_bytes + staging) as buffer:
        raw = raw_bytes(block, buffer[coded_bytes:])
        length = probe.encode(raw, block.leaf.source.dtype, buffer[:coded_bytes])[1]
        digest(raw)
        digest(buffer[:length])
    return length


def _disk_rate(path: Path, pieces: Sequence[list[Block]], settings: WriteSettings, threads: int) -> float:
    """Return the bytes per second at which that many threads write a new file."""
    file = DirectFile(path, direct=settings.options_as(BlockFileOptions).direct_io)
    try:
        with ExitStack() as stack:
            # Of the size that coding needs, so that the memory is touched before coding is measured.
            size = round_up(probe.bound(BLOCK_BYTES))
            lent = [stack.enter_context(settings.pool.acquire(size)) for _ in range(threads)]
            contents = [_filled(buffer, pieces[place % len(pieces)]) for place, buffer in enumerate(lent)]
            return _WriteTrial(file, contents).rate(threads)
    finally:
        file.close()


class _WriteTrial:
    """Write blocks with many threads until a fixed number is written or the time is up."""

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
        # Data in the page cache is not written yet. The flush after direct writes takes both saves equally long.
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
    """Fill a buffer with the bytes of a piece, repeatedly: the device may compress what it stores."""
    content = buffer[:BLOCK_BYTES]
    used = 0
    for block in piece:
        copy_and_hash(block, content[used : used + block.nbytes], new_hasher(wide=False))
        used += block.nbytes
    for at in range(used, BLOCK_BYTES, used):
        content[at : at + used] = content[: min(used, BLOCK_BYTES - at)]
    return content
