"""Which blocks of a checkpoint are read for statistics, and reading them in parallel within the memory budget."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from tensorkeep.checkpoint.ranges import Range, grouped, reading_threads
from tensorkeep.formats.base import BLOCK_BYTES, Reader, StoredLeaf
from tensorkeep.show.tensors.statistics import Accumulator, Statistics
from tensorkeep.storage import parallel
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.direct_io import Bytes
from tensorkeep.storage.parallel import Meter, Progress
from tensorkeep.units import format_bytes

DEFAULT_SAMPLE = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Sample:
    """The ranges to read of each stored tensor: all of it, or 1 of ``every`` so many blocks of a large one.

    ``nbytes`` of ``total`` raw bytes are read.
    """

    ranges: Mapping[str, list[tuple[int, int]]]
    every: int
    nbytes: int
    total: int

    @property
    def text(self) -> str:
        """A sentence about what was read."""
        if self.every == 1:
            return f"Every element was read ({format_bytes(self.total)})."
        return (
            f"The statistics are those of a sample: 1 of every {self.every} blocks of a tensor, at least one of each, "
            f"{format_bytes(self.nbytes)} of {format_bytes(self.total)} in all."
        )


def choose_sample(reader: Reader, limit: int) -> Sample:
    """Return the sample that reads at most about so many raw bytes, but a block of each tensor; evenly spread."""
    leaves = reader.flat.leaves
    steps = {name: _step(reader.block_bytes(name), leaf) for name, leaf in leaves.items()}
    total = sum(leaf.nbytes for leaf in leaves.values())
    every, nbytes = 1, total
    # Until no tensor has more than one block to read.
    while nbytes > limit and (fewer := _sampled_bytes(leaves, steps, 2 * every)) < nbytes:
        every, nbytes = 2 * every, fewer
    ranges = {name: list(_ranges(leaf.nbytes, steps[name], every)) for name, leaf in leaves.items()}
    nbytes = sum(stop - start for each in ranges.values() for start, stop in each)
    return Sample(ranges, every, nbytes, total)


def _step(block_bytes: int, leaf: StoredLeaf) -> int:
    """Return the bytes of a range: a block, several small ones, or a part of one that is larger than a buffer."""
    step = BLOCK_BYTES // block_bytes * block_bytes or BLOCK_BYTES
    return max(step // leaf.dtype.itemsize * leaf.dtype.itemsize, leaf.dtype.itemsize)


def _sampled_bytes(leaves: Mapping[str, StoredLeaf], steps: Mapping[str, int], every: int) -> int:
    found = 0
    for name, leaf in leaves.items():
        blocks = -(-leaf.nbytes // steps[name])
        found += min(leaf.nbytes, -(-blocks // every) * steps[name])
    return found


def _ranges(nbytes: int, step: int, every: int) -> Iterator[tuple[int, int]]:
    """Yield 1 of every so many ranges of a tensor, each from the middle of its neighbours."""
    blocks = -(-nbytes // step)
    count = -(-blocks // every)
    for number in range(count):
        start = (2 * number + 1) * blocks // (2 * count) * step
        yield start, min(start + step, nbytes)


def read_ranges(
    reader: Reader,
    ranges: Mapping[str, list[tuple[int, int]]],
    use: Callable[[str, int, Bytes], None],
    *,
    threads: int,
    pool: BufferPool,
    progress: Progress | None = None,
) -> None:
    """Read ranges of stored tensors in parallel, and pass each with its name and its first byte to ``use``."""
    meter = Meter(sum(stop - start for each in ranges.values() for start, stop in each), progress)

    def read(group: list[Range]) -> None:
        with pool.acquire(max(stop - start for _, start, stop in group)) as buffer:
            for name, start, stop in group:
                data = buffer[: stop - start]
                reader.read(name, start, stop, data)
                use(name, start, data)
                meter.add(stop - start)

    chosen = ((name, *place) for name, places in ranges.items() for place in places)
    parallel.run((partial(read, group) for group in grouped(chosen)), reading_threads(threads, pool, reader))


def measure(
    reader: Reader, sample: Sample, *, threads: int, pool: BufferPool, progress: Progress | None = None
) -> dict[str, Statistics]:
    """Read a sample and return the statistics of each stored tensor.

    The counts of a tensor are in memory only while its blocks are read: the budget holds however many there are.
    """
    leaves = reader.flat.leaves
    left = {name: len(ranges) for name, ranges in sample.ranges.items()}
    found = {name: Accumulator(leaves[name].dtype).result() for name, count in left.items() if not count}
    begun: dict[str, Accumulator] = {}
    lock = threading.Lock()

    def use(name: str, start: int, data: Bytes) -> None:
        with lock:
            if name not in begun:
                begun[name] = Accumulator(leaves[name].dtype)
        begun[name].add(start, data)
        with lock:
            left[name] -= 1
            ended = begun.pop(name) if not left[name] else None
        if ended is not None:
            found[name] = ended.result()

    read_ranges(reader, sample.ranges, use, threads=threads, pool=pool, progress=progress)
    return {name: found[name] for name in leaves}
