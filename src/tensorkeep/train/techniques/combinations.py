"""Named combinations of techniques."""

from __future__ import annotations

from collections.abc import Iterable

COMBINATIONS: dict[str, tuple[str, ...]] = {
    "A": ("compile", "gradient-accumulation", "mixed-precision"),
    "B": ("attention-kernel", "activation-checkpointing", "low-bit-optimizer"),
    "C": ("activation-checkpointing", "low-bit-optimizer"),
}
"""A is for speed, B for memory with long contexts, C for memory alone."""


def expanded(names: Iterable[str]) -> list[str]:
    """Return names of techniques, each once, with combinations replaced by what they consist of."""
    found: dict[str, None] = {}
    for name in names:
        found.update(dict.fromkeys(COMBINATIONS.get(name, (name,))))
    return list(found)
