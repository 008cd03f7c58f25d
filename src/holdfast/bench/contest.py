"""Which of several settings saves fastest, decided on interleaved rounds: the default, unless one beats it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.bench.rounds import Ratio, Rounds
from holdfast.formats.base import BLOCK_BYTES, thread_bytes
from holdfast.io.buffers import DEFAULT_BUDGET
from holdfast.io.parallel import default_threads

SAVE, STORED = "save", "stored"
"""The measures of a round: seconds until durable, and bytes on disk."""

FEWEST_ROUNDS = 5
"""Below this, no setting is preferred to the default."""

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
        """Return the table ``[save]`` of ``holdfast.toml``: the compression, and what differs from the default."""
        table: dict[str, Any] = {"compression": self.compression}
        if self.threads != default().threads:
            table["threads"] = self.threads
        if not self.direct_io:
            table["direct_io"] = False
        if self.memory_budget != DEFAULT_BUDGET:
            table["memory_budget"] = self.memory_budget
        return table


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
        """Return ``"default"``, ``"too few rounds"``, ``"faster"``, ``"slower"`` or ``"within noise"``.

        Faster (slower) is what was faster (slower) in every round, but for one in ten, and by 5% in the median.
        """
        if setting == self.settings[0]:
            return "default"
        first = self.rounds.values(self.settings[0].name, SAVE)
        own = self.rounds.values(setting.name, SAVE)
        gains = [first[index] / own[index] for index in first.keys() & own.keys()]
        gain = self.gain(setting)
        if gain is None or len(gains) < FEWEST_ROUNDS:
            return "too few rounds"
        allowed = len(gains) // 10
        if gain.median >= WORTH and sum(g <= 1 for g in gains) <= allowed:
            return "faster"
        if gain.median <= 1 / WORTH and sum(g >= 1 for g in gains) <= allowed:
            return "slower"
        return "within noise"

    def winner(self) -> Setting:
        """Return the fastest of those that are faster beyond the noise, else the first."""
        faster = [setting for setting in self.settings if self.verdict(setting) == "faster"]
        return max(faster, key=self._median_gain, default=self.settings[0])

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
