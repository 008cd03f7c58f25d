"""Batches of windows of text: an endless seeded sequence; the seed and its number determine a batch.

Philox (Salmon et al., 2011, https://doi.org/10.1145/2063384.2063405) has a counter as its state, and draws the numbers.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from chatgot.data.tokenizers.base import Tokens
from chatgot.model.gpt import IGNORED
from tensorkeep.errors import UsageError

Order = Literal["random", "shuffled"]
# Inputs and targets: int64 CPU tensors of shape [rows, context_length]; targets are shifted by one token.
Batch = tuple[torch.Tensor, torch.Tensor]
# The positions in a text where windows begin.
Offsets = npt.NDArray[np.int64]
# Tokens of an evaluation batch, unless a micro-batch of training has more; larger batches are not faster.
LARGEST_TOKENS = 16384
_WORDS_PER_COUNT = 4
# Between the seeds of the parts of a mixture: 2**64 divided by the golden ratio.
_SEED_STEP = 0x9E3779B97F4A7C15
# Of a part of a mixture, as a fraction of all: such a part is drawn from once in a billion windows.
_LEAST_WEIGHT = 1e-9


class BatchSource(Protocol):
    """Where a run takes its training batches from: `Batches`, or a technique's wrapper around them."""

    # The number of the next batch, from 0; the tokens in its windows; what of the data is not used, for the user.
    @property
    def position(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def note(self) -> str | None: ...
    def __next__(self) -> Batch: ...
    # Draw only one of ``parts`` equal parts of the rows of a batch from now on.
    def draw_part(self, part: int, parts: int) -> None: ...
    # The position that a checkpoint stores, to continue with the next batch.
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class NumberedBatches(ABC):
    """An endless iterator of batches. Subclasses choose which numbers are drawn, and what rows they stand for."""

    _offsets: "Drawn"
    note: str | None = None

    def __init__(self, *, context_length: int, batch_size: int, seed: int) -> None:
        for name, count in (("context length", context_length), ("batch size", batch_size)):
            if count < 1:
                raise UsageError(f"the {name} is {count}", remedy="give 1 or more")
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed is {seed}", remedy="give 0 or more, below 2**64")
        self.context_length = context_length
        self.batch_size = batch_size
        self.position = 0
        self._rows = slice(None)

    def draw_part(self, part: int, parts: int) -> None:
        """Draw only one of ``parts`` equal parts, numbered from 0, of the rows; UsageError if they do not divide."""
        if self.batch_size % parts:
            raise UsageError(
                f"a batch of {self.batch_size} sequences cannot be split equally among {parts} processes",
                remedy=f"give a batch size (--loop.batch_size) that is a multiple of {parts}",
            )
        rows = self.batch_size // parts
        self._rows = slice(part * rows, (part + 1) * rows)

    def at(self, position: int) -> Batch:
        # The offsets of all rows: a generator that skips takes longer than it takes to draw them.
        return self._read(self._offsets.take(position * self.batch_size, self.batch_size)[self._rows])

    @abstractmethod
    def _read(self, begins: Offsets) -> Batch:
        """Return the rows of some numbers that were drawn."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self.at(self.position)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called; UsageError if that did not return the state."""
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise UsageError(f"the position of the batches is {position!r}", remedy="give what state_dict() returned")
        self.position = position


class Batches(NumberedBatches):
    """Batches of windows of a text; see `NumberedBatches`.

    Parameters
    ----------
    tokens : array of uint16 or uint32
        The text, 1-D.
    context_length : int
        Tokens in a window.
    batch_size : int
        Windows in a batch.
    seed : int
        From 0 to 2**64 - 1.
    order : str
        ``"random"``: each window begins anywhere, as in nanoGPT. ``"shuffled"``: each window of an epoch comes once.
    mixture : sequence of (int, float)
        The number of tokens and the weight of consecutive parts of the text, which are drawn from in these proportions;
        no window is in two parts. By default the text is one part.

    Attributes
    ----------
    position : int
        The number of the next batch, from 0.

    Raises
    ------
    UsageError
        If an argument is out of range, or the text is not longer than a window.

    Examples
    --------
    >>> batches = Batches(np.arange(100, dtype=np.uint16), context_length=4, batch_size=2, seed=0)
    >>> inputs, targets = next(batches)
    >>> inputs.shape, bool((targets == inputs + 1).all()), batches.state_dict()
    (torch.Size([2, 4]), True, {'position': 1})
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        context_length: int,
        batch_size: int,
        seed: int,
        order: Order = "random",
        mixture: Sequence[tuple[int, float]] = (),
    ) -> None:
        super().__init__(context_length=context_length, batch_size=batch_size, seed=seed)
        check_window(len(tokens), context_length)
        if order not in _ORDERS:
            raise UsageError(f"there is no order {order!r}", remedy=f"give one of {', '.join(_ORDERS)}")
        # A view without a copy: indexing its rows is faster than slicing in a loop.
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, context_length)
        self._offsets: Drawn = (
            MixedOffsets(mixture, context_length, seed, order)
            if mixture
            else _ORDERS[order](len(tokens), context_length, seed)
        )

    def _read(self, begins: Offsets) -> Batch:
        inputs, targets = (torch.from_numpy(self._windows[each].astype(np.int64)) for each in (begins, begins + 1))
        return inputs, targets


class Drawn(Protocol):
    """An endless sequence of whole numbers, such as the offsets of windows."""

    def take(self, begin: int, count: int) -> Offsets:
        """Return ``count`` numbers from place ``begin`` of the sequence."""


class RandomNumbers:
    """Independent, uniformly distributed numbers from 0 to below ``choices``."""

    def __init__(self, choices: int, seed: int) -> None:
        self._choices = np.uint64(choices)
        self._seed = seed
        self._next = -1

    def take(self, begin: int, count: int) -> Offsets:
        if begin != self._next:
            counter, skipped = divmod(begin, _WORDS_PER_COUNT)
            self._words = np.random.Philox(key=self._seed, counter=counter)
            self._words.random_raw(skipped)
        self._next = begin + count
        # numpy guarantees the sequence of raw words, but not of bounded integers. The bias of the remainder of
        # 64-bit words is negligible.
        return (self._words.random_raw(count) % self._choices).astype(np.int64)


class ShuffledNumbers:
    """Epochs of the numbers from 0 to below ``count``, each number once, in random order.

    The numbers are multiplied by ``step``. With ``shifts``, each epoch adds a number of its own below it.
    """

    def __init__(self, count: int, seed: int, *, step: int = 1, shifts: int = 0) -> None:
        self.count, self._seed, self._step, self._shifts = count, seed, step, shifts
        self._shift, self._epoch = 0, -1

    def _draw(self, epoch: int) -> None:
        # The second word of the key is 0 in `RandomNumbers`, which must not draw the same sequence.
        words = np.random.Philox(key=np.array([self._seed, epoch + 1], np.uint64))
        if self._shifts:
            self._shift = int(words.random_raw()) % self._shifts
        # 4 bytes for each number, 8 from 2**32 numbers on.
        self._order = np.arange(self.count, dtype=np.uint32 if self.count <= 1 << 32 else np.uint64)
        np.random.Generator(words).shuffle(self._order)
        self._epoch = epoch

    def take(self, begin: int, count: int) -> Offsets:
        parts = []
        while count:
            epoch, place = divmod(begin, self.count)
            if epoch != self._epoch:
                self._draw(epoch)
            chosen = self._order[place : place + count].astype(np.int64)
            parts.append(chosen * self._step + self._shift)
            begin, count = begin + len(chosen), count - len(chosen)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def random_offsets(tokens: int, context_length: int, seed: int) -> RandomNumbers:
    # Independent offsets, as nanoGPT draws them.
    return RandomNumbers(tokens - context_length, seed)


def shuffled_offsets(tokens: int, context_length: int, seed: int) -> ShuffledNumbers:
    """Return epochs of the windows of a grid over the text, each window once, in random order; see `Batches`."""
    # One less than fit, if possible, so that the grid can be shifted by up to a window: windows are cut differently in
    # each epoch. Less than two windows at the ends of the text are left out of an epoch.
    count = max(1, (tokens - 1) // context_length - 1)
    return ShuffledNumbers(count, seed, step=context_length, shifts=tokens - count * context_length)


_ORDERS: dict[str, Callable[[int, int, int], Drawn]] = {"random": random_offsets, "shuffled": shuffled_offsets}


class MixedOffsets:
    """Offsets from several parts of a text in the proportions of their weights; see `Batches`."""

    def __init__(self, mixture: Sequence[tuple[int, float]], context_length: int, seed: int, order: Order) -> None:
        check_weights({f"part {number + 1}": weight for number, (_, weight) in enumerate(mixture)})
        # Exact fractions: products with rounded ones would drift. 0.7 is 7/10, not the nearest binary number.
        weights = [Fraction(weight).limit_denominator(1 << 32) for _, weight in mixture]
        # Of what the parts before it leave. The last part has all that is left.
        self._fractions = [weight / sum(weights[number:]) for number, weight in enumerate(weights)]
        self._begins = [0, *accumulate(tokens for tokens, _ in mixture)]
        self._parts = []
        for number, (tokens, _) in enumerate(mixture):
            check_window(tokens, context_length, what=f"part {number + 1} of the mixture", or_else="leave it out, or ")
            # Parts with one seed would draw the same sequence.
            own_seed = (seed + number * _SEED_STEP) % (1 << 64)
            self._parts.append(_ORDERS[order](tokens, context_length, own_seed))

    def counts(self, begin: int, end: int) -> npt.NDArray[np.object_]:
        """Return how many of the first windows each part has: a row for each part, for ``begin`` to ``end`` windows."""
        # After any number of windows, each part has had its fraction, to within one window for every part. That is a
        # formula, so any batch is found without the batches before it. Python's integers do not overflow.
        found, rest = [], np.arange(begin, end + 1, dtype=object)
        for fraction in self._fractions:
            found.append(rest * fraction.numerator // fraction.denominator)
            rest = rest - found[-1]
        return np.stack(found)

    def take(self, begin: int, count: int) -> Offsets:
        result = np.empty(count, np.int64)
        for part, first, counts in zip(self._parts, self._begins, self.counts(begin, begin + count), strict=False):
            rows = np.flatnonzero(np.diff(counts))
            if len(rows):
                result[rows] = part.take(counts[0], len(rows)) + first
        return result


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise UsageError if a part of a mixture, by its name, has less than a billionth of the weights."""
    total = sum(weights.values())
    for name, weight in weights.items():
        if not weight >= _LEAST_WEIGHT * total:
            raise UsageError(
                f"the weight of {name} is {weight:g} of {total:g} in all, and the smallest is a billionth",
                remedy="give a larger weight, or leave the source out",
            )


def check_window(
    tokens: int, context_length: int, *, what: str = "the text", path: Path | None = None, or_else: str = ""
) -> None:
    """Raise UsageError if a text is not longer than a window; ``or_else`` begins the remedy."""
    if tokens <= context_length:
        raise UsageError(
            f"{what} has {tokens:,} tokens, and a context of {context_length:,} needs {context_length + 1:,}",
            path=path,
            remedy=f"{or_else}use a shorter context (--model.context_length), or prepare more text",
        )


class EvaluationWindows:
    """Consecutive windows of a text, without overlap: each token is a target once.

    The last window may be shorter. The first token, which nothing precedes, is not a target.

    Parameters
    ----------
    tokens : array of uint16 or uint32
        The text, 1-D, of at least two tokens.
    context_length : int
        Tokens in a window.
    most : int, optional
        Use only as many windows as have this many tokens, spread evenly over the text.

    Examples
    --------
    >>> windows = EvaluationWindows(np.arange(8, dtype=np.uint16), 3)
    >>> windows.targets
    7
    >>> [targets.tolist() for _, targets in windows.batches(2)]
    [[[1, 2, 3], [4, 5, 6]], [[7, -1, -1], [-1, -1, -1]]]
    """

    # What of the text is not used, for the user, if anything is left out.
    note: str | None = None

    def __init__(self, tokens: Tokens, context_length: int, *, most: int | None = None) -> None:
        self._tokens = tokens
        self._length = context_length
        self._all = -(-(len(tokens) - 1) // context_length)
        self._chosen = self._all if most is None else min(self._all, -(-most // context_length))

    @property
    def targets(self) -> int:
        last_missing = self._all * self._length - (len(self._tokens) - 1)
        has_last = self._begin(self._chosen - 1) == (self._all - 1) * self._length
        return self._chosen * self._length - (last_missing if has_last else 0)

    def batches(self, rows: int, *, part: int = 0, parts: int = 1) -> Iterator[Batch]:
        """Yield the windows in batches of one shape, of up to ``rows`` windows; ``parts`` processes get equally many.

        Rows are filled up with targets that do not count.
        """
        own = -(-self._chosen // parts)
        count = -(-own // rows)
        # Batches of one shape: compiled code is compiled once, and ranks that gather weights need equally many batches.
        rows = -(-own // count)
        numbers = range(part, self._chosen, parts)
        for first in range(0, count * rows, rows):
            inputs = torch.zeros(rows, self._length, dtype=torch.int64)
            targets = torch.full_like(inputs, IGNORED)
            for row, number in enumerate(numbers[first : first + rows]):
                known, following = self.pair(number)
                inputs[row, : len(known)], targets[row, : len(known)] = known, following
            yield inputs, targets

    def pair(self, number: int) -> Batch:
        """Return the inputs and the targets of a window, int64."""
        begin = self._begin(number)
        window = torch.from_numpy(self._tokens[begin : begin + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]

    def __len__(self) -> int:
        return self._chosen

    def _begin(self, number: int) -> int:
        # Integers, so that the windows are the same on every machine.
        return number * self._all // self._chosen * self._length
