"""Texts from files, made harmless: one line, and nothing that could drive a terminal."""

from __future__ import annotations


def clean(text: str) -> str:
    """Return a text on one line, without anything that is not printable."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)
