"""An exponential moving average of the weights.

The average often has a lower loss than the weights themselves.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averages named parameters after each step (Polyak and Juditsky, 1992, in its exponential form).

    In the first steps the decay, the fraction of the average that is kept in a step, is lower:
    ``(1 + step) / (10 + step)``, to forget the initial weights early. With a decay of 0 nothing is averaged.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._decay = decay
        self._parameters = parameters if decay else {}
        self._averages = [tensor.clone() for tensor in self._live]

    @property
    def _live(self) -> list[Tensor]:
        # Looked up each time: techniques that shard the parameters may give them other memory.
        return [parameter.data for parameter in self._parameters.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights of a step to the average."""
        if self._averages:
            decay = min(self._decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(self._averages, self._live, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averaged weights into the model within the block; no effect if nothing is averaged."""
        own = [tensor.clone() for tensor in self._live]
        self._set(self._averages)
        try:
            yield
        finally:
            self._set(own)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for live, value in zip(self._live, values, strict=True):
            live.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter name; empty if nothing is averaged."""
        return dict(zip(self._parameters, self._averages, strict=True))
