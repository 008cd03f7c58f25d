"""Where windows of text begin: two endless sequences, of which any part can be computed from the seed alone.

Both are drawn from Philox (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405), a generator whose state is a
counter: what stands at any place of its sequence is computed without what stands before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]

_DRAWN_AT_ONCE = 4096
_WORDS_PER_COUNT = 4


class Sequence(ABC):
    """An endless sequence of places in a text at which a window and one token more begin."""

    @abstractmethod
    def take(self, begin: int, count: int) -> Offsets:
        """Return ``count`` of them from place ``begin`` of the sequence."""


class RandomOffsets(Sequence):
    """Each place is drawn uniformly and by itself, as nanoGPT draws them.

    Parameters
    ----------
    tokens : int
        How long the text is.
    context_length : int
    seed : int
    """

    def __init__(self, tokens: int, context_length: int, seed: int) -> None:
        self._choices = np.uint64(tokens - context_length)
        self._seed = seed
        self._block = -1
        self._drawn = np.empty(0, np.int64)

    def take(self, begin: int, count: int) -> Offsets:
        parts = []
        while count:
            block, place = divmod(begin, _DRAWN_AT_ONCE)
            part = self._draw(block)[place : place + count]
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _draw(self, block: int) -> Offsets:
        if block != self._block:
            counter = block * (_DRAWN_AT_ONCE // _WORDS_PER_COUNT)
            # Raw words, because numpy keeps their sequence for ever, which it does not promise of bounded integers. Of
            # 2**64 words, the remainder favours no place by more than one.
            words = np.random.Philox(key=self._seed, counter=counter).random_raw(_DRAWN_AT_ONCE)
            self._drawn, self._block = (words % self._choices).astype(np.int64), block
        return self._drawn


class ShuffledOffsets(Sequence):
    """Epochs, in each of which the windows of a grid over the text come once, in random order.

    The grid of each epoch begins at another random place, so that windows are cut differently; less than two windows
    at the ends of the text are left out of an epoch.

    Parameters
    ----------
    tokens : int
        How long the text is.
    context_length : int
    seed : int

    Attributes
    ----------
    windows : int
        How many there are in an epoch. Their order takes 4 bytes for each, 8 from 2**32 windows on.
    """

    def __init__(self, tokens: int, context_length: int, seed: int) -> None:
        # One less than there is room for, if possible, leaves the grid room to move by a whole window.
        self.windows = max(1, (tokens - 1) // context_length - 1)
        self._shifts = tokens - self.windows * context_length
        self._context_length = context_length
        self._seed = seed
        self._epoch = -1
        self._order: npt.NDArray[np.unsignedinteger[Any]] = np.empty(0, np.uint32)
        self._shift = 0

    def take(self, begin: int, count: int) -> Offsets:
        parts = []
        while count:
            epoch, place = divmod(begin, self.windows)
            self._shuffle(epoch)
            chosen = self._order[place : place + count].astype(np.int64)
            parts.append(chosen * self._context_length + self._shift)
            begin, count = begin + len(chosen), count - len(chosen)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _shuffle(self, epoch: int) -> None:
        if epoch != self._epoch:
            words = np.random.Philox(key=np.array([self._seed, epoch + 1], np.uint64))
            self._shift = int(words.random_raw()) % self._shifts
            self._order = np.arange(self.windows, dtype=np.uint32 if self.windows <= 1 << 32 else np.uint64)
            np.random.Generator(words).shuffle(self._order)
            self._epoch = epoch
