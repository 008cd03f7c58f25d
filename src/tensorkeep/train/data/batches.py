"""Batches of windows of text: drawn endlessly for training, or one after the other for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch

from tensorkeep.errors import UsageError
from tensorkeep.train.data.offsets import RandomOffsets, Sequence, ShuffledOffsets
from tensorkeep.train.data.tokenizers.base import Tokens

Order = Literal["random", "shuffled"]

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets: int64 tensors on the CPU, both (rows, context_length), the targets one token further on."""

_ORDERS: dict[str, type[RandomOffsets | ShuffledOffsets]] = {"random": RandomOffsets, "shuffled": ShuffledOffsets}


class BatchSource(Protocol):
    """Where a run draws its batches: `Batches`, or what techniques make of them.

    Attributes
    ----------
    position : int
        The number of the next batch, from 0.
    context_length : int
        Tokens in a window of the batches that are drawn now.
    """

    @property
    def position(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    def __next__(self) -> Batch: ...

    def state_dict(self) -> dict[str, int]:
        """Return all that has to be saved to go on with the next batch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved."""


class Batches:
    """An endless iterator of batches; each is a function of the seed and its number alone.

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

    Attributes
    ----------
    position : int
        The number of the next batch, from 0.

    Raises
    ------
    UsageError
        If an argument makes no sense, or the text is shorter than a window and one token.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        context_length: int,
        batch_size: int,
        seed: int,
        order: Order = "random",
    ) -> None:
        _check_window(tokens, context_length, batch_size)
        if order not in _ORDERS:
            raise UsageError(f"there is no order {order!r}", remedy=f"known: {', '.join(_ORDERS)}")
        if not 0 <= seed < 1 << 64:
            raise UsageError(f"the seed is {seed}", remedy="give 0 or more, below 2**64")
        self.context_length = context_length
        self.batch_size = batch_size
        self.position = 0
        # A view that takes no memory; picking its rows beats slicing in a loop and indexing token by token.
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, context_length)
        self._offsets: Sequence = _ORDERS[order](len(tokens), context_length, seed)

    def at(self, position: int) -> Batch:
        """Return the batch of a number, whatever was drawn before."""
        begins = self._offsets.take(position * self.batch_size, self.batch_size)
        inputs, targets = (torch.from_numpy(self._windows[each].astype(np.int64)) for each in (begins, begins + 1))
        return inputs, targets

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self.at(self.position)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return all that has to be saved to go on with the next batch."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved.

        Raises
        ------
        UsageError
            If that is no state of a `Batches`.
        """
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise UsageError(f"the position of the batches is {position!r}", remedy="give what state_dict() returned")
        self.position = position


def windows(tokens: Tokens, context_length: int, *, batch_size: int = 64, most: int | None = None) -> Iterator[Batch]:
    """Return the windows of a text one after the other, in batches, of which the last one may have fewer rows.

    Windows do not overlap; the last tokens, fewer than a window, are left out.

    Parameters
    ----------
    tokens : array of uint16 or uint32
        The text, 1-D.
    context_length : int
        Tokens in a window.
    batch_size : int
        Windows in a batch.
    most : int, optional
        Only so many of the batches, spread evenly over the text.

    Raises
    ------
    UsageError
        If an argument makes no sense, or the text is shorter than a window and one token; at once.
    """
    _check_window(tokens, context_length, batch_size)
    return _windows(tokens, context_length, batch_size, most)


def _windows(tokens: Tokens, context_length: int, batch_size: int, most: int | None) -> Iterator[Batch]:
    count = (len(tokens) - 1) // context_length
    firsts = range(0, count, batch_size)
    chosen = len(firsts) if most is None else min(most, len(firsts))
    for first in (firsts[number * len(firsts) // chosen] for number in range(chosen)):
        begin, end = (place * context_length for place in (first, min(first + batch_size, count)))
        inputs, targets = (
            tokens[begin + shift : end + shift].astype(np.int64).reshape(-1, context_length) for shift in (0, 1)
        )
        yield torch.from_numpy(inputs), torch.from_numpy(targets)


def _check_window(tokens: Tokens, context_length: int, batch_size: int) -> None:
    for what, count in (("context length", context_length), ("batch size", batch_size)):
        if count < 1:
            raise UsageError(f"the {what} is {count}", remedy="give 1 or more")
    if len(tokens) < context_length + 1:
        raise UsageError(
            f"the text has {len(tokens):,} tokens, and a context of {context_length:,} needs {context_length + 1:,}",
            remedy="take a shorter context, or prepare more text",
        )
