"""A skeleton without the leaves that were not asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tensorkeep.state.leaf import LEAF_KINDS
from tensorkeep.state.skeleton_reader import SkeletonReader


def prune(skeleton: object, selected: Collection[str]) -> object:
    """Return the skeleton of the selected leaves.

    A container that loses all its leaves goes: out of a dict with its key, elsewhere (lists, tuples, objects) None
    stands in its place. Plain values, and containers that never had a leaf, stay where the container around them does.
    The top of the state always stays.

    Parameters
    ----------
    skeleton : object
        A whole skeleton.
    selected : collection of str
        Names of the leaves to keep.

    Raises
    ------
    ValueError
        If the skeleton is malformed.
    """
    SkeletonReader(None).decode(skeleton)
    kept = selected if isinstance(selected, set | frozenset | dict) else set(selected)
    return _prune(skeleton, kept)[0]


def _prune(node: Any, kept: Collection[str]) -> tuple[Any, bool, bool]:
    """Return the pruned node, whether it had leaves, and whether it still has any."""
    shape = layout(node)
    if shape is None:
        return node, False, False
    if shape.leaf_name is not None:
        keeps = shape.leaf_name in kept
        return (node if keeps else None), True, keeps
    results = [(key, *_prune(child, kept)) for key, child in shape.items]
    had = any(result[2] for result in results)
    keeps = any(result[3] for result in results)
    left = [
        (key, child if keeps_some or not had_some else None)
        for key, child, had_some, keeps_some in results
        if keeps_some or not had_some or not shape.droppable
    ]
    return shape.rebuild(left), had, keeps


class Layout(NamedTuple):
    """A node as a container of others.

    Attributes
    ----------
    leaf_name : str or None
        The name, if the node is a leaf.
    items : list of (object, node)
        Each child with what identifies it in the container.
    rebuild : callable
        Makes the node again from such items.
    droppable : bool
        Whether a child can go without moving the others: dicts.
    """

    leaf_name: str | None
    items: list[tuple[Any, Any]]
    rebuild: Callable[[list[tuple[Any, Any]]], Any]
    droppable: bool


def layout(node: Any) -> Layout | None:
    """Return the layout of a valid node that is a leaf or a container; None for plain values."""
    if isinstance(node, list):
        return Layout(None, list(enumerate(node)), lambda items: [child for _, child in items], False)
    if not isinstance(node, dict):
        return None
    tag = next(iter(node))
    body = node[tag]
    if tag in LEAF_KINDS:
        return Layout(body, [], lambda items: node, False)
    if tag in ("dict", "ordered"):
        return Layout(None, list(body.items()), lambda items: {**node, tag: dict(items)}, True)
    if tag in ("items", "ordered_items", "counter"):
        pairs = [(key, child) for key, child in body]
        return Layout(None, pairs, lambda items: {**node, tag: [list(item) for item in items]}, True)
    if tag in ("namedtuple", "object"):
        return Layout(None, list(body[1].items()), lambda items: {tag: [body[0], dict(items)]}, False)
    if tag == "tuple":
        return Layout(None, list(enumerate(body)), lambda items: {tag: [child for _, child in items]}, False)
    return None
