"""Techniques and smaller batches that reduce training memory, ordered by expected step time."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from tensorkeep.bench.results import Settings
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.memory import Ledger, predict
from tensorkeep.train.run.auto_batch_size import with_batch_size
from tensorkeep.train.step.device import chosen_device
from tensorkeep.train.techniques.base import Machine
from tensorkeep.train.techniques.stack import Stack


@dataclass(frozen=True, slots=True)
class Option:
    """A technique that saves memory, with settings, and the expected factor on the time of a step."""

    name: str
    settings: Settings
    cost: float


OPTIONS: tuple[tuple[Option, ...], ...] = (
    (Option("fused-cross-entropy", {}, 1.02),),
    (Option("low-bit-optimizer", {"bits": 8}, 1.04), Option("optimizer-offload", {}, 1.5)),
    (
        Option("activation-checkpointing", {"keep": "matmuls"}, 1.12),
        Option("activation-checkpointing", {}, 1.3),
        Option("activation-swapping", {}, 1.6),
    ),
)
"""At most one of each group. The costs come from the techniques' papers and our own measurements."""

_COST_OF_HALVING = 1.01
"""Of each halving of the micro-batch."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration and its predicted memory and time."""

    config: Config
    ledger: Ledger  # its memory
    cost: float = 1.0  # the expected factor on the time of a step; 1.0 for the given configuration
    added: dict[str, Settings] = field(default_factory=dict)  # techniques that the given one does not have

    def settings(self) -> Settings:
        """Return the changes to the given configuration, by dotted name."""
        loop = self.config.loop
        techniques = {f"techniques.{name}": settings or "on" for name, settings in self.added.items()}
        return {
            **techniques,
            "loop.batch_size": loop.batch_size,
            "loop.gradient_accumulation_steps": loop.gradient_accumulation_steps,
        }


def choices(config: Config) -> list[Choice]:
    """Return the configuration as it is and with every set of techniques that can run here, the cheapest first.

    The number of sequences in a step does not change: a smaller micro-batch is accumulated more often.
    ``model.vocab_size`` is that of the data.
    """
    device = chosen_device(config.loop.device)
    groups = [[None, *(each for each in group if each.name not in config.techniques)] for group in OPTIONS]
    found: list[Choice] = []
    for picked in itertools.product(*groups):
        options = [each for each in picked if each is not None]
        added = {each.name: each.settings for each in options}
        together = msgspec.structs.replace(config, techniques={**config.techniques, **added})
        try:
            Stack.of(together.techniques).check(Machine(device))
        except (UsageError, UnsupportedError):
            continue
        cost = math.prod(each.cost for each in options)
        for halvings, batch_size in enumerate(_halved(config.loop.batch_size)):
            smaller = with_batch_size(together, batch_size)
            ledger = predict(smaller, device=device.type)
            found.append(Choice(smaller, ledger, cost * _COST_OF_HALVING**halvings, added))
    return sorted(found, key=lambda choice: (choice.cost, len(choice.added)))


def _halved(size: int) -> Iterator[int]:
    yield size
    while size % 2 == 0:
        size //= 2
        yield size
