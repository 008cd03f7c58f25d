"""Nested states as flat items under paths of keys (text in dicts, numbers in lists), and back; for DCP and T5X."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from tensorkeep.errors import UnsupportedError
from tensorkeep.state.leaf import LEAF_KINDS, Source
from tensorkeep.state.tree import Flat, child_nodes, node_key_text, node_tag, unflatten

Path = tuple[str | int, ...]

_DICTS = frozenset(("dict", "items", "ordered", "ordered_items", "counter"))
_LISTS = frozenset(("list", "tuple"))
_PLAIN = (type(None), bool, int, float, str)
_LONGEST_INTEGER = 2**2000  # torch's restricted unpickler does not read larger integers
_MAX_GAPS = 10_000
# None is a plain value itself.
_NONE = object()


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a checkpoint: a tensor (``leaf``) or a plain value, named as other tools find it."""

    name: str
    path: Path
    leaf: bool
    value: Any = None


def items_of(flat: Flat[Source]) -> list[Item]:
    walked = list(_walk(flat.skeleton, (), in_value=False))
    # A plain value with the name of a tensor is left out.
    taken = {item.name for item in walked if item.leaf}
    found: dict[str, Item] = {}
    for item in walked:
        alias = flat.aliases.get(item.name)
        if item.leaf:
            # A view with more elements than its tensor, such as an expanded one, would grow when it is copied.
            if alias is not None and prod(alias.shape) > prod(flat.leaves[alias.of].shape):
                continue
            # Names are escaped where keys would make them ambiguous; such a name becomes one key.
            is_joined = item.path and ".".join(map(str, item.path)) == item.name
            found[item.name] = item if is_joined else Item(item.name, (item.name,), True)
        elif item.name not in taken:
            found.setdefault(item.name, item)
    return list(found.values())


def _walk(node: Any, path: Path, *, in_value: bool) -> Iterator[Item]:
    tag = node_tag(node)
    if tag in LEAF_KINDS:
        yield Item(node[tag], path, True)
        return
    children = child_nodes(node)
    # As in DCP: dicts are entered, and lists if they hold dicts or tensors.
    enters = not in_value and (tag in _DICTS or (tag in _LISTS and _holds_items(node)))
    if not enters and not in_value and path and (value := _plain(node)) is not _NONE:
        yield Item(".".join(map(str, path)), path, False, value)
    for key, child in children or ():
        text = key if tag in _LISTS else node_key_text(key)
        yield from _walk(child, (*path, text), in_value=in_value or not enters)


def _holds_items(node: Any) -> bool:
    tag = node_tag(node)
    return tag in LEAF_KINDS or tag in _DICTS or any(_holds_items(child) for _, child in child_nodes(node) or ())


def _plain(node: Any) -> Any:
    """Return the plain value of a node if torch's restricted unpickler can read it, else `_NONE`."""
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
        # A lone surrogate cannot be encoded.
        return value.isprintable() or value.encode("utf-8", "ignore").decode() == value
    return type(value) in _PLAIN


def nest(
    paths: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any], make_dict: Callable[[dict[Any, Any]], Any] = dict
) -> Any:
    """Return the values in nested dicts and lists, each at the end of its path; ``make_dict`` converts each dict.

    As in torch, an item of a list that no path leads to is None.

    >>> nest({"a.x": ("a", "x"), "b.1": ("b", 1)}, {"a.x": 5, "b.1": 6})
    {'a': {'x': 5}, 'b': [None, 6]}
    """
    root = _Node(is_list=False)
    for name, path in paths.items():
        node = root
        for key, following in pairwise(path):
            node = node.child(key, _Node(is_list=type(following) is int))
            if not isinstance(node, _Node):
                raise ValueError(f"{name!r} is inside another value")
        if path[-1] in node:
            raise ValueError(f"two values are at {name!r}")
        node.child(path[-1], values[name])
    # An index of 10**9 would make a list of that length.
    if root.gaps() > _MAX_GAPS:
        raise ValueError("lists lack most of their items")
    return root.build(make_dict)


# A dict or a list under construction. A class of its own, because a plain dict may be a value.
class _Node(dict[Any, Any]):
    def __init__(self, *, is_list: bool) -> None:
        self.is_list = is_list

    def child(self, key: Any, default: Any) -> Any:
        if self.is_list != (type(key) is int) or (type(key) is int and key < 0):
            raise ValueError(f"the key {key!r} is in a dict and in a list")
        return self.setdefault(key, default)

    def gaps(self) -> int:
        own = max(0, max(map(int, self)) + 1 - 4 * len(self)) if self.is_list else 0
        return own + sum(child.gaps() for child in self.values() if isinstance(child, _Node))

    def build(self, make_dict: Callable[[dict[Any, Any]], Any]) -> Any:
        built = {key: child.build(make_dict) if isinstance(child, _Node) else child for key, child in self.items()}
        return [built.get(index) for index in range(max(map(int, built)) + 1)] if self.is_list else make_dict(built)
