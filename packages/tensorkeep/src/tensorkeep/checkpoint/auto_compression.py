"""``compression="auto"``: choose between raw and lossless by measuring a sample of the state and the disk."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tensorkeep.codecs import probe
from tensorkeep.errors import StoreError
from tensorkeep.formats.base import BLOCK_BYTES, StoredLeaf, WriteSettings, thread_bytes
from tensorkeep.formats.blockfile.plan import Block, BlockFileOptions, plan_files, tasks_of
from tensorkeep.formats.blockfile.write import copy_and_hash, encode_and_hash, readable
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.formats.native.writer import NativeOptions
from tensorkeep.state.leaf import Bytes, Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage import parallel, storage_of
from tensorkeep.storage.buffers import BufferPool, round_up
from tensorkeep.storage.commit import Commit
from tensorkeep.storage.direct_io import DirectFile
from tensorkeep.storage.parallel import Cancellation, Pace
from tensorkeep.units import format_bytes

# The formats that support ``"auto"``: those with raw and lossless blocks.
FORMATS = ("native", "safetensors")

# States with fewer bytes are not measured: the save takes about as long as measuring.
SMALLEST = 256 * 1024**2

# Rates are reused for this many seconds, for states with the same dtypes and sizes on the same file system.
RATES_VALID_SECONDS = 600.0

# Seconds after which no further block is begun.
MEASURING_SECONDS = 0.1

_FEWEST, _MOST = 4, 8

# Disks write 1 MiB at a time as fast as 64 MiB; on a slow one, no thread should be busy for long.
_WRITE = 4 * 1024**2
_RAW_BYTES_PER_BLOCK = 256 * 1024**2


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second of all threads; ``gather`` and ``code`` count raw bytes, hashed as well."""

    gather: float
    code: float
    compressed_fraction: float
    disk: float

    def seconds(self, nbytes: int) -> dict[str, float]:
        """The predicted duration of a save of so many raw bytes, by compression."""
        # Computing and writing overlap, but not completely: the root of the sum of their squares fitted measured saves
        # better than the larger of the two.
        return {
            "none": math.hypot(nbytes / self.gather, nbytes / self.disk),
            "lossless": math.hypot(nbytes / self.code, nbytes * self.compressed_fraction / self.disk),
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen compression and why; ``again`` if an earlier save measured the rates."""

    compression: str
    reason: str
    rates: Rates | None = None
    seconds: dict[str, float] | None = None
    again: bool = False
    measuring_seconds: float = 0.0


def decide(
    flat: Flat[Source],
    destination: Path,
    settings: WriteSettings,
    *,
    measure: Callable[[Flat[Source], Path, WriteSettings], Rates],
    clock: Clock = time.monotonic,
) -> Decision:
    """Decide by measuring; writes and removes a temporary file. Raises DestinationExistsError as the save would."""
    if isinstance(settings.options, NativeOptions) and settings.options.delta:
        return Decision("lossless", "differences are stored compressed")
    if storage_of(destination).remote:
        return Decision("lossless", "most networks are slower than coding, and the bytes in a store cost money")
    nbytes = sum(leaf.nbytes for leaf in flat.leaves.values())
    if nbytes < SMALLEST:
        return Decision("none", f"nothing is measured below {format_bytes(SMALLEST)}")
    begin = clock()
    key = _kind(flat, destination, settings)
    measured, rates = _known.get(key, (0.0, None)) if key is not None else (0.0, None)
    again = rates is not None and begin - measured < RATES_VALID_SECONDS
    if rates is None or not again:
        try:
            rates = measure(flat, destination, settings)
        # The save will raise this error itself, with the right action in the message.
        except StoreError as error:
            return Decision(
                "none", f"the disk could not be measured: {error.message}", measuring_seconds=clock() - begin
            )
        if key is not None:
            _known.pop(key, None)
            _known[key] = clock(), rates
            for oldest in list(_known)[:-_MOST_KNOWN]:
                _known.pop(oldest, None)
    seconds = rates.seconds(nbytes)
    taken, other = sorted(seconds, key=lambda name: (seconds[name], name != "none"))
    reason = f"{taken} is predicted to take {seconds[taken]:.3f} s, {other} {seconds[other]:.3f} s"
    return Decision(taken, reason, rates, seconds, again, clock() - begin)


_Key = tuple[object, ...]


def _kind(flat: Flat[Source], destination: Path, settings: WriteSettings) -> _Key | None:
    """What rates depend on: file system, settings, and bytes by dtype; None if the folder cannot be read."""
    try:
        # The folder of the destination need not exist yet.
        device = next(folder for folder in destination.absolute().parents if folder.exists()).stat().st_dev
    except OSError:
        return None
    sizes: dict[str, int] = {}
    for leaf in flat.leaves.values():
        sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.nbytes
    direct = settings.options_as(BlockFileOptions).direct_io
    stored = any(isinstance(leaf, StoredLeaf) for leaf in flat.leaves.values())
    threads = settings.threads, settings.pool.budget
    return device, direct, threads, stored, len(flat.leaves), tuple(sorted(sizes.items()))


_MOST_KNOWN = 64
# The rates that this process has measured, and when: a training run saves the same state again and again. Its
# operations are atomic, so that no lock is needed, which another thread might hold when the process is forked.
_known: dict[_Key, tuple[float, Rates]] = {}


# Measuring


def measure(flat: Flat[Source], destination: Path, settings: WriteSettings) -> Rates:
    """Measure spread blocks, and writing to a temporary file. Raises DestinationExistsError and StoreError."""
    tasks = _sample(flat)
    # As many as the writer will use with this budget.
    threads = settings.pool.threads(settings.threads, thread_bytes(BLOCK_BYTES, buffers=3))
    # A temporary as for a save: with the same errors, and removed by the next save if this process is killed.
    with Commit(destination, directory=False, overwrite=settings.overwrite, replaceable=lambda _: True) as commit:
        disk = _disk_rate(commit.path, tasks, settings, threads)
    pace = Pace(Cancellation())
    gather = _run_trial([[partial(_gather, settings.pool, block) for block in task] for task in tasks], threads)
    code = _run_trial([[partial(_code, settings.pool, pace, block) for block in task] for task in tasks], threads)
    return Rates(gather.rate, code.rate, code.stored_bytes / code.nbytes, disk)


def _sample(flat: Flat[Source]) -> list[list[Block]]:
    tasks = [task for plan in plan_files(flat) for task in tasks_of(plan)]
    total = sum(leaf.nbytes for leaf in flat.leaves.values())
    count = min(len(tasks), max(_FEWEST, min(_MOST, total // _RAW_BYTES_PER_BLOCK)))
    return [tasks[place] for place in np.linspace(0, len(tasks) - 1, count).astype(int)]


@dataclass(slots=True)
class _Trial:
    nbytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


# Works on some bytes, and returns how many these are, and how many are stored for them.
_Work = Callable[[], tuple[int, int]]


def _run_trial(tasks: Iterable[Iterable[_Work]], threads: int, clock: Clock = time.perf_counter) -> _Trial:
    trial = _Trial()
    lock = threading.Lock()
    begin = clock()

    def run(task: Iterable[_Work]) -> None:
        for work in task:
            # The first work is always done, so that no rate is 0.
            if trial.nbytes and clock() > begin + MEASURING_SECONDS:
                return
            nbytes, stored = work()
            with lock:
                trial.nbytes += nbytes
                trial.stored_bytes += stored

    parallel.run([partial(run, task) for task in tasks], threads)
    trial.seconds = clock() - begin
    return trial


def _gather(pool: BufferPool, block: Block) -> tuple[int, int]:
    with pool.acquire(block.nbytes) as buffer:
        copy_and_hash(block, buffer[: block.nbytes], wide=False)
    return block.nbytes, block.nbytes


def _code(pool: BufferPool, pace: Pace, block: Block) -> tuple[int, int]:
    coded_bytes = round_up(probe.bound(block.nbytes))
    # One buffer for both: the coded bytes in front, space for a copy of the block behind.
    with pool.acquire(coded_bytes + block.nbytes) as buffer:
        raw, aside = readable(block, buffer[coded_bytes:])
        with pace.coding():
            length = encode_and_hash(block, raw, aside, None, buffer[:coded_bytes], wide=False).length
        digest(buffer[:length])
    return block.nbytes, length


def _disk_rate(path: Path, tasks: Sequence[list[Block]], settings: WriteSettings, threads: int) -> float:
    file = DirectFile(path, direct=settings.options_as(BlockFileOptions).direct_io)
    try:
        with ExitStack() as stack:
            # Of the size that coding needs, so that the memory is touched before coding is measured.
            size = round_up(probe.bound(BLOCK_BYTES))
            buffers = [stack.enter_context(settings.pool.acquire(size)) for _ in range(threads)]
            contents = [_filled(buffer, tasks[place % len(tasks)]) for place, buffer in enumerate(buffers)]
            return _write_rate(file, contents)
    finally:
        file.close()


def _write_rate(file: DirectFile, contents: list[Bytes], clock: Clock = time.perf_counter) -> float:
    size = _MOST * BLOCK_BYTES
    free = contents.copy()

    def write(offset: int) -> tuple[int, int]:
        content = free.pop()  # there are as many as threads
        start = offset % len(content)
        file.write(offset, content[start : start + _WRITE])
        free.append(content)
        return _WRITE, _WRITE

    file.preallocate(size)
    begin = clock()
    trial = _run_trial([[partial(write, offset)] for offset in range(0, size, _WRITE)], len(contents), clock)
    file.finish(size)
    # Data in the page cache is not written yet. The flush after direct writes takes both saves equally long.
    if not file.direct:
        trial.seconds = clock() - begin
    return trial.rate


def _filled(buffer: Bytes, task: list[Block]) -> Bytes:
    """Fill a buffer with the blocks of a task, repeatedly: the device may compress what it stores."""
    content = buffer[:BLOCK_BYTES]
    used = 0
    for block in task:
        copy_and_hash(block, content[used : used + block.nbytes], wide=False)
        used += block.nbytes
    # Tasks may be smaller than a block.
    for at in range(used, BLOCK_BYTES, used):
        content[at : at + used] = content[: min(used, BLOCK_BYTES - at)]
    return content
