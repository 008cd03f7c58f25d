"""One stage of tuning: settings measured in the same rounds, and the choice among them.

The first setting is kept unless another one is faster by the bench's statistics: a paired test of the log-ratios,
adjusted for all settings of the stage, its 95% interval, and at least 5% gain.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from tensorkeep.bench.analysis.statistics import Comparison, compare, describe, holm
from tensorkeep.bench.analysis.verdicts import judge
from tensorkeep.bench.checkpoint.measure import SAVE, STORED
from tensorkeep.bench.results import Settings
from tensorkeep.bench.run.rounds import Rounds
from tensorkeep.formats.base import BLOCK_BYTES, thread_bytes
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import default_threads
from tensorkeep.units import counted

FEWEST_ROUNDS = 5
"""Fewer rounds give no verdict: times of a disk have outliers, against which a test of a few values is not robust."""

_PER_THREAD = thread_bytes(BLOCK_BYTES, buffers=3)

Verdict = Literal["default", "first", "faster", "slower", "within noise", "too few rounds"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to save: compression, number of threads, and whether writes bypass the page cache."""

    compression: str
    threads: int
    direct_io: bool

    @classmethod
    def default(cls) -> "Setting":
        """Return the default settings of `save`; the default memory budget limits its threads."""
        return cls("none", min(default_threads(), DEFAULT_BUDGET // _PER_THREAD), direct_io=True)

    @property
    def memory_budget(self) -> int:
        """The bytes of buffers that the threads need, at least the default."""
        return max(DEFAULT_BUDGET, self.threads * _PER_THREAD)

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.compression}, {counted(self.threads, 'thread')}, {'direct' if self.direct_io else 'page cache'}"

    def table(self) -> Settings:
        """Return the table ``[save]`` of ``tensorkeep.toml``: the compression, and settings other than the default."""
        names, default = ("threads", "direct_io", "memory_budget"), Setting.default()
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}
        return {"compression": self.compression, **changed}


@dataclass(frozen=True)
class Stage:
    """Settings that were measured in the same rounds; the others are compared with the first."""

    settings: Sequence[Setting]
    rounds: Rounds
    nbytes: int  # of the state

    @cached_property
    def comparisons(self) -> dict[Setting, Comparison]:
        """How many times faster than the first each other setting saves, for those that have a round with both."""
        first = (self.settings[0].name, SAVE)
        ratios = {each: self.rounds.ratios(first, (each.name, SAVE)) for each in self.settings[1:]}
        return {each: compare([math.log(ratio) for ratio in found]) for each, found in ratios.items() if found}

    def verdict(self, setting: Setting) -> Verdict:
        """Return the verdict on a setting; that of the first is ``"default"``, or ``"first"`` if it differs from it."""
        if setting == self.settings[0]:
            return "default" if setting == Setting.default() else "first"
        comparison = self.comparisons.get(setting)
        if comparison is None or comparison.n < FEWEST_ROUNDS:
            return "too few rounds"
        others = list(self.comparisons)
        adjusted = holm([self.comparisons[each].p or 0.0 for each in others])[others.index(setting)]
        word, _ = judge(comparison, adjusted, None)
        return "faster" if word == "helps" else "slower" if word == "hurts" else "within noise"

    def winner(self) -> Setting:
        """Return the fastest of the settings that are faster than the first, or else the first."""
        faster = [setting for setting in self.settings if self.verdict(setting) == "faster"]
        return max(faster, key=lambda setting: self.comparisons[setting].gain, default=self.settings[0])

    def seconds_needed(self) -> float:
        """Estimate the seconds of `FEWEST_ROUNDS` rounds and the warm-up round before them."""
        seconds = [self.rounds.figures(setting.name, SAVE).values() for setting in self.settings]
        return sum(describe(list(each)).median for each in seconds if each) * (FEWEST_ROUNDS + 1)

    def row(self, setting: Setting) -> Settings:
        """Return the figures of a setting as plain values; rates are bytes of the state per second."""
        seconds = list(self.rounds.figures(setting.name, SAVE).values())
        stored = list(self.rounds.figures(setting.name, STORED).values())
        time = describe(seconds) if seconds else None
        comparison = self.comparisons.get(setting)
        return {
            **asdict(setting),
            "name": setting.name,
            "rate": self.nbytes / time.median if time else None,
            "rate_low": self.nbytes / time.high if time else None,
            "rate_high": self.nbytes / time.low if time else None,
            "stored_bytes": describe(stored).median if stored else None,
            "comparison": None if comparison is None else asdict(comparison),
            "verdict": self.verdict(setting),
        }
