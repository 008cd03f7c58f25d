"""A save by all ranks: their states are merged, one rank writes each part, and rank 0 publishes the checkpoint."""

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from tensorkeep.errors import RanksDisagreeError, StateMismatchWarning, warn_caller
from tensorkeep.formats.base import AliasRecord, WriteResult, WriteSettings
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native.directory import commit_to
from tensorkeep.formats.native.manifest import FILE_NAME, FragmentReport, Root
from tensorkeep.formats.native.sharded import check_plan, finish_saves, plan_root, root_content, write_plan, write_root
from tensorkeep.formats.native.writer import ShardedWrite
from tensorkeep.paths import absolute, as_path
from tensorkeep.ranks.group import GroupCoordinator
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import LEAF_KINDS, Bytes, Leaf
from tensorkeep.state.sharded import ShardedLeaf, TensorShard, shards_of
from tensorkeep.state.skeleton import decode_bytes
from tensorkeep.state.tree import Flat, child_nodes, node_key_text, node_tag, with_children
from tensorkeep.storage import storage_of
from tensorkeep.storage.base import PendingCommit
from tensorkeep.storage.parallel import Cancelled

PREPARING = "preparing to save"

# A box of a tensor: its offsets, then its sizes.
BoxKey = tuple[int, ...]


class TensorOutline(msgspec.Struct, array_like=True, frozen=True, gc=False):
    name: str
    part: str
    key: str
    dtype: str
    # Of the full tensor.
    shape: tuple[int, ...]
    # The layout of a DTensor as text; empty for a plain tensor.
    layout: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


# A struct of its own: usually all ranks have the same tensors, and only the first rank sends them.
class Tensors(msgspec.Struct, frozen=True):
    tensors: list[TensorOutline]
    aliases: dict[str, AliasRecord]


class RankOutline(NamedTuple):
    tensors: Tensors
    # For each tensor, the boxes that the rank has.
    boxes: list[list[BoxKey]]

    @classmethod
    def of_state(cls, flat: Flat[Leaf]) -> "RankOutline":
        tensors = [
            TensorOutline(name, *flat.parts[name], leaf.dtype.name, leaf.shape, getattr(leaf, "layout", ""))
            for name, leaf in flat.leaves.items()
        ]
        aliases = {name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()}
        boxes = [[(*piece.offsets, *piece.shape) for piece in shards_of(leaf)] for leaf in flat.leaves.values()]
        return cls(Tensors(tensors, aliases), boxes)


def digest_of(value: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A full tensor that several ranks have parts of: a `tensorkeep.state.leaf.Source` that cannot be read."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int

    def host_bytes(self) -> Bytes | None:
        return None

    def read(self, start: int, stop: int, out: Bytes) -> None:
        raise AssertionError(f"this process does not have all of {self.name}")


class MergedTensors(msgspec.Struct, frozen=True):
    """The tensors of all ranks, each once."""

    tensors: dict[str, TensorOutline]
    aliases: dict[str, AliasRecord]
    # For every tensor, its boxes and the ranks that have them.
    boxes: dict[str, dict[BoxKey, list[int]]]

    def flat(self, skeleton: object) -> Flat[FullTensor]:
        leaves = {
            name: FullTensor(name, BY_NAME[each.dtype], each.shape, each.nbytes) for name, each in self.tensors.items()
        }
        parts = {name: (each.part, each.key) for name, each in self.tensors.items()}
        parts |= {name: (each.part, each.key) for name, each in self.aliases.items()}
        return Flat(skeleton, leaves, {name: each.alias() for name, each in self.aliases.items()}, parts)


def merge_tensors(outlines: Sequence[RankOutline]) -> MergedTensors:
    """Raises RanksDisagreeError, on all ranks alike, if dtype, shape or key of a tensor differ, or a box is missing."""
    tensors: dict[str, tuple[int, TensorOutline]] = {}
    aliases: dict[str, tuple[int, AliasRecord]] = {}
    boxes: dict[str, dict[BoxKey, list[int]]] = {}
    known: Tensors | None = None
    for rank, outline in enumerate(outlines):
        # Ranks with the same tensors share one object, so their tensors are compared once.
        if outline.tensors is not known:
            known = outline.tensors
            _add(rank, known, tensors, aliases)
            in_order = [boxes.setdefault(tensor.name, {}) for tensor in known.tensors]
        for own, of_all in zip(outline.boxes, in_order, strict=True):
            for box in own:
                of_all.setdefault(box, []).append(rank)
    # Tied on one rank, separate on another: a load could not restore both.
    for name in aliases.keys() & tensors.keys():
        raise RanksDisagreeError(
            f"shares the memory of {aliases[name][1].of!r} on rank {aliases[name][0]}, and not on rank "
            f"{tensors[name][0]}",
            name=name,
            remedy="tie the same tensors on all ranks",
        )
    merged = {name: tensor for name, (_, tensor) in tensors.items()}
    for name, tensor in merged.items():
        _check_complete(tensor, boxes[name])
    return MergedTensors(merged, {name: alias for name, (_, alias) in aliases.items()}, boxes)


def _add(
    rank: int, own: Tensors, tensors: dict[str, tuple[int, TensorOutline]], aliases: dict[str, tuple[int, AliasRecord]]
) -> None:
    for tensor in own.tensors:
        first, known = tensors.setdefault(tensor.name, (rank, tensor))
        for field in ("dtype", "shape", "part", "key"):
            _check_same(tensor.name, field, first, getattr(known, field), rank, getattr(tensor, field))
    for name, alias in own.aliases.items():
        first, shared = aliases.setdefault(name, (rank, alias))
        _check_same(name, "shared memory", first, shared.of, rank, alias.of)
        _check_same(name, "shared memory", first, msgspec.to_builtins(shared), rank, msgspec.to_builtins(alias))


def _check_same(name: str, field: str, rank: int, value: object, other_rank: int, other: object) -> None:
    if value != other:
        text = f"its {field} is {_text(value)} on rank {rank}, and {_text(other)} on rank {other_rank}"
        remedy = "give all ranks the same state, apart from their shards of DTensors"
        raise RanksDisagreeError(text, name=name, remedy=remedy)


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _check_complete(tensor: TensorOutline, boxes: Iterable[BoxKey]) -> None:
    count = len(tensor.shape)
    # Gaps only. The writer of the manifest finds boxes that overlap.
    covered, full = sum(prod(box[count:]) for box in boxes), prod(tensor.shape)
    if covered != full:
        layout = f" ({tensor.layout})" if tensor.layout else ""
        text = f"the ranks have {covered:,} of its {full:,} elements{layout}"
        raise RanksDisagreeError(text, name=tensor.name, remedy="give the group of all ranks that have a shard")


def merge_skeletons(skeletons: Sequence[Any]) -> Any:
    """A dict gets the keys of all ranks. Raises RanksDisagreeError, on all ranks alike, if a value differs."""
    return _merged(list(enumerate(skeletons)), "")


def _merged(nodes: list[tuple[int, Any]], name: str) -> Any:
    first, node = nodes[0]
    # Compared as JSON, because 1, True and 1.0 are equal in Python.
    encoded = msgspec.json.encode(node)
    if all(msgspec.json.encode(other) == encoded for _, other in nodes[1:]):
        return node
    tag = node_tag(node)
    for rank, other in nodes[1:]:
        if node_tag(other) != tag or child_nodes(node) is None:
            raise _differing(name, first, node, rank, other)
    # Keys by their repr: 1 and True are one key of a dict.
    children: dict[str, tuple[Any, list[tuple[int, Any]]]] = {}
    for rank, other in nodes:
        for key, child in child_nodes(other) or ():
            children.setdefault(repr(key), (key, []))[1].append((rank, child))
    # Only a dict may have other keys on each rank; items of a list have no names to merge by.
    if tag not in ("dict", "ordered", "items", "ordered_items"):
        for rank, other in nodes[1:]:
            if len(child_nodes(other) or ()) != len(child_nodes(node) or ()):
                raise _differing(name, first, node, rank, other)
    merged = [
        (key, _merged(found, f"{name}.{node_key_text(key)}" if name else node_key_text(key)))
        for key, found in children.values()
    ]
    return with_children(node, merged)


def _differing(name: str, rank: int, node: Any, other_rank: int, other: Any) -> RanksDisagreeError:
    texts = [_node_text(node), _node_text(other)]
    same_text = texts[0] == texts[1]
    return RanksDisagreeError(
        f"the value at {name!r} differs between ranks {rank} and {other_rank}"
        + ("" if same_text else f": {texts[0]} and {texts[1]}"),
        remedy="make them the same, or wrap what belongs to each rank: tensorkeep.distributed.PerRank(value)",
    )


def _node_text(node: Any) -> str:
    tag = node_tag(node)
    if tag in LEAF_KINDS:
        return f"the tensor {node[tag]!r}"
    if child_nodes(node) is not None:
        return f"a {tag} of {len(child_nodes(node) or ())}"
    value = next(iter(node.values())) if isinstance(node, dict) else node
    if tag in ("bytes", "bytearray"):
        value = decode_bytes(value)
    return f"{value!r:.60}"


# Plain tensors: one rank stores its value for all ranks.

_SAMPLE_BYTES = 1024


def sample_digests(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    # Plain tensors should be equal on all ranks, but hashing them in full would take longer than writing them: a
    # checksum of the first and the last bytes must do.
    found: dict[str, str] = {}
    for name, leaf in leaves.items():
        # Reading from a GPU would wait for all kernels that are queued there.
        if isinstance(leaf, ShardedLeaf) or not leaf.nbytes or (leaf.is_torch and leaf.array.device.type != "cpu"):
            continue
        count = min(leaf.nbytes, _SAMPLE_BYTES // leaf.dtype.itemsize * leaf.dtype.itemsize)
        sample = np.empty(2 * count, np.uint8)
        leaf.read(0, count, sample[:count])
        leaf.read(leaf.nbytes - count, leaf.nbytes, sample[count:])
        found[name] = xxhash.xxh3_64_hexdigest(sample.data)
    return found


def warn_of_differing(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Warn of plain tensors that differ between ranks: only the values of one rank are stored."""
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
        warn_caller(StateMismatchWarning(text))


# Who writes what.

# A box that several ranks have is split among them into row ranges of at least this many bytes.
SPLIT_BYTES = 64 * 1024**2


class WriteAssignment(NamedTuple):
    """The rows ``start:stop`` of a box, which one rank writes; a scalar is one row."""

    name: str
    box: BoxKey
    start: int
    stop: int


def assign(merged: MergedTensors, ranks: int, own: int) -> list[WriteAssignment]:
    """Return what rank ``own`` writes, so that every box is written once and all ranks write about the same bytes."""
    # Every rank computes the same answer without an exchange.
    # Boxes with one owner come first: they decide how much the other boxes must balance.
    load = [0] * ranks
    assignments: list[WriteAssignment] = []
    shared: list[tuple[int, list[int], WriteAssignment]] = []
    for name, boxes in merged.boxes.items():
        tensor = merged.tensors[name]
        itemsize, dimensions = BY_NAME[tensor.dtype].itemsize, len(tensor.shape)
        for box, owners in boxes.items():
            sizes = box[dimensions:]
            nbytes = prod(sizes) * itemsize
            rows = sizes[0] if sizes else 1
            if len(owners) == 1:
                load[owners[0]] += nbytes
                if owners[0] == own:
                    assignments.append(WriteAssignment(name, box, 0, rows))
                continue
            count = max(1, min(len(owners), nbytes // SPLIT_BYTES, rows))
            for start, stop in pairwise(rows * number // count for number in range(count + 1)):
                shared.append((nbytes // rows * (stop - start), owners, WriteAssignment(name, box, start, stop)))
    # The largest first, each to the rank with the least bytes so far. Ties go to the lowest rank, and the sort is
    # stable: every save of the same state assigns alike.
    for nbytes, owners, assignment in sorted(shared, key=lambda each: -each[0]):
        writer = min(owners, key=lambda rank: (load[rank], rank))
        load[writer] += nbytes
        if writer == own:
            assignments.append(assignment)
    order = {name: number for number, name in enumerate(merged.tensors)}
    return sorted(assignments, key=lambda each: (order[each.name], each.box, each.start))


def own_pieces(assignments: Sequence[WriteAssignment], leaves: Mapping[str, Leaf]) -> list[TensorShard]:
    pieces: list[TensorShard] = []
    by_box: dict[str, dict[BoxKey, TensorShard]] = {}
    for each in assignments:
        if each.name not in by_box:
            by_box[each.name] = {(*piece.offsets, *piece.shape): piece for piece in shards_of(leaves[each.name])}
        piece = by_box[each.name][each.box]
        is_full = not piece.shape or (each.start, each.stop) == (0, piece.shape[0])
        # A view: nothing is copied here.
        pieces.append(piece if is_full else piece.rows(each.start, each.stop))
    return pieces


# The exchange.


@dataclass(frozen=True, slots=True)
class SharedState:
    ranks: GroupCoordinator
    flat: Flat[FullTensor]
    layouts: Mapping[str, str]
    pieces: list[TensorShard]

    def own_flat(self) -> Flat[TensorShard]:
        """Return the pieces of this rank as a state with numbers as names, for code that only looks at bytes."""
        leaves = {str(number): piece for number, piece in enumerate(self.pieces)}
        return Flat(None, leaves, {}, {name: ("state", name) for name in leaves})


def merge_rank_states(ranks: GroupCoordinator, flat: Flat[Leaf], arguments: Mapping[str, Any]) -> SharedState:
    """Collective. Raises RanksDisagreeError on all ranks if one of ``arguments``, a tensor or a plain value differs."""
    outline = RankOutline.of_state(flat)
    # A training run saves the same tensors again and again: the last merge is reused if no rank has changed.
    known = ranks.remembered
    samples = sample_digests(flat.leaves)
    # One small exchange of digests. What differs, or is new since the last save, is exchanged in full after it.
    own = [digest_of(each) for each in (arguments, samples, outline.tensors, outline.boxes, flat.skeleton)]
    received = ranks.gather([*own, known.get("outlines", "")], PREPARING)
    by_arguments, by_samples, by_tensors, by_boxes, by_skeleton, by_known = zip(*received, strict=True)
    if len({*by_arguments}) > 1:
        _refuse_arguments(ranks.gather(dict(arguments), PREPARING))
    if len({*by_samples}) > 1:
        warn_of_differing(ranks.gather(samples, PREPARING))
    outlines = digest_of([by_tensors, by_boxes])
    # All ranks reuse the last merge, or none does: a rank that was interrupted in the last save may not remember it.
    if {*by_known} != {outlines}:
        # Of ranks with the same tensors, only the first sends them.
        is_first = by_tensors.index(by_tensors[ranks.rank]) == ranks.rank
        sent = ranks.gather(outline.tensors if is_first else None, PREPARING, of=Tensors | None)
        boxes = ranks.gather(outline.boxes, PREPARING, of=list[list[BoxKey]])
        tensors = [sent[by_tensors.index(digest)] for digest in by_tensors]
        merged = merge_tensors([RankOutline(*each) for each in zip(tensors, boxes, strict=True)])
        known["assignments"] = assign(merged, ranks.size, ranks.rank)
        # Without the boxes, which would be most of what a rank remembers.
        known["merged"] = msgspec.structs.replace(merged, boxes={})
        known["outlines"] = outlines
    merged_tensors: MergedTensors = known["merged"]
    skeleton = flat.skeleton
    if len({*by_skeleton}) > 1:
        skeleton = merge_skeletons(ranks.gather(skeleton, PREPARING))
    layouts = {name: tensor.layout for name, tensor in merged_tensors.tensors.items() if tensor.layout}
    pieces = own_pieces(known["assignments"], flat.leaves)
    return SharedState(ranks, merged_tensors.flat(skeleton), layouts, pieces)


def _refuse_arguments(given: list[dict[str, Any]]) -> None:
    for rank, arguments in enumerate(given):
        for name, value in arguments.items():
            if value != given[0].get(name):
                text = f"{name} is {given[0].get(name)!r} on rank 0, and {value!r} on rank {rank}"
                raise RanksDisagreeError(text, remedy="call it with the same arguments on all ranks")


# The save: rank 0 makes the staging folder, every rank writes its part, rank 0 publishes them.


class GroupSaveCoordinator:
    """A `SaveCoordinator`: a rank that is killed before its report ends the save on all ranks."""

    def __init__(self, shared: SharedState, destination: Path, settings: WriteSettings) -> None:
        self.rank, self.size = shared.ranks.rank, shared.ranks.size
        self.ticket = shared.ranks.ticket()
        # Stored and new bytes of all ranks; rank 0 computes them and sends them to the others.
        self.totals: tuple[int, int] = 0, 0
        self._channel = shared.ranks.writer
        self._shared = shared
        self._destination = destination
        self._settings = settings
        self._commit: PendingCommit | None = None  # of rank 0
        self._plan: Root | None = None
        self._ended = False

    def begin(self) -> tuple[Path, str]:
        """Return the staging folder and the id of the save; collective."""
        # The exchanges of two saves on one channel would mix.
        self.ticket.wait()
        staged = self._stage() if self.rank == 0 else None
        folder, save = self._channel.gather(staged, f"beginning to save {self._destination}")[0]
        return as_path(folder), save

    def _stage(self) -> tuple[str, str]:
        """Make the staging folder and write the plan of the save into it; in a store, only check the destination."""
        destination = self._destination
        # The ranks of an earlier save may have been killed when only the last rename was missing. That save is
        # published first. The commit would remove it as abandoned.
        if not storage_of(destination).remote:
            finish_saves(absolute(destination).parent)
        commit = self._commit = commit_to(
            destination, overwrite=self._settings.overwrite
        ).__enter__()  # left in `_leave`
        # An elastic run that was restarted must not take files of its earlier attempt for new ones.
        save = f"{commit.save_id or secrets.token_hex(8)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        shared = self._shared
        self._plan = plan_root(shared.flat, self._settings, save=save, ranks=self.size, layouts=shared.layouts)
        if commit.is_staged:
            write_plan(commit, self._plan)
        else:
            # No save may succeed that no load accepts.
            with as_a_reader():
                check_plan(self._plan, destination)
        return str(commit.path), save

    def finish(self, report: FragmentReport) -> None:
        """Publish the checkpoint, once the parts of all ranks are durable; collective."""
        reports = self._channel.gather(report, "writing its part", of=FragmentReport, to_main=True)
        # Rank 0 believes the reports: on a network file system it may not see the files of other ranks yet.
        # Each report says that the files of one rank are durable. Only now may a manifest name them.
        totals = sum(each.stored_bytes for each in reports), sum(each.new_bytes for each in reports)
        commit, plan = self._commit, self._plan
        if commit is not None and plan is not None:
            # Rank 0 alone renames the folder, or puts the manifest: the one step that makes the checkpoint visible.
            if commit.is_staged:
                # If rank 0 is killed here, the folder has all fragments and the plan: the next save publishes it.
                write_root(commit.path, plan, reports)
                commit.publish()
            else:
                commit.publish(root_content(self._destination / FILE_NAME, plan, reports))
            self._leave()
        self._end(totals)

    def _end(self, totals: tuple[int, int]) -> None:
        """Wait until rank 0 has published the checkpoint, and receive the totals."""
        try:
            self.totals = tuple(self._channel.gather(totals, "making the checkpoint visible")[0])
        except RanksDisagreeError as error:
            if error is not self._channel.connection.lost:
                raise
            # A rank is gone, perhaps rank 0, before or after it published the checkpoint: this rank cannot know.
            self._ended = True
            in_store = storage_of(self._destination).remote
            otherwise = "save again" if in_store else "the next save there finishes it first"
            text = f"{error.message}, when all ranks had written their parts"
            remedy = f"load it to see whether it is the new checkpoint; if not, {otherwise}"
            raise RanksDisagreeError(text, path=self._destination, remedy=remedy) from error
        self._ended = True

    def fail(self, error: BaseException) -> None:
        """End the save on all ranks, unless it has ended, and remove the staging folder."""
        if self._ended:
            return
        self._ended = True
        try:
            # The other ranks are still in the exchanges of earlier saves.
            self.ticket.wait()
            self._channel.report(error, "saving")
        finally:
            self._leave()

    def _leave(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            # Unlocks the staging folder, and removes it unless it was published.
            commit.__exit__()


class CollectiveWrite(ShardedWrite):
    """Writes one rank's part of a checkpoint. If that fails on one rank, the save fails on all ranks."""

    def __init__(self, shared: SharedState, destination: Path, settings: WriteSettings) -> None:
        self._group_save = GroupSaveCoordinator(shared, destination, settings)
        super().__init__(shared.pieces, shared.flat.parts, destination, settings, self._group_save)

    def enqueue(self) -> None:
        """Queue the save behind the earlier saves of the group; all ranks call this in the same order."""
        self._group_save.ticket.enqueue()

    def _write(self) -> WriteResult:
        try:
            result = super()._write()
        except BaseException as error:
            self._group_save.fail(error)
            raise
        finally:
            self._group_save.ticket.release()
        stored, new = self._group_save.totals
        return replace(result, stored_bytes=stored, new_bytes=new)

    def abandon(self) -> None:
        super().abandon()
        # `fail` does nothing unless the save was never begun.
        try:
            self._group_save.fail(Cancelled("the save was abandoned before it began"))
        finally:
            self._group_save.ticket.release()
