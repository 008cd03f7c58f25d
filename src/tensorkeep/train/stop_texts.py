"""Texts at which generated text ends."""

from collections.abc import Collection, Iterable, Iterator


def until(pieces: Iterable[str], stops: Collection[str]) -> Iterator[str]:
    """Yield a text that comes in pieces up to the first of some texts, which is left out.

    The end of a piece that may begin such a text is held back until that is known.

    Examples
    --------
    >>> list(until(["one tw", "o th", "ree"], ["two"]))
    ['one ']
    >>> "".join(until(["one tw", "elve"], ["two"]))
    'one twelve'
    """
    held = ""
    for piece in pieces:
        held += piece
        found = [place for each in stops if (place := held.find(each)) >= 0]
        if found:
            if held[: min(found)]:
                yield held[: min(found)]
            return
        kept = max((n for each in stops for n in range(1, len(each)) if held.endswith(each[:n])), default=0)
        if ready := held[: len(held) - kept]:
            yield ready
        held = held[len(held) - kept :]
    if held:
        yield held
