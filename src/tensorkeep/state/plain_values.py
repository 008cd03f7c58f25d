"""The structure and the plain values of a state, by path: what `diff` compares besides the tensors."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from tensorkeep.state.names import key_text
from tensorkeep.state.pruning import layout

_KINDS = {
    "items": "dict",
    "ordered": "dict",
    "ordered_items": "dict",
    "parameter": "tensor",
    "object": "registered object",
}
"""What counts as the same: an OrderedDict as a dict, whatever its keys, and a parameter as a tensor."""


class PlainValue(NamedTuple):
    """What stands at one place of a state.

    Attributes
    ----------
    name : str
        The dotted path.
    kind : str
        ``"plain"``, or what sort of leaf or container it is: ``"tensor"``, ``"list"``, ``"tuple"``...
    node : object
        The node of a plain value, which holds floats bit for bit; the kind of everything else.
    counts : bool
        Whether its absence elsewhere is a difference: that of plain values and of empty containers.
    """

    name: str
    kind: str
    node: Any
    counts: bool


def plain_values(skeleton: object) -> dict[tuple[str, ...], PlainValue]:
    """Return what stands at each place of a state, by the keys that lead there.

    Parameters
    ----------
    skeleton : object
        A valid skeleton.

    Returns
    -------
    dict
        The keys are in JSON, so that ``1``, ``True`` and ``"1"`` are three, and a dotted key is no path. Two values
        of one kind are the same if and only if ``json.dumps`` of their nodes is.
    """
    found: dict[tuple[str, ...], PlainValue] = {}
    _collect(skeleton, (), "", found)
    return found


def same(a: PlainValue, b: PlainValue) -> bool:
    """Return whether two values are the same in type and in every bit."""
    return a.kind == b.kind and json.dumps(a.node) == json.dumps(b.node)


def _collect(node: Any, path: tuple[str, ...], name: str, found: dict[tuple[str, ...], PlainValue]) -> None:
    shape = layout(node)
    if shape is None:
        found[path] = PlainValue(name, "plain", _in_order(node), True)
        return
    tag = "list" if isinstance(node, list) else next(iter(node))
    kind = _KINDS.get(tag, tag)
    if tag in ("namedtuple", "object"):
        kind = f"{kind} {node[tag][0]}"
    found[path] = PlainValue(name, kind, kind, not (shape.items or shape.leaf_name))
    for key, child in shape.items:
        # A key that is no string stands in its node's form.
        text = key if isinstance(key, str) else key_text(next(iter(key.values())) if isinstance(key, dict) else key)
        _collect(child, (*path, json.dumps(key)), f"{name}.{text}" if name else text, found)


def _in_order(node: Any) -> Any:
    """Return the node of a set in an order that does not change from process to process."""
    tag = next(iter(node)) if isinstance(node, dict) else None
    return {tag: sorted(node[tag], key=json.dumps)} if tag in ("set", "frozenset") else node
