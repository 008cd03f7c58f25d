"""Where a text may be cut so that byte pairs are the same as in the whole text."""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 1 << 20
"""Characters that are held back for a good place to cut; a text without one is cut there, whatever that splits."""


def at_line_ends(texts: Iterator[str]) -> Iterator[str]:
    """Yield the same text in pieces that end at line ends.

    The patterns that split text into words before byte pairs are merged (GPT-2's, cl100k's, o200k's) never join what
    stands before and behind a line end that follows a visible character and is followed by a letter, a digit or an
    underscore. Blank lines and indented ones may be joined with their neighbours, so nothing is cut there.
    """
    held = ""
    for text in texts:
        held += text
        place = _last_place(held)
        if not place and len(held) >= LONGEST:
            place = len(held)
        if place:
            yield held[:place]
            held = held[place:]
    if held:
        yield held


def _last_place(text: str) -> int:
    """Return where the last line begins that may be cut off; 0 if there is none."""
    end = len(text) - 1
    while (newline := text.rfind("\n", 1, max(end, 1))) > 0:
        before, behind = text[newline - 1], text[newline + 1]
        if not before.isspace() and (behind.isalnum() or behind == "_"):
            return newline + 1
        end = newline
    return 0
