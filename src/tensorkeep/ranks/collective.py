"""Samples of plain tensors: a rank's value of a tensor that others have as well is stored for all of them."""

import logging
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from tensorkeep.errors import RanksDisagreeError, StateMismatchWarning, stack_level_of_caller
from tensorkeep.formats.base import WriteResult, WriteSettings
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native.directory import commit_to
from tensorkeep.formats.native.manifest import FILE_NAME, FragmentReport, Root
from tensorkeep.formats.native.sharded import check_plan, finish_saves, plan_root, root_content, write_plan, write_root
from tensorkeep.formats.native.writer import ShardedWrite
from tensorkeep.paths import absolute, as_path
from tensorkeep.ranks.group import Ranks
from tensorkeep.ranks.outline import (
    BoxKey,
    FullTensor,
    MergedTensors,
    RankOutline,
    Tensors,
    digest_of,
    merge_skeletons,
    merge_tensors,
)
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.sharded import ShardedLeaf, TensorShard, shards_of
from tensorkeep.state.tree import Flat
from tensorkeep.storage import storage_of
from tensorkeep.storage.base import PendingCommit
from tensorkeep.storage.parallel import Cancelled

# Samples of plain tensors: a rank's value of a tensor that others have as well is stored for all of them.

_SAMPLE_BYTES = 1024


def sample_digests(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Return a checksum of the first and the last bytes of each plain tensor in host memory, by name."""
    found: dict[str, str] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, ShardedLeaf) or not leaf.nbytes or (leaf.is_torch and leaf.array.device.type != "cpu"):
            continue
        count = min(leaf.nbytes, _SAMPLE_BYTES // leaf.dtype.itemsize * leaf.dtype.itemsize)
        sample = np.empty(2 * count, np.uint8)
        leaf.read(0, count, sample[:count])
        leaf.read(leaf.nbytes - count, leaf.nbytes, sample[count:])
        found[name] = xxhash.xxh3_64_hexdigest(sample.data)
    return found


def warn_of_differing(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Warn of the plain tensors whose samples differ between ranks, of which one rank's will be stored."""
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(by_rank):
        for name, digest in digests.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                differing.setdefault(name, (other, rank))
    if differing:
        name, (one, other) = next(iter(differing.items()))
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        text = (
            f"{name!r}{more}: plain tensors that differ between ranks {one} and {other}; the values of one rank are "
            "saved for all. Give each rank keys of its own, or wrap them: tensorkeep.distributed.PerRank(value)"
        )
        warnings.warn(StateMismatchWarning(text), stacklevel=stack_level_of_caller())


# Who writes what: every rank computes the same answer from the tensors that the ranks have together.

SPLIT_BYTES = 64 * 1024**2
"""A box that several ranks have is divided among them in runs of rows of at least so many bytes."""


class Share(NamedTuple):
    """What one rank writes of a box that it has: the rows ``start:stop`` of the box; a scalar is one row."""

    name: str
    box: BoxKey
    start: int
    stop: int


def assign(merged: MergedTensors, ranks: int, own: int) -> list[Share]:
    """Return what rank ``own`` writes, so that everything is written once, by ranks with about the same bytes in all.

    A box that one rank has is written by it. Those that several ranks have follow, the largest first, each by the rank
    of them that has the least to write; large ones are divided. Ties are decided by name and rank, and so in the same
    way in every save.
    """
    load = [0] * ranks
    shares: list[Share] = []
    shared: list[tuple[int, list[int], Share]] = []
    for name, boxes in merged.boxes.items():
        tensor = merged.tensors[name]
        itemsize, count = BY_NAME[tensor.dtype].itemsize, len(tensor.shape)
        for box, owners in boxes.items():
            sizes = box[count:]
            nbytes = prod(sizes) * itemsize
            rows = sizes[0] if sizes else 1
            if len(owners) == 1:
                load[owners[0]] += nbytes
                if owners[0] == own:
                    shares.append(Share(name, box, 0, rows))
                continue
            for start, stop in _runs(rows, nbytes, len(owners)):
                shared.append((nbytes // rows * (stop - start), owners, Share(name, box, start, stop)))
    for nbytes, owners, share in sorted(shared, key=lambda each: -each[0]):
        writer = min(owners, key=lambda rank: (load[rank], rank))
        load[writer] += nbytes
        if writer == own:
            shares.append(share)
    order = {name: number for number, name in enumerate(merged.tensors)}
    return sorted(shares, key=lambda share: (order[share.name], share.box, share.start))


def own_pieces(shares: Sequence[Share], leaves: Mapping[str, Leaf]) -> list[TensorShard]:
    """Return the memory of what this rank writes."""
    pieces: list[TensorShard] = []
    held: dict[str, dict[BoxKey, TensorShard]] = {}
    for share in shares:
        if share.name not in held:
            held[share.name] = {(*piece.offsets, *piece.shape): piece for piece in shards_of(leaves[share.name])}
        piece = held[share.name][share.box]
        everything = not piece.shape or (share.start, share.stop) == (0, piece.shape[0])
        pieces.append(piece if everything else piece.rows(share.start, share.stop))
    return pieces


def _runs(rows: int, nbytes: int, owners: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows in which a box is written: one, or several of about the same size."""
    count = max(1, min(owners, nbytes // SPLIT_BYTES, rows))
    yield from pairwise(rows * number // count for number in range(count + 1))


# One save by all ranks: what they agree on before it, and how the coordinator makes it visible.

logger = logging.getLogger(__name__)
PREPARING = "preparing to save"


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of all ranks together, and what this rank writes of it."""

    flat: Flat[FullTensor]
    layouts: Mapping[str, str]
    pieces: list[TensorShard]


def agree(ranks: Ranks, flat: Flat[Leaf], arguments: Mapping[str, Any]) -> SharedState:
    """Return the state of all ranks together, of which ``flat`` is this rank's; collective.

    ``arguments`` are plain values of the call that must be the same on all ranks.

    Raises RanksDisagreeError, on all ranks, for an argument, a tensor or a plain value that differs.
    """
    outline = RankOutline.of_state(flat)
    known = ranks.remembered
    samples = sample_digests(flat.leaves)
    own = [digest_of(each) for each in (arguments, samples, outline.tensors, outline.boxes, flat.skeleton)]
    received = ranks.caller.exchange([*own, known.get("outlines", "")], PREPARING)
    by_arguments, by_samples, by_tensors, by_boxes, by_skeleton, by_known = zip(*received, strict=True)
    if len({*by_arguments}) > 1:
        _refuse_arguments(ranks.caller.exchange(dict(arguments), PREPARING))
    if len({*by_samples}) > 1:
        warn_of_differing(ranks.caller.exchange(samples, PREPARING))
    outlines = digest_of([by_tensors, by_boxes])
    # All or none: a rank that was interrupted in the save before may not remember what the others do.
    if {*by_known} != {outlines}:
        merged = merge_tensors(_outlines(ranks, outline, by_tensors))
        known["shares"] = assign(merged, ranks.size, ranks.rank)
        # The boxes of all ranks would be most of what every rank remembers.
        known["merged"] = msgspec.structs.replace(merged, boxes={})
        known["outlines"] = outlines
    merged_tensors: MergedTensors = known["merged"]
    shares: list[Share] = known["shares"]
    skeleton = flat.skeleton
    if len({*by_skeleton}) > 1:
        skeleton = merge_skeletons(ranks.caller.exchange(skeleton, PREPARING))
    layouts = {name: tensor.layout for name, tensor in merged_tensors.tensors.items() if tensor.layout}
    return SharedState(merged_tensors.flat(skeleton), layouts, own_pieces(shares, flat.leaves))


def _outlines(ranks: Ranks, own: RankOutline, digests: Sequence[str]) -> list[RankOutline]:
    """Return the outlines of all ranks; of those that have the same tensors, the first sends them."""
    is_first = digests.index(digests[ranks.rank]) == ranks.rank
    sent = ranks.caller.exchange(own.tensors if is_first else None, PREPARING, of=Tensors | None)
    boxes = ranks.caller.exchange(own.boxes, PREPARING, of=list[list[BoxKey]])
    return [RankOutline(sent[digests.index(digest)], own) for digest, own in zip(digests, boxes, strict=True)]


def as_flat(pieces: Sequence[TensorShard]) -> Flat[TensorShard]:
    """Return pieces as a state of their own, whose bytes are looked at; its names are numbers."""
    leaves = {str(number): piece for number, piece in enumerate(pieces)}
    return Flat(None, leaves, {}, {name: ("state", name) for name in leaves})


def _refuse_arguments(given: list[dict[str, Any]]) -> None:
    for rank, arguments in enumerate(given):
        for name, value in arguments.items():
            if value != given[0].get(name):
                raise RanksDisagreeError(
                    f"{name} is {given[0].get(name)!r} on rank 0, and {value!r} on rank {rank}",
                    remedy="call it with the same arguments on all ranks",
                )


class Coordination:
    """How the ranks of one save act together; a `tensorkeep.formats.native.writer.SaveCoordinator`.

    The coordinator makes the staging folder, and makes the checkpoint visible when all fragments are durable. It
    believes what the ranks report: on a network file system it may not see their files yet. In an object store, each
    rank uploads its own objects, whose names have the coordinator's id of the save.
    """

    def __init__(self, ranks: Ranks, shared: SharedState, destination: Path, settings: WriteSettings) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._channel = ranks.writer
        self._shared = shared
        self._destination = destination
        self._settings = settings
        self._commit: PendingCommit | None = None
        self._plan: Root | None = None
        self._ended = False
        self.turn = ranks.turn()
        self.totals: tuple[int, int] = 0, 0
        """The stored and new bytes of all ranks."""

    def begin(self) -> tuple[Path, str]:
        """Return the staging folder and the id of the save; collective."""
        self.turn.wait()
        place = self._stage() if self.rank == 0 else None
        folder, save = self._channel.exchange(place, f"beginning to save {self._destination}")[0]
        return as_path(folder), save

    def _stage(self) -> tuple[str, str]:
        """Make the staging folder and write the plan of the save into it; in a store, only look for what is there."""
        destination = self._destination
        if not storage_of(destination).remote:
            finish_saves(absolute(destination).parent)
        commit = self._commit = commit_to(destination, overwrite=self._settings.overwrite).__enter__()
        # The restart of an elastic run, which must not meet what an earlier one has left.
        save = f"{commit.save_id or secrets.token_hex(8)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        shared = self._shared
        self._plan = plan_root(shared.flat, self._settings, save=save, ranks=self.size, layouts=shared.layouts)
        if not commit.is_staged:
            with as_a_reader():
                check_plan(self._plan, destination)
        else:
            write_plan(commit, self._plan)
        return str(commit.path), save

    def finish(self, report: FragmentReport) -> None:
        """Make the checkpoint visible, once the parts of all ranks are durable; collective."""
        reports = self._channel.exchange(report, "writing its part", of=FragmentReport, to_coordinator=True)
        totals = sum(each.stored_bytes for each in reports), sum(each.new_bytes for each in reports)
        commit, plan = self._commit, self._plan
        if commit is not None and plan is not None:
            if not commit.is_staged:
                commit.publish(root_content(self._destination / FILE_NAME, plan, reports))
            else:
                write_root(commit.path, plan, reports)
                commit.publish()
            self._leave()
        self._end(totals)

    def _end(self, totals: tuple[int, int]) -> None:
        """Wait until the coordinator has made the checkpoint visible, and knows the totals."""
        try:
            self.totals = tuple(self._channel.exchange(totals, "making the checkpoint visible")[0])
        except RanksDisagreeError as error:
            if error is not self._channel.lost:
                raise
            self._ended = True
            in_store = storage_of(self._destination).remote
            otherwise = "save again" if in_store else "the next save there finishes it first"
            raise RanksDisagreeError(
                f"{error.message}, when all ranks had written their parts",
                path=self._destination,
                remedy=f"load it to see whether it is the new checkpoint; if not, {otherwise}",
            ) from error
        self._ended = True

    def fail(self, error: BaseException) -> None:
        """End the save on all ranks, unless that was done; the staging folder is removed."""
        if self._ended:
            return
        self._ended = True
        try:
            self.turn.wait()
            self._channel.fail(error, "saving")
        finally:
            self._leave()

    def _leave(self) -> None:
        """Remove the staging folder unless it was published, and unlock it."""
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.__exit__()


class CollectiveWrite(ShardedWrite):
    """The writing of one rank's part of a checkpoint; if it fails on one rank, it fails on all."""

    def __init__(self, ranks: Ranks, shared: SharedState, destination: Path, settings: WriteSettings) -> None:
        self._coordination = Coordination(ranks, shared, destination, settings)
        super().__init__(shared.pieces, shared.flat.parts, destination, settings, self._coordination)

    def take_turn(self) -> None:
        """Queue the save behind those that this group began before; collective."""
        self._coordination.turn.take()

    def _write(self) -> WriteResult:
        try:
            result = super()._write()
        except BaseException as error:
            self._coordination.fail(error)
            raise
        finally:
            self._coordination.turn.end()
        stored, new = self._coordination.totals
        return replace(result, stored_bytes=stored, new_bytes=new)

    def abandon(self) -> None:
        super().abandon()
        # Only a save that was never begun has not ended yet.
        try:
            self._coordination.fail(Cancelled("the save was abandoned before it began"))
        finally:
            self._coordination.turn.end()
