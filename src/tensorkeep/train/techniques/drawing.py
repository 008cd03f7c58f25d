"""Batches that a technique draws in its own way from those of a run, and what a step was given of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tensorkeep.train.data.batches import Batch, BatchSource

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


class Drawing(ABC):
    """Draws other batches in place of those of a run. Its position is theirs, and so is what a checkpoint holds.

    Parameters
    ----------
    plain : BatchSource
        Those of the run.
    """

    def __init__(self, plain: BatchSource) -> None:
        self.plain = plain

    @property
    def position(self) -> int:
        """The number of the next batch of the run."""
        return self.plain.position

    @property
    def context_length(self) -> int:
        """Tokens in a window of the batches that are drawn now."""
        return self.plain.context_length

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next batch to train."""

    def state_dict(self) -> dict[str, int]:
        """Return all that has to be saved to go on with the next batch."""
        return self.plain.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was saved."""
        self.plain.load_state_dict(state)


@contextmanager
def given_inputs(run: Run) -> Iterator[list[Tensor]]:
    """Collect, within, the inputs of which the loss is asked for."""
    inner = run.operations.loss
    given: list[Tensor] = []

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        given.append(inputs.cpu())
        return inner(inputs, targets)

    run.operations.loss = loss
    try:
        yield given
    finally:
        run.operations.loss = inner


def same_tokens(first: list[Tensor], second: list[Tensor]) -> bool:
    """Say whether batches have the same tokens in the same order, however they are divided."""
    return torch.equal(_in_a_row(first), _in_a_row(second))


def _in_a_row(batches: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(each.flatten() for each in batches)])
