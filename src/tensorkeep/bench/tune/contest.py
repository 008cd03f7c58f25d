"""Which of several settings saves fastest, decided on interleaved rounds: the default, unless one beats it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensorkeep.bench.tune.rounds import Ratio, Rounds
from tensorkeep.formats.base import BLOCK_BYTES, thread_bytes
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.io.parallel import default_threads

SAVE, STORED = "save", "stored"
"""The measures of a round: seconds until durable, and bytes on disk."""

CHANCE = 0.025
"""How likely a contest may prefer a setting where all are the same and each round is the toss of a coin."""

WORTH = 1.05
"""How many times faster a setting must be, in the median, to be preferred to the default."""

_PER_THREAD = thread_bytes(BLOCK_BYTES, buffers=3)


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to save.

    Attributes
    ----------
    compression : str
    threads : int
    direct_io : bool
    """

    compression: str
    threads: int
    direct_io: bool

    @property
    def memory_budget(self) -> int:
        """The bytes that so many threads need, and at least the default."""
        return max(DEFAULT_BUDGET, self.threads * _PER_THREAD)

    @property
    def name(self) -> str:
        """What tables call it."""
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{self.compression}, {threads}, {'direct' if self.direct_io else 'page cache'}"

    def table(self) -> dict[str, Any]:
        """Return the table ``[save]`` of ``tensorkeep.toml``: the compression, and what differs from the default."""
        table: dict[str, Any] = {"compression": self.compression}
        if self.threads != default().threads:
            table["threads"] = self.threads
        if not self.direct_io:
            table["direct_io"] = False
        if self.memory_budget != DEFAULT_BUDGET:
            table["memory_budget"] = self.memory_budget
        return table


def allowed_losses(rounds: int, others: int) -> int | None:
    """Return in how many of some rounds a setting may be slower and still be called faster; None if in none will do.

    One in ten, as long as one of so many settings lost no more by chance with a probability of `CHANCE` at most.

    Parameters
    ----------
    rounds : int
    others : int
        How many settings are held against the first.
    """
    fitting = [lost for lost in range(rounds // 10 + 1) if others * _at_most(lost, rounds) <= CHANCE]
    return max(fitting, default=None)


def fewest_rounds(others: int) -> int:
    """Return the rounds below which none of so many settings is preferred to the first."""
    return next(rounds for rounds in itertools.count(1) if allowed_losses(rounds, others) is not None)


def _at_most(lost: int, rounds: int) -> float:
    """Return the probability of losing so many of some rounds, or fewer, if each is the toss of a coin."""
    return float(sum(math.comb(rounds, count) for count in range(lost + 1)) / 2**rounds)


def default() -> Setting:
    """Return what a save does unless told otherwise; the memory budget, too, limits its threads."""
    return Setting("none", min(default_threads(), DEFAULT_BUDGET // _PER_THREAD), direct_io=True)


@dataclass(frozen=True, slots=True)
class Contest:
    """Settings that were measured in the same rounds; the first is the one to beat.

    Attributes
    ----------
    settings : sequence of Setting
    rounds : Rounds
    nbytes : int
        Raw bytes of the state.
    """

    settings: Sequence[Setting]
    rounds: Rounds
    nbytes: int

    def gain(self, setting: Setting) -> Ratio | None:
        """Return how many times faster than the first one a setting saves."""
        return self.rounds.ratio((self.settings[0].name, SAVE), (setting.name, SAVE))

    def verdict(self, setting: Setting) -> str:
        """Return ``"default"``, ``"first"``, ``"too few rounds"``, ``"faster"``, ``"slower"`` or ``"within noise"``.

        Faster (slower) is what was faster (slower) by 5% in the median and in every round but for `allowed_losses`.
        The setting to beat is the default, or the first where an earlier contest chose it.
        """
        if setting == self.settings[0]:
            return "default" if setting == default() else "first"
        first = self.rounds.values(self.settings[0].name, SAVE)
        own = self.rounds.values(setting.name, SAVE)
        gains = [first[index] / own[index] for index in first.keys() & own.keys()]
        gain = self.gain(setting)
        allowed = allowed_losses(len(gains), len(self.settings) - 1)
        if gain is None or allowed is None:
            return "too few rounds"
        if gain.median >= WORTH and sum(g <= 1 for g in gains) <= allowed:
            return "faster"
        if gain.median <= 1 / WORTH and sum(g >= 1 for g in gains) <= allowed:
            return "slower"
        return "within noise"

    def winner(self) -> Setting:
        """Return the fastest of those that are faster beyond the noise, else the first."""
        faster = [setting for setting in self.settings if self.verdict(setting) == "faster"]
        return max(faster, key=self._median_gain, default=self.settings[0])

    def seconds_needed(self) -> float:
        """Return about how long enough rounds take, and the one before them that is off the record."""
        medians = [self.rounds.median(setting.name, SAVE) or 0.0 for setting in self.settings]
        return sum(medians) * (fewest_rounds(len(self.settings) - 1) + 1)

    def _median_gain(self, setting: Setting) -> float:
        gain = self.gain(setting)
        return gain.median if gain else 0.0

    def row(self, setting: Setting) -> dict[str, Any]:
        """Return what was measured of a setting, as plain values; rates in raw bytes per second."""
        seconds = self.rounds.values(setting.name, SAVE)
        median, gain = self.rounds.median(setting.name, SAVE), self.gain(setting)
        return {
            **asdict(setting),
            "name": setting.name,
            "rate": self.nbytes / median if median else None,
            "rate_low": self.nbytes / max(seconds.values()) if seconds else None,
            "rate_high": self.nbytes / min(seconds.values()) if seconds else None,
            "stored_bytes": self.rounds.median(setting.name, STORED),
            "gain": None if gain is None else asdict(gain),
            "verdict": self.verdict(setting),
        }
