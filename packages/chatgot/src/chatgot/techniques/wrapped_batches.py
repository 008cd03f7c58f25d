"""Batch sources that techniques put around the batches of a run."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from chatgot.data.batches import Batch, BatchSource


class WrappedBatches:
    """Batches that ``draw`` makes from ``inner``; ``length`` returns their window length, if ``draw`` changes it."""

    def __init__(
        self, inner: BatchSource, draw: Callable[[BatchSource], Batch], length: Callable[[], int] | None = None
    ) -> None:
        self.inner = inner
        self._draw = draw
        self._length = length

    @property
    def position(self) -> int:
        return self.inner.position

    @property
    def context_length(self) -> int:
        return self._length() if self._length else self.inner.context_length

    @property
    def note(self) -> str | None:
        return self.inner.note

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._draw(self.inner)

    def draw_part(self, part: int, parts: int) -> None:
        self.inner.draw_part(part, parts)

    def state_dict(self) -> dict[str, int]:
        # A checkpoint has the state of the inner batches, so a run can resume without the technique.
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)


def same_tokens(first: list[Tensor], second: list[Tensor]) -> bool:
    # Micro-batches split the rows differently, so the tokens are compared in one line.
    return torch.equal(_joined(first), _joined(second))


def _joined(batches: list[Tensor]) -> Tensor:
    # `cat` refuses an empty list.
    return torch.cat([torch.empty(0, dtype=torch.int64), *(each.flatten() for each in batches)])
