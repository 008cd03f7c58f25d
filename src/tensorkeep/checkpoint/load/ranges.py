"""The engine that `load`, `verify` and `convert` share: many ranges of many tensors, read in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from tensorkeep.formats.base import BLOCK_BYTES, Reader, thread_bytes
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.state.leaf import Leaf

Range = tuple[str, int, int]
"""A tensor's name and a range of its raw bytes."""


class Destination(Protocol):
    """Where the bytes of a tensor go: in memory that is filled in place, or handed over from a buffer."""

    def place(self, start: int, stop: int) -> Bytes | None:
        """Return the memory of a range when it can be filled in place, else None."""

    def accept(self, start: int, data: Bytes) -> None:
        """Take a range that was read into a buffer, which is reused afterwards."""


class IntoLeaf:
    """Fills a leaf in memory."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._host = leaf.host_bytes()

    def place(self, start: int, stop: int) -> Bytes | None:
        return None if self._host is None else self._host[start:stop]

    def accept(self, start: int, data: Bytes) -> None:
        self._leaf.write(start, start + len(data), data)


def read_all(
    reader: Reader,
    destinations: Iterable[tuple[str, Destination]],
    *,
    threads: int,
    pool: BufferPool,
    progress: Progress | None = None,
    on_error: Callable[[Exception], None] | None = None,
    extent: Callable[[str], int] | None = None,
) -> None:
    """Read tensors, each into its destination, in parallel.

    Parameters
    ----------
    on_error : callable, optional
        Takes the error of a range that cannot be read, and the rest goes on; without it the first error is raised.
    extent : callable, optional
        How many bytes of a tensor to read, from its start; all of them unless given.
    """
    wanted = dict(destinations)
    sizes = {name: extent(name) if extent else reader.flat.leaves[name].nbytes for name in wanted}
    meter = Meter(sum(sizes.values()), progress)

    def task(ranges: list[Range]) -> None:
        for name, start, stop in ranges:
            try:
                _read_range(reader, name, start, stop, wanted[name], pool)
            except Exception as error:
                if on_error is None:
                    raise
                on_error(error)
            meter.add(stop - start)

    groups = _grouped(_ranges(reader, sizes))
    parallel.run((_bind(task, group) for group in groups), _threads(reader, wanted, threads, pool))


def _threads(reader: Reader, names: Iterable[str], wanted: int, pool: BufferPool) -> int:
    # A block's stored bytes, and its raw ones where they cannot go straight to their place.
    block_bytes = max((reader.block_bytes(name) for name in names), default=BLOCK_BYTES)
    return pool.threads(wanted, thread_bytes(block_bytes, buffers=reader.buffers))


def _bind(task: Callable[[list[Range]], None], ranges: list[Range]) -> Callable[[], None]:
    return lambda: task(ranges)


def _read_range(reader: Reader, name: str, start: int, stop: int, destination: Destination, pool: BufferPool) -> None:
    place = destination.place(start, stop)
    if place is not None:
        reader.read(name, start, stop, place)
        return
    with pool.acquire(stop - start) as buffer:
        data = buffer[: stop - start]
        reader.read(name, start, stop, data)
        destination.accept(start, data)


def _ranges(reader: Reader, sizes: Mapping[str, int]) -> Iterator[Range]:
    for name, nbytes in sizes.items():
        step = reader.block_bytes(name)
        for start in range(0, nbytes, step):
            yield name, start, min(start + step, nbytes)


def _grouped(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Put small ranges together: a thread should not be woken for a few bytes."""
    group: list[Range] = []
    size = 0
    for found in ranges:
        nbytes = found[2] - found[1]
        if group and size + nbytes > BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append(found)
        size += nbytes
    if group:
        yield group
