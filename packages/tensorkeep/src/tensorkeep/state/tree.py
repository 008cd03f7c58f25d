"""Nested state <-> skeleton and named leaves. Shared storage is shared again; an object in two places becomes two."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from tensorkeep.errors import UnsupportedLeafError, warn_caller
from tensorkeep.placeholder import Placeholder
from tensorkeep.state import names
from tensorkeep.state.aliases import Alias, find_aliases
from tensorkeep.state.leaf import LEAF_KINDS, Array, Leaf, Source
from tensorkeep.state.names import KeyPath
from tensorkeep.state.skeleton import LeafSpec, SkeletonReader, SkeletonWriter, StateLeaf, decode_key

S_co = TypeVar("S_co", bound=Source, covariant=True)


@dataclass(frozen=True)
class Flat(Generic[S_co]):
    skeleton: object  # the structure and the plain values, as JSON
    leaves: Mapping[str, S_co]  # to store, in traversal order
    aliases: dict[str, Alias]  # the leaves that are views of stored ones
    parts: dict[str, tuple[str, str]]  # the part of every leaf, aliases included, and its name relative to the part


def flatten(state: object, writer: SkeletonWriter | None = None) -> Flat[Leaf]:
    """Split a nested state into its skeleton and its leaves, without a copy; ``writer`` decides what may be in it.

    >>> import numpy as np
    >>> flatten({"model": {"w": np.zeros((2, 3), np.float32)}, "step": 7}).skeleton
    {'dict': {'model': {'dict': {'w': {'ndarray': 'model.w'}}}, 'step': 7}}
    """
    writer = writer or SkeletonWriter()
    skeleton, found, paths = _encode(state, writer)
    if writer.attributes:
        name, own = next(iter(writer.attributes.items()))
        others = f" and of {len(writer.attributes) - 1} other tensors" if len(writer.attributes) > 1 else ""
        text = f"attributes of tensors are not saved: {', '.join(own)} of {name!r}{others}"
        warn_caller(f"{text}; put them into the state")
    aliases = find_aliases([one.leaf for one in found])
    assigned = [one.leaf.name for one in found]
    is_dict = node_tag(skeleton) in (*_MAPPINGS, *_PAIRS)
    parts = names.assign_parts(paths, assigned, is_dict=is_dict)
    stored = {one.leaf.name: one.leaf for one in found if one.leaf.name not in aliases}
    return Flat(skeleton, stored, aliases, parts)


def state_leaves(state: object, writer: SkeletonWriter | None = None) -> dict[str, StateLeaf]:
    """Return every leaf by its name, also those that share another leaf's storage. Raises UnsupportedLeafError."""
    return {one.leaf.name: one for one in _encode(state, writer or SkeletonWriter())[1]}


def _encode(state: object, writer: SkeletonWriter) -> tuple[object, list[StateLeaf], list[KeyPath]]:
    skeleton = writer.encode(state, ())
    paths = writer.named_paths()
    assigned = names.assign_names(paths)
    taken: set[str] = set()
    # The names depend on all paths, so they are filled in when the encoding is over.
    for one, name in zip(writer.leaves, assigned, strict=True):
        if name in taken:
            text = "several tensors have this name, because NaN is several keys of one dict"
            raise UnsupportedLeafError(text, name=names.display(one.path), remedy="give them keys that differ")
        taken.add(name)
        one.leaf.name = name
        one.node[one.leaf.kind] = name
    return skeleton, writer.leaves, paths


def unflatten(
    skeleton: object, values: Mapping[str, Array], *, as_is: Collection[str] = (), makes_objects: bool = True
) -> Any:
    """Rebuild a state from a skeleton, which may come from a file. Raises ValueError or UnsupportedError."""
    return SkeletonReader(values, as_is=as_is, makes_objects=makes_objects).decode(skeleton)


def leaf_paths(skeleton: object, path: KeyPath = ()) -> Iterator[tuple[str, KeyPath]]:
    """Yield the name of each leaf of a valid skeleton, with the keys that lead to it."""
    tag = node_tag(skeleton)
    if tag in LEAF_KINDS:
        yield skeleton[tag], path  # type: ignore[index]  # a leaf is a dict
    for key, child in child_nodes(skeleton) or ():
        yield from leaf_paths(child, (*path, decode_key(key)))


def renamed(flat: Flat[S_co], found: Mapping[str, str]) -> Flat[S_co]:
    """Return the same state with other names for some leaves; ``found`` maps old names to new ones."""

    def rename(node: Any) -> Any:
        tag = node_tag(node)
        if tag in LEAF_KINDS:
            return {**node, tag: found.get(node[tag], node[tag])}
        children = child_nodes(node)
        return node if children is None else with_children(node, [(key, rename(child)) for key, child in children])

    return Flat(
        rename(flat.skeleton),
        {found.get(name, name): leaf for name, leaf in flat.leaves.items()},
        {found.get(k, k): replace(alias, of=found.get(alias.of, alias.of)) for k, alias in flat.aliases.items()},
        {found.get(name, name): part for name, part in flat.parts.items()},
    )


def named_by_keys(flat: Flat[S_co]) -> Flat[S_co]:
    """Return the same state with the names that its keys give, as formats need that other tools read by keys."""
    saved = dict(leaf_paths(flat.skeleton))
    by_keys = dict(zip(saved, names.assign_names([*saved.values()]), strict=True))
    return renamed(flat, {name: key for name, key in by_keys.items() if name != key})


def leaf_specs(skeleton: object) -> dict[str, LeafSpec]:
    """Check a whole skeleton and return its leaves, in order. Raises ValueError if any node is malformed."""
    reader = SkeletonReader(None)
    reader.decode(skeleton)
    return reader.leaf_specs


def prune(skeleton: object, selected: Collection[str], *, placeholders: bool = False) -> object:
    """Keep the selected leaves: a dict loses empty containers, None replaces them elsewhere. Raises ValueError."""
    # The functions below rely on a valid skeleton, and this one may come from a file.
    leaf_specs(skeleton)
    kept = selected if isinstance(selected, set | frozenset | Mapping) else set(selected)
    pruned = _prune(skeleton, kept, placeholders)[0]
    return None if pruned is _REMOVED else pruned


# Takes the place of a placeholder while its container is pruned.
_REMOVED = object()


def _prune(node: Any, kept: Collection[str], placeholders: bool) -> tuple[Any, bool, bool]:
    """Return the pruned node, whether it had leaves, and whether it still has any."""
    tag = node_tag(node)
    if tag in LEAF_KINDS:
        keeps = node[tag] in kept
        return (node if keeps else None), True, keeps
    children = child_nodes(node)
    if children is None:
        return (_REMOVED if tag == "placeholder" and not placeholders else node), False, False
    pruned = [(key, *_prune(child, kept, placeholders)) for key, child in children]
    had, has = any(child[2] for child in pruned), any(child[3] for child in pruned)
    # A key can be removed; a position in a list or a field of an object cannot.
    if tag in (*_MAPPINGS, *_PAIRS):
        pruned = [child for child in pruned if (child[3] or not child[2]) and child[1] is not _REMOVED]
    remaining = [
        (key, child if child is not _REMOVED and (has_some or not had_some) else None)
        for key, child, had_some, has_some in pruned
    ]
    return with_children(node, remaining), had, has


class PlainValue(NamedTuple):
    """The content of one place of a state: a plain value, a leaf or a container."""

    name: str
    kind: str  # "plain", "tensor", "list", "tuple"...
    node: Any  # of a plain value; the kind of everything else
    is_content: bool  # a plain value or an empty container: its absence elsewhere is a difference

    def equals(self, other: "PlainValue") -> bool:
        # As JSON text: ``1``, ``1.0`` and ``True`` are equal in Python, and NaN is not equal to itself.
        return self.kind == other.kind and json.dumps(self.node) == json.dumps(other.node)


def placeholders(skeleton: object) -> list[Placeholder]:
    if node_tag(skeleton) == "placeholder":
        return [unflatten(skeleton, {})]
    return [found for _, child in child_nodes(skeleton) or () for found in placeholders(child)]


def shown_values(skeleton: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values of a valid skeleton by name, as users see them: a list of plain values is one value."""
    tag, children = node_tag(skeleton), child_nodes(skeleton)
    if tag in LEAF_KINDS or tag == "placeholder":
        return
    if children is None:
        yield name, value_of(skeleton)
    elif tag in ("list", "tuple", "deque") and all(_is_plain(child) for _, child in children):
        yield name, [value_of(child) for _, child in children]
    else:
        for key, child in children:
            text = node_key_text(key)
            yield from shown_values(child, f"{name}.{text}" if name else text)


def _is_plain(node: Any) -> bool:
    return child_nodes(node) is None and node_tag(node) not in (*LEAF_KINDS, "placeholder")


def value_of(node: Any) -> Any:
    """Return the plain value of a node as the state has it; an enum by its name, because its class may be missing."""
    if not isinstance(node, dict):
        return node
    if "enum" in node:
        name, member = node["enum"]
        return f"{name.replace(':', '.')}.{member}"
    return unflatten(node, {})


def plain_values(skeleton: object) -> dict[tuple[str, ...], PlainValue]:
    """Return the value at each path of keys. Keys are in JSON, so that ``1``, ``True`` and ``"1"`` differ."""
    found: dict[tuple[str, ...], PlainValue] = {}
    _collect(skeleton, (), "", found)
    return found


# Equal kinds: an OrderedDict is a dict, whatever its keys, and a parameter is a tensor.
_KINDS = {
    "items": "dict",
    "ordered": "dict",
    "ordered_items": "dict",
    "parameter": "tensor",
    "object": "registered object",
}


def _collect(node: Any, path: tuple[str, ...], name: str, found: dict[tuple[str, ...], PlainValue]) -> None:
    tag = node_tag(node)
    children = child_nodes(node)
    if children is None and tag not in LEAF_KINDS:
        if tag in ("set", "frozenset"):
            # The order of a set changes from process to process.
            node = {tag: sorted(node[tag], key=json.dumps)}
        kind = "placeholder" if tag == "placeholder" else "plain"
        found[path] = PlainValue(name, kind, node, True)
        return
    assert tag is not None  # a scalar is a plain value
    kind = _KINDS.get(tag, tag)
    if tag in _FIELDS:
        kind = f"{kind} {node[tag][0]}"
    found[path] = PlainValue(name, kind, kind, children == [])
    for key, child in children or ():
        text = node_key_text(key)
        _collect(child, (*path, json.dumps(key)), f"{name}.{text}" if name else text, found)


# Nodes that have children, by the form of the children.
_MAPPINGS = ("dict", "ordered")
_PAIRS = ("items", "ordered_items", "counter")
_FIELDS = ("namedtuple", "object")


def node_tag(node: Any) -> str | None:
    """``"list"`` for a list, None for scalars."""
    return "list" if isinstance(node, list) else next(iter(node)) if isinstance(node, dict) else None


# Nodes that the first versions did not have. A format notes that it has them, for its older readers.
_LATER = ("path", "datetime", "date", "time", "timedelta", "slice", "deque")


def has_later_nodes(skeleton: object) -> bool:
    if node_tag(skeleton) in _LATER:
        return True
    inside = [child for _, child in child_nodes(skeleton) or ()]
    if isinstance(skeleton, dict):
        inside.append(skeleton.get("_metadata"))
    return any(has_later_nodes(child) for child in inside if isinstance(child, dict | list))


def child_nodes(node: Any) -> list[tuple[Any, Any]] | None:
    """None for a leaf or a plain value."""
    tag = node_tag(node)
    if tag in _MAPPINGS:
        return list(node[tag].items())
    if tag in _FIELDS:
        return list(node[tag][1].items())
    if tag in _PAIRS:
        return [(key, child) for key, child in node[tag]]
    if tag == "deque":
        return list(enumerate(node[tag][1]))
    return list(enumerate(node if tag == "list" else node[tag])) if tag in ("list", "tuple") else None


def node_key_text(key: Any) -> str:
    """The text of a key from `child_nodes`, which may be a node itself, such as ``{"int": "0x..."}``."""
    if isinstance(key, dict):
        (value,) = key.values()
        return names.key_text(decode_key(key) if isinstance(value, list) else value)
    return names.key_text(key)


def with_children(node: Any, children: list[tuple[Any, Any]]) -> Any:
    tag = node_tag(node)
    if tag in _MAPPINGS:
        return {**node, tag: dict(children)}
    if tag in _FIELDS:
        return {tag: [node[tag][0], dict(children)]}
    if tag in _PAIRS:
        return {**node, tag: [list(pair) for pair in children]}
    values = [child for _, child in children]
    if tag == "deque":
        return {tag: [node[tag][0], values]}
    return values if tag == "list" else {tag: values}
