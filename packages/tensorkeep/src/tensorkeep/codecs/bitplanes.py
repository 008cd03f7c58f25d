"""Splitting elements into byte planes and merging them; plane 0 holds the lowest bytes of every element."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.codecs.base import Bytes

# Files have these numbers. `BYTES`: the bytes as they are. `EXPONENT`: ``s eeeeeee | e mmmmmmm`` becomes ``eeeeeeee | s
# mmmmmmm``, so that the top plane has exponent bits only; for floats with an exponent of eight bits or more (bfloat16,
# float32, float64), which straddles the two top bytes. A rotation by one bit has the same effect, but is slower to undo
# and changes the lower bytes: a float32 that was once a bfloat16 would lose its two zero planes.
BYTES = 0
EXPONENT = 1
WIDTHS = (1, 2, 4, 8)
LAYOUT_WIDTHS = {BYTES: WIDTHS, EXPONENT: WIDTHS[1:]}

Words = npt.NDArray[np.unsignedinteger[Any]]

_WORD = {width: np.dtype(f"<u{width}") for width in WIDTHS}
_SIGN_AND_MANTISSA = 0x807F


class Scratch:
    """Temporaries of one thread, for runs of at most ``count`` elements, allocated on first use."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._arrays: dict[tuple[str, int], Words] = {}

    def words(self, slot: str, width: int, count: int) -> Words:
        """``count`` words of ``width`` bytes; the next call for the same slot overwrites them."""
        if (slot, width) not in self._arrays:
            self._arrays[slot, width] = np.empty(self._count, _WORD[width])
        return self._arrays[slot, width][:count]


def as_words(raw: Bytes, width: int) -> Words:
    """Little-endian words; the number of bytes must be a multiple of ``width``."""
    return raw.view(_WORD[width])


def split(words: Words, planes: Sequence[Bytes], layout: int, scratch: Scratch) -> None:
    """Write byte k of every word to plane k; ``EXPONENT`` needs words of two bytes or more."""
    width = words.itemsize
    if width == 1:
        np.copyto(planes[0], words)
    elif width == 2:
        if layout == EXPONENT:
            _split_exponent(words, planes, scratch)
        else:
            np.copyto(planes[0], words, casting="unsafe")
            np.right_shift(words, 8, out=planes[1], dtype=words.dtype, casting="unsafe")
    else:
        # The exponent lies in the upper half of a word; the lower half is split as plain bytes.
        half = width // 2
        part = scratch.words("half", half, words.size)
        np.right_shift(words, 8 * half, out=part, dtype=words.dtype, casting="unsafe")
        split(part, planes[half:], layout, scratch)
        np.copyto(part, words, casting="unsafe")
        split(part, planes[:half], BYTES, scratch)


def merge(planes: Sequence[Bytes], words: Words, layout: int, scratch: Scratch) -> None:
    """Fill the words from their planes: the inverse of ``split``."""
    width = words.itemsize
    if width == 1:
        np.copyto(words, planes[0])
    elif width == 2:
        if layout == EXPONENT:
            _merge_exponent(planes, words, scratch)
        else:
            np.left_shift(planes[1], 8, out=words, dtype=words.dtype)
            np.bitwise_or(words, planes[0], out=words)
    else:
        half = width // 2
        part = scratch.words("half", half, words.size)
        merge(planes[half:], part, layout, scratch)
        np.left_shift(part, 8 * half, out=words, dtype=words.dtype)
        merge(planes[:half], part, BYTES, scratch)
        np.bitwise_or(words, part, out=words)


def _split_exponent(words: Words, planes: Sequence[Bytes], scratch: Scratch) -> None:
    mantissa = scratch.words("mantissa", 2, words.size)
    sign = scratch.words("sign", 2, words.size)
    # The sign falls off the top: eight exponent bits remain.
    np.right_shift(words, 7, out=planes[1], dtype=words.dtype, casting="unsafe")
    np.bitwise_and(words, _SIGN_AND_MANTISSA, out=mantissa)
    # The sign bit 15 moves to bit 7, above the mantissa.
    np.right_shift(mantissa, 8, out=sign)
    np.bitwise_or(mantissa, sign, out=planes[0], dtype=words.dtype, casting="unsafe")


def _merge_exponent(planes: Sequence[Bytes], words: Words, scratch: Scratch) -> None:
    mantissa = scratch.words("mantissa", 2, words.size)
    # Widening as a signed byte copies the sign into all upper bits at once; the mask keeps the topmost.
    np.copyto(mantissa.view(np.int16), planes[0].view(np.int8))
    np.bitwise_and(mantissa, _SIGN_AND_MANTISSA, out=mantissa)
    np.left_shift(planes[1], 7, out=words, dtype=words.dtype)
    np.bitwise_or(words, mantissa, out=words)
