"""What a rank's save plan of DCP stores: boxes of tensors, and plain values without pickles.

DCP flattens a state to names joined by dots. Its planners keep the keys that lead to each name, from which the nested
state is built again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from tensorkeep.checkpoint.ranks.outline import FullTensor
from tensorkeep.errors import RanksDisagreeError, UnsupportedLeafError
from tensorkeep.state import names
from tensorkeep.state.dtypes import BY_NAME, DType, check_torch
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.names import Path
from tensorkeep.state.sharded import Piece
from tensorkeep.state.skeleton_writer import SkeletonWriter
from tensorkeep.state.tree import Flat


@dataclass(slots=True)
class RankState:
    """What one rank stores.

    ``nodes`` has the nodes of plain values in the skeleton, and ``inner`` the arrays and tensors in them. ``dtypes``
    are those of the tensors, of which other ranks may have boxes as well.
    """

    pieces: list[Piece] = field(default_factory=list)
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, tuple[str, tuple[int, ...], tuple[str, str]]] = field(default_factory=dict)


def state_of_plan(plan: SavePlan, planner: SavePlanner) -> RankState:
    """Return what a rank's plan stores.

    Raises UnsupportedLeafError for a value that cannot be stored, or a tensor that is not what the plan says.
    """
    paths = _paths(plan.planner_data, [item.index.fqn for item in plan.items])
    found = RankState(parts=_parts(paths))
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            _add_value(found, item.index.fqn, _value(planner, item), paths[item.index.fqn])
        else:
            _add_tensor(found, item, planner)
    own = {piece.name for piece in found.pieces}
    found.parts = {name: part for name, part in found.parts.items() if name in own}
    return found


def _paths(planner_data: Any, keys: Iterable[str]) -> dict[str, Path]:
    """Return the keys that lead to each flat name; those of planners that do not flatten are the names themselves."""
    known = planner_data if isinstance(planner_data, dict) else {}
    return {**known, **{key: known.get(key, (key,)) for key in keys}}


def _parts(paths: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
    return names.assign_parts(list(paths.values()), list(paths), is_dict=True)


def _add_tensor(found: RankState, item: WriteItem, planner: SavePlanner) -> None:
    name, tensor, data = item.index.fqn, planner.resolve_data(item).detach(), item.tensor_data
    leaf = Leaf.of(name, tensor)
    assert leaf is not None and data is not None
    expected = check_torch(name, data.properties.dtype), tuple(data.chunk.sizes)
    if (leaf.dtype, leaf.shape) != expected:
        raise UnsupportedLeafError(
            f"the plan says {expected[0]} {list(expected[1])}, and the planner gives {leaf.dtype} {list(leaf.shape)}",
            name=name,
            remedy="let the planner change the plan as it changes the tensor",
        )
    found.dtypes[name] = leaf.dtype.name
    if leaf.nbytes:
        whole, offsets = tuple(data.size), tuple(data.chunk.offsets)
        found.pieces.append(Piece(name, "tensor", leaf.dtype, leaf.array, whole=whole, offsets=offsets))


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UnsupportedLeafError(
            f"{type(planner).__name__} has no lookup_object, so that its plain values are known as pickles only",
            name=item.index.fqn,
            remedy="derive it from torch.distributed.checkpoint.DefaultSavePlanner",
        )
    return lookup(item.index)


def _add_value(found: RankState, key: str, value: Any, path: Path) -> None:
    writer = SkeletonWriter()
    found.nodes[key] = writer.encode(value, path)
    part, part_key = found.parts[key]
    for one in writer.leaves:
        rest = ".".join(map(names.key_text, one.path[len(path) :]))
        leaf, name = one.leaf, f"{key}.{rest}" if rest else key
        leaf.name = one.node[leaf.kind] = name
        place = part, f"{part_key}.{rest}" if rest else part_key
        if name in found.parts and name != key:
            raise UnsupportedLeafError(f"two tensors are named {name!r}", name=name, remedy="rename one of their keys")
        found.parts[name] = place
        found.inner[name] = leaf.dtype.name, leaf.shape, place
        if leaf.nbytes:
            found.pieces.append(Piece.of_leaf(leaf))


@dataclass(frozen=True, slots=True)
class RankDescription:
    """What the coordinator must know of one rank's state, as plain values."""

    dtypes: Mapping[str, str]
    nodes: Mapping[str, Any]
    inner: Mapping[str, tuple[str, tuple[int, ...], tuple[str, str]]]

    @classmethod
    def of_state(cls, state: RankState) -> "RankDescription":
        """Return what to send of a state."""
        return cls(state.dtypes, state.nodes, state.inner)


def merged_state(metadata: Metadata, ranks: Sequence[RankDescription]) -> Flat[FullTensor]:
    """Return the state that all ranks have together.

    Raises RanksDisagreeError if a tensor has different dtypes on two ranks.
    """
    entries = metadata.state_dict_metadata
    paths = {key: path for key, path in _paths(metadata.planner_data, entries).items() if key in entries}
    parts = _parts(paths)
    nodes: dict[str, Any] = {key: node for rank in ranks for key, node in rank.nodes.items()}
    leaves: dict[str, FullTensor] = {}
    for key in paths:
        entry = entries[key]
        if not isinstance(entry, BytesStorageMetadata):
            leaves[key] = _full(key, check_torch(key, entry.properties.dtype), entry.size)
            nodes[key] = {"tensor": key}
    _check_dtypes(leaves, ranks)
    for rank in ranks:
        for name, (dtype, shape, part) in rank.inner.items():
            leaves[name] = _full(name, BY_NAME[dtype], shape)
            parts[name] = part
    return Flat(_nested(paths, nodes), leaves, {}, {name: parts[name] for name in leaves})


def _full(name: str, dtype: DType, shape: Sequence[int]) -> FullTensor:
    return FullTensor(name, dtype, tuple(shape), prod(shape) * dtype.itemsize)


def _check_dtypes(leaves: Mapping[str, FullTensor], ranks: Sequence[RankDescription]) -> None:
    for number, rank in enumerate(ranks):
        for name, dtype in rank.dtypes.items():
            if dtype != leaves[name].dtype.name:
                raise RanksDisagreeError(
                    f"is {dtype} on rank {number}, and {leaves[name].dtype} on an earlier one",
                    name=name,
                    remedy="give all ranks the same state, apart from what they have of each DTensor",
                )


class _Container(dict[str | int, Any]):
    """A dict or a list that is built."""

    def node(self) -> Any:
        """Return its node in the skeleton; a list item that no rank has is None, as in torch."""
        built = {key: child.node() if isinstance(child, _Container) else child for key, child in self.items()}
        indices = [key for key in built if type(key) is int]
        if indices:
            return [built.get(index) for index in range(max(indices) + 1)]
        return {"dict": built}


def _nested(paths: Mapping[str, Path], nodes: Mapping[str, Any]) -> Any:
    """Return the skeleton of a state with these nodes at the ends of their paths."""
    root = _Container()
    for key, path in paths.items():
        container = root
        for step in path[:-1]:
            container = container.setdefault(step, _Container())  # type: ignore[arg-type]
        container[path[-1]] = nodes[key]  # type: ignore[index]
    return root.node()
