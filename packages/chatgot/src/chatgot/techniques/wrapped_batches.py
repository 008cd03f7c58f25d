"""Batch sources that techniques put around the batches of a run, and the sizes of batches."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from msgspec.structs import replace
from torch import Tensor

from chatgot.config.config import Config
from chatgot.data.batches import Batch, BatchSource


def with_loop(config: Config, **settings: int) -> Config:
    return replace(config, loop=replace(config.loop, **settings))


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
    # Micro-batches split the rows differently, so the tokens are compared in one line. `cat` refuses an empty list.
    empty = torch.empty(0, dtype=torch.int64)
    return torch.equal(*(torch.cat([empty, *(each.flatten() for each in batches)]) for batches in (first, second)))
