"""Sets of techniques that spare memory, and smaller batches, by what a step is expected to cost with them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.memory.ledger import Ledger, predict
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import Stack

Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Option:
    """A technique that spares memory, with settings, and how much longer a step is expected to take with it."""

    name: str
    settings: Settings
    cost: float


OPTIONS: tuple[tuple[Option, ...], ...] = (
    (Option("fused-cross-entropy", {}, 1.02),),
    (Option("low-bit-optimizer", {"bits": 8}, 1.04), Option("optimizer-offload", {}, 1.5)),
    (
        Option("activation-checkpointing", {"keep": "products"}, 1.12),
        Option("activation-checkpointing", {}, 1.3),
        Option("activation-swapping", {}, 1.6),
    ),
)
"""Of each group one at most. Costs are those that their papers and our own runs lead to expect; smaller parts of a
batch cost `_COST_OF_HALVING` each time that they are halved."""

_COST_OF_HALVING = 1.01


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration, what it is predicted to take, and how much longer a step is expected to be than as it was.

    Attributes
    ----------
    config : Config
    ledger : Ledger
    cost : float
        1.0: nothing.
    added : dict of str to dict
        The techniques that were not on before, with their settings.
    """

    config: Config
    ledger: Ledger
    cost: float = 1.0
    added: dict[str, Settings] = field(default_factory=dict)

    def settings(self) -> Mapping[str, Any]:
        """Return the settings, by dotted name, that make of the configuration before what was chosen."""
        loop = self.config.loop
        techniques = {f"techniques.{name}": settings or "on" for name, settings in self.added.items()}
        return {**techniques, "loop.batch_size": loop.batch_size, "loop.accumulate": loop.accumulate}


def choices(config: Config) -> Iterator[Choice]:
    """Yield the configuration as it is, and with whatever techniques can run here, the cheapest first.

    The number of sequences in a step stays: where fewer are computed at once, more of them are accumulated.

    Parameters
    ----------
    config : Config
        ``model.vocab_size`` is that of the data.
    """
    device = chosen_device(config.loop.device)
    groups = [[None, *(each for each in group if each.name not in config.techniques)] for group in OPTIONS]
    found: list[Choice] = []
    for picked in itertools.product(*groups):
        options = [each for each in picked if each is not None]
        added = {each.name: each.settings for each in options}
        together = msgspec.structs.replace(config, techniques={**config.techniques, **added})
        if _can_run(together, device):
            found += _in_parts(together, math.prod(each.cost for each in options), added, device.type)
    return iter(sorted(found, key=lambda choice: (choice.cost, len(choice.added))))


def _can_run(config: Config, device: torch.device) -> bool:
    try:
        Stack.of(config.techniques).check(Machine(device))
    except (UsageError, UnsupportedError):
        return False
    return True


def _in_parts(config: Config, cost: float, added: dict[str, Settings], device: str) -> Iterator[Choice]:
    for halvings, batch_size in enumerate(_sizes(config)):
        smaller = with_batch_size(config, batch_size)
        yield Choice(smaller, predict(smaller, device=device), cost * _COST_OF_HALVING**halvings, added)


def _sizes(config: Config) -> Iterator[int]:
    size = config.loop.batch_size
    while True:
        yield size
        if size % 2:
            return
        size //= 2


def with_batch_size(config: Config, batch_size: int) -> Config:
    """Return a configuration that computes so many sequences at once, and as many as before in each step.

    Raises
    ------
    UsageError
        If the sequences of a step do not divide so.
    """
    whole = config.loop.batch_size * config.loop.accumulate
    if whole % batch_size:
        raise UsageError(f"{whole} sequences do not divide into batches of {batch_size}", remedy="give a divisor")
    loop = msgspec.structs.replace(config.loop, batch_size=batch_size, accumulate=whole // batch_size)
    return msgspec.structs.replace(config, loop=loop)
