"""What the ranks say of their states before a save, and the one state that they have together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import msgspec
import xxhash

from tensorkeep.errors import RanksDisagreeError
from tensorkeep.formats.base import AliasRecord
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.leaf import LEAF_KINDS, Leaf
from tensorkeep.state.sharded import ShardedLeaf, shards_of
from tensorkeep.state.skeleton import decode_bytes
from tensorkeep.state.tree import Flat, child_nodes, node_key_text, node_tag, with_children
from tensorkeep.storage.direct_io import Bytes

BoxKey = tuple[int, ...]
"""A box of a tensor: its offsets, then its sizes."""


class TensorOutline(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor of a rank: its name, part and key, dtype, full shape, and layout.

    The layout is that of a DTensor as text, and empty for a plain tensor.
    """

    name: str
    part: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    layout: str

    @property
    def nbytes(self) -> int:
        """Raw bytes of the full tensor."""
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


class Tensors(msgspec.Struct, frozen=True):
    """The tensors of a rank, in the order of its state, and those that are views of others.

    They are usually the same on all ranks, of which one sends them.
    """

    tensors: list[TensorOutline]
    aliases: dict[str, AliasRecord]


class RankOutline(NamedTuple):
    """The tensors of a rank, and the boxes that it has of each of them."""

    tensors: Tensors
    boxes: list[list[BoxKey]]

    @classmethod
    def of_state(cls, flat: Flat[Leaf]) -> "RankOutline":
        """Return the outline of a state that was taken apart."""
        tensors = [
            TensorOutline(
                name,
                *flat.parts[name],
                leaf.dtype.name,
                leaf.shape,
                leaf.layout if isinstance(leaf, ShardedLeaf) else "",
            )
            for name, leaf in flat.leaves.items()
        ]
        aliases = {name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()}
        boxes = [[(*piece.offsets, *piece.shape) for piece in shards_of(leaf)] for leaf in flat.leaves.values()]
        return cls(Tensors(tensors, aliases), boxes)


def digest_of(value: object) -> str:
    """Return the checksum of plain values."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(value))


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A tensor that several ranks have together: a `tensorkeep.state.leaf.Source` that cannot be read."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int

    def host_bytes(self) -> Bytes | None:
        return None

    def read(self, start: int, stop: int, out: Bytes) -> None:
        raise AssertionError(f"{self.name} is not in this process as a whole")


class MergedTensors(msgspec.Struct, frozen=True):
    """The tensors of all ranks: each once, and for each the boxes with the ranks that have them.

    ``boxes`` has the boxes of each tensor, with the ranks that have them.
    """

    tensors: dict[str, TensorOutline]
    aliases: dict[str, AliasRecord]
    boxes: dict[str, dict[BoxKey, list[int]]]

    def flat(self, skeleton: object) -> Flat[FullTensor]:
        """Return the state of all ranks together, which has this structure and these plain values."""
        leaves = {
            name: FullTensor(name, BY_NAME[each.dtype], each.shape, each.nbytes) for name, each in self.tensors.items()
        }
        parts = {name: (each.part, each.key) for name, each in self.tensors.items()}
        parts |= {name: (each.part, each.key) for name, each in self.aliases.items()}
        return Flat(skeleton, leaves, {name: each.alias() for name, each in self.aliases.items()}, parts)


def merge_tensors(outlines: Sequence[RankOutline]) -> MergedTensors:
    """Return the tensors that the ranks have together.

    Raises RanksDisagreeError, on all ranks alike, for a tensor that differs between two ranks in what must be the same,
    or whose boxes are not the full tensor.
    """
    tensors: dict[str, tuple[int, TensorOutline]] = {}
    aliases: dict[str, tuple[int, AliasRecord]] = {}
    boxes: dict[str, dict[BoxKey, list[int]]] = {}
    known: Tensors | None = None
    for rank, outline in enumerate(outlines):
        if outline.tensors is not known:
            known = outline.tensors
            _add(rank, known, tensors, aliases)
            in_order = [boxes.setdefault(tensor.name, {}) for tensor in known.tensors]
        for own, of_all in zip(outline.boxes, in_order, strict=True):
            for box in own:
                of_all.setdefault(box, []).append(rank)
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
    rank: int,
    own: Tensors,
    tensors: dict[str, tuple[int, TensorOutline]],
    aliases: dict[str, tuple[int, AliasRecord]],
) -> None:
    """Add the tensors of a rank to those of the ranks before it, with which they must agree."""
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
        raise RanksDisagreeError(
            f"its {field} is {_text(value)} on rank {rank}, and {_text(other)} on rank {other_rank}",
            name=name,
            remedy="give all ranks the same state, apart from what they have of each DTensor",
        )


def _text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _check_complete(tensor: TensorOutline, boxes: Iterable[BoxKey]) -> None:
    """Refuse boxes that leave gaps; the writer of the manifest finds boxes that overlap."""
    count = len(tensor.shape)
    covered, full = sum(prod(box[count:]) for box in boxes), prod(tensor.shape)
    if covered != full:
        layout = f" ({tensor.layout})" if tensor.layout else ""
        raise RanksDisagreeError(
            f"the ranks have {covered:,} of its {full:,} elements{layout}",
            name=tensor.name,
            remedy="give the group of all ranks that have a part of it",
        )


def merge_skeletons(skeletons: Sequence[Any]) -> Any:
    """Return the structure and plain values that the ranks have together: dicts with the keys of all of them.

    Raises RanksDisagreeError, on all ranks alike, for a value that differs between two ranks.
    """
    return _merged(list(enumerate(skeletons)), "")


def _merged(nodes: list[tuple[int, Any]], name: str) -> Any:
    """Return one node for those of some ranks at one place of the state."""
    first, node = nodes[0]
    # Encoded, because 1, True and 1.0 are equal.
    encoded = msgspec.json.encode(node)
    if all(msgspec.json.encode(other) == encoded for _, other in nodes[1:]):
        return node
    tag = node_tag(node)
    for rank, other in nodes[1:]:
        if node_tag(other) != tag or child_nodes(node) is None:
            raise _differing(name, first, node, rank, other)
    children: dict[str, tuple[Any, list[tuple[int, Any]]]] = {}
    for rank, other in nodes:
        for key, child in child_nodes(other) or ():
            children.setdefault(repr(key), (key, []))[1].append((rank, child))
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
