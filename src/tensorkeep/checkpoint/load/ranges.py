"""Reading many tensors in parallel, cut into ranges: the engine of `load` and `verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from tensorkeep.formats.base import BLOCK_BYTES, Reader, thread_bytes
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool
from tensorkeep.io.parallel import Meter, Progress
from tensorkeep.state.leaf import Leaf

Range = tuple[str, int, int]
"""A tensor's name and a range of its raw bytes."""


def read_all(
    reader: Reader,
    destinations: Mapping[str, Leaf | None],
    *,
    threads: int,
    pool: BufferPool,
    progress: Progress | None = None,
    on_error: Callable[[Exception], None] | None = None,
    extent: Callable[[str], int] | None = None,
) -> None:
    """Read stored tensors in parallel.

    Parameters
    ----------
    destinations : mapping of str to (Leaf or None)
        What each tensor is read into; None checks it and discards it.
    on_error : callable, optional
        Called with the error of a range that cannot be read, after which the others are still read. Without it the
        first error is raised.
    extent : callable, optional
        Returns how many bytes of a tensor to read, from its start; all of them by default.
    """
    sizes = {name: extent(name) if extent else reader.flat.leaves[name].nbytes for name in destinations}
    host_bytes = {name: None if leaf is None else leaf.host_bytes() for name, leaf in destinations.items()}
    meter = Meter(sum(sizes.values()), progress)

    def read(name: str, start: int, stop: int) -> None:
        leaf, host = destinations[name], host_bytes[name]
        if host is not None:
            reader.read(name, start, stop, host[start:stop])
            return
        with pool.acquire(stop - start) as buffer:
            data = buffer[: stop - start]
            reader.read(name, start, stop, data)
            if leaf is not None:
                leaf.write(start, stop, data)

    def task(ranges: list[Range]) -> None:
        for name, start, stop in ranges:
            try:
                read(name, start, stop)
            except Exception as error:
                if on_error is None:
                    raise
                on_error(error)
            meter.add(stop - start)

    # A block's stored bytes, and its raw bytes if they cannot be decoded in place.
    block_bytes = max(map(reader.block_bytes, destinations), default=BLOCK_BYTES)
    usable = pool.threads(threads, thread_bytes(block_bytes, buffers=reader.buffers))
    parallel.run((partial(task, group) for group in _grouped(_ranges(reader, sizes))), usable)


def grid(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield a range, cut at the multiples of ``step``."""
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end


def _ranges(reader: Reader, sizes: Mapping[str, int]) -> Iterator[Range]:
    for name, nbytes in sizes.items():
        for start, stop in grid(0, nbytes, reader.block_bytes(name)):
            yield name, start, stop


def _grouped(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Group small ranges: a thread should not be woken for a few bytes."""
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
