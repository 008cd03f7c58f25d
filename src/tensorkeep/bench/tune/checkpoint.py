"""What ``tensorkeep tune checkpoint`` measures: which settings save fastest on this disk with these cores.

Two stages, each in interleaved rounds (`tensorkeep.bench.tune.rounds`): first raw and lossless, around the page
cache and through it; then, for what that chose, the number of threads. The default is kept unless another
setting is faster beyond the noise, see `Contest.winner`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tensorkeep.bench.checkpoint.measure import remove
from tensorkeep.bench.checkpoint.models import build, spec_of_size
from tensorkeep.bench.checkpoint.probes import check_room
from tensorkeep.bench.run.scratch import Scratch
from tensorkeep.bench.tune.contest import SAVE, STORED, Contest, Setting, default, fewest_rounds
from tensorkeep.bench.tune.rounds import Rounds, run_rounds
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import UsageError
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.machine import usable_processors
from tensorkeep.state.tree import flatten

DEFAULT_SECONDS = 15.0
DEFAULT_BYTES = 512 * 10**6
FEWEST_BYTES = 64 * 10**6

MOST_ROUNDS = 30

# What a save costs beside its seconds until durable, such as removing it, comes on top.
_SPARE = 1.25

_MOST_THREADS = 32
_SEED = 20_250_301


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning found.

    Attributes
    ----------
    subject : str
        What was saved.
    nbytes : int
        Its raw bytes.
    contests : tuple of Contest
        The stages.
    """

    subject: str
    nbytes: int
    contests: tuple[Contest, ...]

    @property
    def choice(self) -> Setting:
        """The recommended setting."""
        return self.contests[-1].winner()

    def sentence(self) -> str:
        """Return the recommendation, computed from the figures."""
        if self.choice == default():
            few = any(c.verdict(s) == "too few rounds" for c in self.contests for s in c.settings)
            why = f"there was time for too few rounds to tell; --seconds {self._seconds_needed()} would be enough"
            why = why if few else "nothing else is faster beyond the noise"
            return f"Keep the defaults ({self.choice.name}): {why}."
        steps = []
        for contest in self.contests:
            winner, gain = contest.winner(), contest.gain(contest.winner())
            if gain is not None and winner != contest.settings[0]:
                steps.append(
                    f"{gain.median:.2f}x as fast as {contest.settings[0].name} ({gain.low:.2f} to {gain.high:.2f})"
                )
        return f"Save with {self.choice.name}: {', then '.join(steps)}."

    def _seconds_needed(self) -> int:
        # Each stage gets its share of what the stages before it left.
        shares = range(len(self.contests), 0, -1)
        longest = max(c.seconds_needed() * share for c, share in zip(self.contests, shares, strict=True))
        return math.ceil(max(longest, sum(c.seconds_needed() for c in self.contests)) * _SPARE)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, raw samples included."""
        return {
            "subject": {"description": self.subject, "bytes": self.nbytes},
            "stages": [
                {"arms": [c.row(s) for s in c.settings], "rounds": len(c.rounds.order), "samples": c.rounds.as_dict()}
                for c in self.contests
            ],
            "recommendation": {"text": self.sentence(), "settings": self.choice.table()},
        }


def tune(
    directory: Path,
    *,
    seconds: float = DEFAULT_SECONDS,
    nbytes: int = DEFAULT_BYTES,
    source: Path | None = None,
    on_visit: Callable[[str], None] | None = None,
) -> Tuned:
    """Measure how a state is saved fastest in a folder; everything that is written there is removed.

    Parameters
    ----------
    directory : Path
        An existing folder.
    seconds : float
        About how long to measure, after the state was built or loaded; the first round is always finished.
    nbytes : int
        The size of the made-up state; smaller where the disk is slow, but not below 64 MB.
    source : Path, optional
        A checkpoint to save again and again, instead of a made-up state.
    on_visit : callable, optional
        Called with the name of what is measured next.

    Raises
    ------
    UsageError
        If there is nothing to measure.
    StoreError
        If there is no room, or nothing can be written.
    """
    with Scratch(directory) as scratch:
        path = scratch.path / "state"
        if source is None:
            nbytes = min(nbytes, _affordable(directory, path, seconds / 2))
        subject, state = _state(directory, nbytes, source)
        size = sum(leaf.nbytes for leaf in flatten(state).leaves.values())
        if size == 0:
            raise UsageError("there is nothing to measure: the state holds no tensor", path=source)
        check_room(directory, disk=2 * size, memory=DEFAULT_BUDGET)
        contests: list[Contest] = []
        end = time.perf_counter() + seconds
        for stage in (_first, _second):
            settings = stage(contests[-1].winner() if contests else default())
            now = time.perf_counter()
            until = now + (end - now) / (2 - len(contests))
            contests.append(Contest(settings, _measure(state, path, settings, until, on_visit), size))
    return Tuned(subject, size, tuple(contests))


def _first(start: Setting) -> list[Setting]:
    return [
        start,
        replace(start, compression="lossless"),
        replace(start, direct_io=False),
        replace(start, compression="lossless", direct_io=False),
    ]


def _second(start: Setting) -> list[Setting]:
    most = min(_MOST_THREADS, 2 * len(usable_processors()))
    counts = [2**power for power in range(int(math.log2(most)) + 1)]
    return [start, *(replace(start, threads=count) for count in counts if count != start.threads)]


def _measure(
    state: object, path: Path, settings: Sequence[Setting], until: float, on_visit: Callable[[str], None] | None
) -> Rounds:
    # Off the record: the first save of each kind touches new memory.
    for setting in settings:
        _save(state, path, setting)
    visits = {setting.name: partial(_save, state, path, setting) for setting in settings}
    note = None if on_visit is None else (lambda _, name: on_visit(name))
    left = max(0.0, until - time.perf_counter())
    return run_rounds(visits, MOST_ROUNDS, seed=_SEED, seconds=left, on_visit=note)


def _save(state: object, path: Path, setting: Setting) -> Mapping[str, float]:
    try:
        report = save(
            state,
            path,
            format="native",
            compression=setting.compression,
            threads=setting.threads,
            memory_budget=setting.memory_budget,
            direct_io=setting.direct_io,
        )
    finally:
        remove(path)
    return {SAVE: report.durable_seconds, STORED: float(report.stored_bytes)}


def _state(directory: Path, nbytes: int, source: Path | None) -> tuple[str, object]:
    if source is not None:
        return str(source), load(source)
    spec = spec_of_size(nbytes)
    check_room(directory, disk=2 * nbytes, memory=2 * nbytes)
    return f"random bfloat16 weights ({spec})", build(spec)


def _affordable(directory: Path, path: Path, seconds: float) -> int:
    """Return the bytes of a state that each stage can save often enough in some seconds."""
    state = _state(directory, FEWEST_BYTES, None)[1]
    for setting in _first(default()):  # off the record, see below
        _save(state, path, setting)
    begin = time.perf_counter()
    for setting in _first(default()):
        _save(state, path, setting)
    a_save = (time.perf_counter() - begin) / len(_first(default()))
    sizes = [len(stage(default())) for stage in (_first, _second)]
    # One round more than needed, because the first is off the record.
    saves = max(size * (fewest_rounds(size - 1) + 1) for size in sizes)
    return max(FEWEST_BYTES, int(FEWEST_BYTES * seconds / (a_save * saves * _SPARE)))
