"""Saves by several ranks that are threads of this process, without process groups."""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from tensorkeep.formats.base import WriteResult, WriteSettings
from tensorkeep.formats.blockfile.plan import Grid
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.manifest import FragmentReport
from tensorkeep.formats.native.sharded import plan_root, write_plan, write_root
from tensorkeep.formats.native.writer import NativeOptions, ShardedWrite
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.sharded import TensorShard
from tensorkeep.state.tree import flatten
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.commit import Commit

Split = Callable[[Leaf], Sequence[Sequence[TensorShard]]]
"""Returns the boxes of a tensor that each rank has."""

SECONDS = 60


def box(leaf: Leaf, offsets: Sequence[int], sizes: Sequence[int]) -> TensorShard:
    """Return a box of a tensor, whose memory is a view."""
    array = leaf.array[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] if offsets else leaf.array
    return TensorShard(leaf.name, leaf.kind, leaf.dtype, array, leaf.requires_grad, leaf.shape, tuple(offsets))


def by_dimension(ranks: int, dim: int = 0) -> Split:
    """Divide a tensor along one dimension as torch does; one that has fewer dimensions is saved by one rank."""

    def split(leaf: Leaf) -> list[list[TensorShard]]:
        found: list[list[TensorShard]] = [[] for _ in range(ranks)]
        if not leaf.nbytes:
            return found
        if len(leaf.shape) <= dim:
            found[len(leaf.name) % ranks].append(TensorShard.of_leaf(leaf))
            return found
        step = -(-leaf.shape[dim] // ranks)
        for rank, start in enumerate(range(0, leaf.shape[dim], step)):
            offsets, sizes = [0] * len(leaf.shape), list(leaf.shape)
            offsets[dim], sizes[dim] = start, min(step, leaf.shape[dim] - start)
            found[rank].append(box(leaf, offsets, sizes))
        return found

    return split


def random_tiling(random: Random, shape: Sequence[int], cuts: int = 3) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return offsets and sizes of boxes that tile an array: it is cut again and again, anywhere, in any dimension."""
    if 0 in shape:
        return []
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(cuts if shape else 0):
        number = random.randrange(len(boxes))
        offsets, sizes = boxes[number]
        axis = random.randrange(len(shape))
        if sizes[axis] < 2:
            continue
        at = random.randrange(1, sizes[axis])
        first = (offsets, (*sizes[:axis], at, *sizes[axis + 1 :]))
        begin = (*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :])
        second = (begin, (*sizes[:axis], sizes[axis] - at, *sizes[axis + 1 :]))
        boxes[number : number + 1] = [first, second]
    return boxes


def at_random(ranks: int, seed: int, cuts: int = 5) -> Split:
    """Divide a tensor into boxes anywhere, and give them to ranks at random."""
    random = Random(seed)

    def split(leaf: Leaf) -> list[list[TensorShard]]:
        found: list[list[TensorShard]] = [[] for _ in range(ranks)]
        for offsets, sizes in random_tiling(random, leaf.shape, cuts):
            found[random.randrange(ranks)].append(box(leaf, offsets, sizes))
        return found

    return split


class SimulatedRank:
    """One rank; see `tensorkeep.formats.native.writer.SaveCoordinator`."""

    def __init__(self, save: "SimulatedSave", rank: int) -> None:
        self.rank = rank
        self.size = save.ranks
        self._save = save

    def begin(self) -> tuple[Path, str]:
        return self._save.commit.path, self._save.name

    def finish(self, report: FragmentReport) -> None:
        self._save.reports.append(report)
        if self._save.barrier.wait() == 0:
            self._save.publish()
        self._save.barrier.wait()


class SimulatedSave:
    """A save by several ranks; `run` raises the first error of any."""

    def __init__(self, path: Path, state: Any, ranks: int, split: Split, settings: WriteSettings, **more: Any) -> None:
        flat = flatten(state)
        self.ranks = ranks
        self.name = secrets.token_hex(8)
        self.plan = plan_root(flat, settings, save=self.name, ranks=ranks, layouts=more.pop("layouts", None))
        self.reports: list[FragmentReport] = []
        self.barrier = threading.Barrier(ranks, timeout=SECONDS)
        self.commit = Commit(path, directory=True, overwrite=settings.overwrite, replaceable=is_replaceable)
        shares: list[list[TensorShard]] = [[] for _ in range(ranks)]
        for leaf in flat.leaves.values():
            for share, pieces in zip(shares, split(leaf), strict=True):
                share.extend(pieces)
        self._writes = [
            ShardedWrite(share, flat.parts, path, settings, SimulatedRank(self, rank), **more)
            for rank, share in enumerate(shares)
        ]

    def publish(self) -> None:
        """Write the root and make the checkpoint visible, as the coordinator does."""
        write_root(self.commit.path, self.plan, self.reports)
        self.commit.publish()

    def run(self) -> list[WriteResult]:
        """Save, each rank in a thread."""
        with self.commit, ThreadPoolExecutor(self.ranks) as threads:
            write_plan(self.commit, self.plan)
            ranks = [threads.submit(self._write, write) for write in self._writes]
        errors = [error for rank in ranks if (error := rank.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [rank.result() for rank in ranks]

    def _write(self, write: ShardedWrite) -> WriteResult:
        try:
            return write.run()
        except BaseException:
            self.barrier.abort()
            raise


def save_by_ranks(
    path: Path,
    state: Any,
    ranks: int,
    split: Split | None = None,
    *,
    compression: str = "none",
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    grid_bytes: int | None = None,
    layouts: Mapping[str, str] | None = None,
    **options: Any,
) -> list[WriteResult]:
    """Save a state by several ranks and return the result of each; by default, tensors are divided by their rows."""
    settings = WriteSettings(
        overwrite=overwrite,
        metadata=dict(metadata or {}),
        compression=compression,
        threads=2,
        pool=BufferPool(),
        options=NativeOptions(**options),
    )
    more: dict[str, Any] = {"layouts": layouts} | ({"grid": Grid(grid_bytes)} if grid_bytes else {})
    with settings.pool:
        return SimulatedSave(path, state, ranks, split or by_dimension(ranks), settings, **more).run()
