"""The plain values of a state, by path: what `diff` compares besides the tensors."""

from __future__ import annotations

from typing import Any

from holdfast.state.names import key_text
from holdfast.state.pruning import layout


def plain_values(skeleton: object) -> dict[str, Any]:
    """Return each plain value's node by its dotted path; an empty container counts as one.

    Parameters
    ----------
    skeleton : object
        A valid skeleton.
    """
    found: dict[str, Any] = {}
    _collect(skeleton, "", found)
    return found


def _collect(node: Any, path: str, found: dict[str, Any]) -> None:
    shape = layout(node)
    if shape is None or not (shape.items or shape.leaf_name):
        found[path] = node
        return
    for key, child in shape.items:
        # A key that is no string stands in its node's form.
        text = key if isinstance(key, str) else key_text(next(iter(key.values())) if isinstance(key, dict) else key)
        _collect(child, f"{path}.{text}" if path else text, found)
