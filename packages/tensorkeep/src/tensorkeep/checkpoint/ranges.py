"""Reading tensors in ranges, into given or new memory, and the first touch of new memory."""

import ctypes
import mmap
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Literal, NamedTuple

from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError
from tensorkeep.formats.base import BLOCK_BYTES, Reader, thread_bytes
from tensorkeep.formats.boxes import box_of
from tensorkeep.machine import libc, memory_limit
from tensorkeep.state.aliases import make_view
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import (
    Array,
    Bytes,
    CastLeaf,
    Device,
    Leaf,
    LeafKind,
    allocate,
    wait_for_caller,
    wait_for_copies,
)
from tensorkeep.state.sharded import ShardedLeaf, TensorShard, bytes_here, row_ranges
from tensorkeep.storage import parallel
from tensorkeep.storage.buffers import BufferPool, round_down, round_up
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.units import format_bytes

# The first touch of new memory, with the page size that is the faster one at the moment.
#
# New memory has no pages yet; the kernel provides and clears each when it is first written. That takes longer than
# copying a file from the page cache, and which page size is faster changes from one moment to the next. On a
# machine with
# free memory, huge pages (2 MiB) are ready four times as fast as small ones (4 KiB). On a virtual machine that has
# returned its free memory to the host, each huge page must be fetched back whole, and takes four times as long as small
# pages, which the kernel takes from fragments that were not returned. So both sizes are timed while they are used.

_HUGE_PAGE = 2 * 1024**2
_FIRST_INTERVAL = 8
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
PageSize = Literal["small", "huge"]


class NewPages:
    """Makes the pages of new memory present, for the reads of one load; from any thread."""

    def __init__(self) -> None:
        # A kernel before Linux 5.14 populates nothing, and the memory is then touched by the read itself.
        # Processor seconds of the last piece, 0 before the first, so that both are tried. Threads share them without a
        # lock: an update that is lost is soon measured again.
        self._seconds: dict[PageSize, float] = {"small": 0.0, "huge": 0.0}
        self._interval = self._pieces_left = _FIRST_INTERVAL

    def populate(self, memory: Bytes) -> None:
        begin = memory.ctypes.data
        end = begin + len(memory)
        first, last = round_up(begin, _HUGE_PAGE), round_down(end, _HUGE_PAGE)
        if first >= last:
            return
        advised: PageSize = "small"
        for address in range(first, last, _HUGE_PAGE):
            wanted = self._choose()
            if wanted != advised:
                _advise(address, last, mmap.MADV_HUGEPAGE if wanted == "huge" else mmap.MADV_NOHUGEPAGE)
                advised = wanted
            started = time.thread_time()
            # Populating does not change what is present already.
            _advise(address, address + _HUGE_PAGE, _MADV_POPULATE_WRITE)
            self._seconds[wanted] = time.thread_time() - started
        # What does not fill a huge page at either end.
        for start, stop in ((round_up(begin), first), (last, round_down(end))):
            _advise(start, stop, _MADV_POPULATE_WRITE)

    def _choose(self) -> PageSize:
        # The slower one is timed again after 8, 16, 32, ... pieces: conditions change.
        faster, slower = sorted(self._seconds, key=self._seconds.__getitem__)
        self._pieces_left -= 1
        if self._pieces_left > 0:
            return faster
        self._interval *= 2
        self._pieces_left = self._interval
        return slower


def _advise(start: int, stop: int, advice: int) -> None:
    # Advice that the kernel declines changes only the speed.
    if start < stop:
        libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)


# Reading tensors in ranges: many in parallel, or one, stored itself or a view of a stored tensor.

_COPY_BYTES = 4 * 1024**2
# A tensor's name and a range of its raw bytes.
Range = tuple[str, int, int]


def read_all(
    reader: Reader,
    destinations: Mapping[str, Leaf | None],
    *,
    threads: int,
    pool: BufferPool,
    untouched: Collection[str] = (),
    progress: Progress | None = None,
    on_error: Callable[[Exception], None] | None = None,
    extent: Callable[[str], int] | None = None,
) -> None:
    """Read stored tensors in parallel into their destinations; a tensor with None is checked and discarded."""
    # `untouched` destinations are newly allocated. `on_error` is called instead of raising the first error, and the
    # other ranges are read. `extent` returns how many bytes of a tensor to read from its start.
    shards = {name: leaf for name, leaf in destinations.items() if isinstance(leaf, ShardedLeaf)}
    boxes = [(name, piece) for name, leaf in shards.items() for piece in leaf.pieces()]
    sizes = {
        name: extent(name) if extent else reader.flat.leaves[name].nbytes for name in destinations if name not in shards
    }
    meter = Meter(sum(sizes.values()) + sum(piece.nbytes for _, piece in boxes), progress)
    # One for the whole load: what is learned about page sizes holds for all tensors.
    pages = NewPages()

    def task(ranges: list[Range]) -> None:
        with reader.ahead(ranges):
            for name, start, stop in ranges:
                try:
                    _read(reader, name, start, stop, destinations[name], pool, pages if name in untouched else None)
                except Exception as error:
                    if on_error is None:
                        raise
                    on_error(error)
                # Also after an error: the progress ends at the total.
                meter.add(stop - start)

    def read_part(read: Callable[[], None], nbytes: int) -> None:
        read()
        meter.add(nbytes)

    pieces = (
        partial(read_part, read, nbytes)
        for name, piece in boxes
        for read, nbytes in reads_of(reader, name, piece, pool)
    )
    whole = ((name, *each) for name, nbytes in sizes.items() for each in grid(0, nbytes, reader.block_bytes(name)))
    tasks = chain((partial(task, group) for group in grouped(whole)), pieces)
    parallel.run(tasks, _usable_threads(reader, destinations, threads, pool))


def read_boxes(reader: Reader, boxes: Sequence[tuple[str, TensorShard]], threads: int, pool: BufferPool) -> None:
    """Fill shards in parallel from the stored tensors that are named with them."""
    reads = (read for name, piece in boxes for read, _ in reads_of(reader, name, piece, pool))
    parallel.run(reads, _usable_threads(reader, {name for name, _ in boxes}, threads, pool))


def _usable_threads(reader: Reader, names: Iterable[str], threads: int, pool: BufferPool) -> int:
    # A block's stored bytes, and its raw bytes if they cannot be decoded in place.
    block_bytes = max(map(reader.block_bytes, names), default=BLOCK_BYTES)
    return pool.threads(threads, thread_bytes(block_bytes, buffers=reader.buffers))


def reads_of(
    reader: Reader, name: str, piece: TensorShard, pool: BufferPool
) -> Iterator[tuple[Callable[[], None], int]]:
    """Yield tasks that fill the parts of a piece from a stored tensor, in any thread, with their sizes in bytes."""
    block_bytes = reader.block_bytes(name)
    if piece.shape[1:] == piece.whole[1:]:
        # Full rows are one range of the tensor. Cut at its blocks, which may end within a row, it is read once.
        first = sum(piece.offsets[:1]) * prod(piece.whole[1:]) * piece.dtype.itemsize
        for start, stop in grid(first, first + piece.nbytes, block_bytes):
            yield partial(_read, reader, name, start, stop, piece, pool, first=first), stop - start
        return
    for part in row_ranges(piece, block_bytes):
        yield partial(reader.read_box, name, part.offsets, part, pool), part.nbytes


def _read(
    reader: Reader,
    name: str,
    start: int,
    stop: int,
    leaf: Leaf | None,
    pool: BufferPool,
    pages: NewPages | None = None,
    *,
    first: int = 0,
) -> None:
    """Read a range into a leaf that begins at byte ``first``; without a leaf, only check it."""
    host = None if leaf is None else leaf.host_bytes()
    # Straight into the tensor's memory, without a buffer.
    if host is not None:
        out = host[start - first : stop - first]
        if pages is not None:
            pages.populate(out)
        reader.read(name, start, stop, out)
        return
    with pool.acquire(stop - start) as buffer:
        reader.read(name, start, stop, buffer[: stop - start])
        if leaf is not None:
            leaf.write(start - first, stop - first, buffer[: stop - start])


def grid(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield a range, cut at the multiples of ``step``."""
    while start < stop:
        end = min((start // step + 1) * step, stop)
        yield start, end
        start = end


def grouped(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    group: list[Range] = []
    size = 0
    for name, start, stop in ranges:
        # A thread should not be woken for a few bytes.
        if group and size + stop - start > BLOCK_BYTES:
            yield group
            group, size = [], 0
        group.append((name, start, stop))
        size += stop - start
    if group:
        yield group


def reading_threads(wanted: int, pool: BufferPool, *readers: Reader) -> int:
    """How many threads can each read 16 MiB and work with it, in a budget of three such buffers."""
    # To read a range of a larger block, the reader also holds that whole block and its stored bytes.
    block_bytes = max((each.block_bytes(name) for each in readers for name in each.flat.leaves), default=BLOCK_BYTES)
    beside = 0 if block_bytes <= BLOCK_BYTES else 2
    beside += max(reader.buffers for reader in readers) - 2
    each_thread = thread_bytes(BLOCK_BYTES, buffers=3) + thread_bytes(block_bytes, buffers=beside)
    return pool.threads(wanted, each_thread)


def contiguous_in(reader: Reader, name: str) -> tuple[str, int] | None:
    """The stored tensor that holds a tensor contiguously, and its first byte there; None for other views."""
    alias = reader.flat.aliases.get(name)
    if alias is None:
        return name, 0
    return (alias.of, alias.offset_elements * reader.entries[name].dtype.itemsize) if alias.is_contiguous else None


def fill(
    reader: Reader, name: str, leaf: Leaf, pool: BufferPool, pages: NewPages | None = None, *, start: int = 0
) -> None:
    """Fill a leaf from byte ``start`` of a tensor, in this thread; for a strided view, ``start`` is 0."""
    place = contiguous_in(reader, name)
    if place is None:
        copy_range(strided_view(reader, name, "tensor" if leaf.is_torch else "ndarray", pool), 0, leaf, pool)
        return
    stored, offset = place
    first = offset + start
    # Cut at the blocks of the stored tensor, so that each block is decoded once.
    for begin, end in grid(first, first + leaf.nbytes, reader.block_bytes(stored)):
        _read(reader, stored, begin, end, leaf, pool, pages, first=first)


def fill_from_view(reader: Reader, name: str, boxes: Iterable[TensorShard], pool: BufferPool) -> None:
    """Fill boxes of a tensor that is a view; the view is loaded in full unless it is the stored tensor."""
    alias, entry = reader.flat.aliases[name], reader.entries[name]
    if alias.is_full(reader.flat.leaves[alias.of].shape):
        for box in boxes:
            for read, _ in reads_of(reader, alias.of, box, pool):
                read()
        return
    # Then each box is copied: the strides of a view may differ from the strides of the stored tensor.
    full = Leaf(name, "tensor", entry.dtype, allocate("tensor", entry.dtype, entry.shape))
    fill(reader, name, full, pool, NewPages())
    for box in boxes:
        own = full.array[box_of(box.offsets, box.shape)]
        copy_range(Leaf(name, "tensor", entry.dtype, own), 0, box, pool)


def strided_view(reader: Reader, name: str, kind: LeafKind, pool: BufferPool) -> Leaf:
    """Load the stored tensor, and return the view. Raises CorruptCheckpointError if the view is outside."""
    alias, entry = reader.flat.aliases[name], reader.entries[name]
    base = Leaf(alias.of, kind, entry.dtype, allocate(kind, entry.dtype, reader.flat.leaves[alias.of].shape))
    fill(reader, alias.of, base, pool, NewPages())
    try:
        return Leaf(name, kind, entry.dtype, make_view(base.array, alias))
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"the view cannot be made ({error})", path=reader.path, name=name) from error


def copy_range(source: Leaf, start: int, target: Leaf, pool: BufferPool) -> None:
    """Fill a leaf from the bytes of another one from ``start`` on, 4 MiB at a time."""
    for begin, end in grid(0, target.nbytes, _COPY_BYTES):
        with pool.acquire(end - begin) as buffer:
            source.read(start + begin, start + end, buffer[: end - begin])
            target.write(begin, end, buffer[: end - begin])


# The memory of the tensors of a load.


class Target(NamedTuple):
    """A given tensor that is loaded. Bytes are read into it if it ``fills``; else it is a view of another."""

    leaf: Leaf
    value: Any
    fills: bool


class CopyPlan:
    """The memory of the ``chosen`` tensors: ``given`` ones are filled in place, others get new memory."""

    def __init__(
        self,
        reader: Reader,
        chosen: list[str],
        given: Mapping[str, Target],
        device: Device = None,
        dtype: DType | None = None,
    ) -> None:
        self._reader = reader
        self._dtype = dtype
        self._chosen = chosen
        self._given = given
        self._memory = {name: target.leaf for name, target in given.items() if target.fills}
        self._allocate([name for name in chosen if name not in given], device)
        # One leaf for each stored tensor; other views are filled afterwards.
        flat = reader.flat
        self._stored = {name: leaf for name, leaf in self._memory.items() if name in flat.leaves}
        self._views: list[Leaf] = []
        for name, leaf in self._memory.items():
            alias = flat.aliases.get(name)
            if alias is not None:
                full = alias.is_full(flat.leaves[alias.of].shape)
                # Two views of one stored tensor need memory of their own: the first is read, the other is filled
                # afterwards.
                if not full or self._stored.setdefault(alias.of, leaf) is not leaf:
                    self._views.append(leaf)

    def _allocate(self, names: list[str], device: Device) -> None:
        flat, entries = self._reader.flat, self._reader.entries
        self._check_memory(names, device)
        wanted = set(self._chosen)
        views = Counter([flat.aliases[n].of for n in names if n in flat.aliases])
        for name in names:
            base = entries[name].alias_of
            if base in wanted:
                continue
            stored = name
            # A single view of a stored tensor that is not wanted gets memory for itself only; several views share the
            # stored tensor's.
            if base is not None and (views[base] > 1 or entries[name].nbytes > flat.leaves[base].nbytes):
                stored = base
            if stored not in self._memory:
                kind, entry = self._reader.leaf_specs[name].kind, entries[stored]
                where = device if kind in ("tensor", "parameter") else None
                dtype = self._dtype_of(stored)
                array = allocate(kind, dtype, entry.shape, device=where)
                self._memory[stored] = (Leaf if dtype is entry.dtype else CastLeaf)(stored, kind, entry.dtype, array)

    def _dtype_of(self, name: str) -> DType:
        saved, kind = self._reader.entries[name].dtype, self._reader.leaf_specs[name].kind
        is_converted = saved.kind == "float" and kind in ("tensor", "parameter")
        return self._dtype if self._dtype is not None and is_converted else saved

    def _check_memory(self, names: Iterable[str], device: Device) -> None:
        """Raises OutOfMemoryError if the tensors exceed the machine's memory."""
        # Before anything is allocated: a hostile manifest can state any size, and Linux kills a process that touches
        # too much.
        stored = {self._reader.entries[name].alias_of or name for name in names}
        needed = sum(prod(self._reader.entries[name].shape) * self._dtype_of(name).itemsize for name in stored)
        if device is None and needed > (limit := memory_limit()):
            text = f"needs {format_bytes(needed)} of memory, this process can have {format_bytes(limit)}"
            remedy = "`select` some of the tensors, or `tensorkeep.open` it and slice"
            raise OutOfMemoryError(text, path=self._reader.path, remedy=remedy)

    @property
    def nbytes(self) -> int:
        """The bytes that are read in parallel."""
        return sum(bytes_here(leaf) for leaf in self._stored.values())

    def read(self, threads: int, pool: BufferPool, progress: Progress | None) -> None:
        # Kernels that were queued by the caller may still use the old values.
        wait_for_caller(self._memory.values())
        # The caller's memory has its pages already.
        untouched = self._memory.keys() - self._given.keys()
        read_all(self._reader, self._stored, threads=threads, pool=pool, untouched=untouched, progress=progress)
        wait_for_copies(self._memory.values())
        for leaf in self._views:
            if isinstance(leaf, ShardedLeaf):
                fill_from_view(self._reader, leaf.name, leaf.pieces(), pool)
                continue
            place = contiguous_in(self._reader, leaf.name)
            if place is not None and place[0] in self._stored:
                copy_range(self._stored[place[0]], place[1], leaf, pool)
            else:
                fill(self._reader, leaf.name, leaf, pool)

    def values(self) -> dict[str, Array]:
        values: dict[str, Array] = {}
        for name in self._chosen:
            if name in self._given:
                values[name] = self._given[name].value
            elif name in self._memory:
                values[name] = self._memory[name].array
            else:
                alias = self._reader.flat.aliases[name]
                base = self._given[alias.of].leaf if alias.of in self._given else self._memory[alias.of]
                values[name] = make_view(base.array, alias)
        return values
