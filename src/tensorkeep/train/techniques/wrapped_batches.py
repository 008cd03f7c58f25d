"""Base class of batch sources that techniques put around the batches of a run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from tensorkeep.train.data.batches import Batch, BatchSource


class WrappedBatches(ABC):
    """Other batches made from those of a run; position and checkpoint state are those of the inner source.

    Parameters
    ----------
    inner : BatchSource
        The batches of the run.
    """

    def __init__(self, inner: BatchSource) -> None:
        self.inner = inner

    @property
    def position(self) -> int:
        """The number of the next batch of the run."""
        return self.inner.position

    @property
    def context_length(self) -> int:
        """Tokens in a window of the current batches."""
        return self.inner.context_length

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """Return the next training batch."""

    def state_dict(self) -> dict[str, int]:
        """Return the state that is needed to continue with the next batch."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.inner.load_state_dict(state)


def same_tokens(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether batches have the same tokens in the same order, however they are split."""
    return torch.equal(_joined(first), _joined(second))


def _joined(batches: list[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *(each.flatten() for each in batches)])
