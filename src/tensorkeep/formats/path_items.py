"""A state as a list of tensors and plain values under paths of keys, for DCP and T5X."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from tensorkeep.errors import UnsupportedError
from tensorkeep.state.leaf import LEAF_KINDS, Source
from tensorkeep.state.tree import Flat, child_nodes, node_key_text, node_tag, unflatten

Path = tuple[str | int, ...]

_DICTS = frozenset(("dict", "items", "ordered", "ordered_items", "counter"))
_LISTS = frozenset(("list", "tuple"))
_PLAIN = (type(None), bool, int, float, str)
_LONGEST_INTEGER = 2**2000
"""Torch's restricted unpickler does not read larger integers."""


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the checkpoint: a tensor (``leaf``) or a plain value, by the name under which other tools find it.

    Its path is as DCP stores it: the keys of dicts as text, positions in lists as numbers.
    """

    name: str
    path: Path
    leaf: bool
    value: Any = None


def items_of(flat: Flat[Source]) -> list[Item]:
    """Return the entries of a state, in its order."""
    walked = list(_walk(flat.skeleton, (), in_value=False))
    # A plain value with the name of a tensor is left out.
    taken = {item.name for item in walked if item.leaf}
    found: dict[str, Item] = {}
    for item in walked:
        if item.leaf and _is_stored(item.name, flat):
            natural = item.path and ".".join(map(str, item.path)) == item.name
            found[item.name] = item if natural else Item(item.name, (item.name,), True)
        elif not item.leaf and item.name not in taken:
            found.setdefault(item.name, item)
    return list(found.values())


def _is_stored(name: str, flat: Flat[Source]) -> bool:
    """Return whether a tensor gets an entry: a view does as well, unless it has more elements than the stored one."""
    alias = flat.aliases.get(name)
    return alias is None or prod(alias.shape) <= prod(flat.leaves[alias.of].shape)


def _walk(node: Any, path: Path, *, in_value: bool) -> Iterator[Item]:
    """Yield the entries below a node; as in DCP, dicts are entered, and lists if they hold dicts or tensors."""
    tag = node_tag(node)
    if tag in LEAF_KINDS:
        yield Item(node[tag], path, True)
        return
    children = child_nodes(node)
    enters = not in_value and (tag in _DICTS or (tag in _LISTS and _holds_more(node)))
    if not enters and not in_value and path and (value := _plain(node)) is not _NONE:
        yield Item(".".join(map(str, path)), path, False, value)
    for key, child in children or ():
        text = key if tag in _LISTS else node_key_text(key)
        yield from _walk(child, (*path, text), in_value=in_value or not enters)


def _holds_more(node: Any) -> bool:
    tag = node_tag(node)
    return tag in LEAF_KINDS or tag in _DICTS or any(_holds_more(child) for _, child in child_nodes(node) or ())


_NONE = object()


def _plain(node: Any) -> Any:
    """Return a node's plain value if torch's restricted unpickler can read it, else `_NONE`."""
    try:
        value = unflatten(node, {})
    except (ValueError, UnsupportedError):
        return _NONE
    return value if _is_plain(value) else _NONE


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is int:
        return abs(value) < _LONGEST_INTEGER
    if type(value) is str:
        return value.isprintable() or value.encode("utf-8", "ignore").decode() == value
    return type(value) in _PLAIN
