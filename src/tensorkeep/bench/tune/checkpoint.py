"""``tensorkeep tune checkpoint``: measures which settings save fastest on this machine.

Two stages in interleaved rounds: first raw and lossless, each with direct I/O and through the page cache; then, with
the winner, the number of threads.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from tensorkeep import machine
from tensorkeep.bench.analysis.statistics import require_scipy
from tensorkeep.bench.checkpoint.measure import SAVE, STORED
from tensorkeep.bench.checkpoint.models import build, spec_of_size
from tensorkeep.bench.checkpoint.probes import check_capacity, remove
from tensorkeep.bench.experiment.workload import Outcome
from tensorkeep.bench.results import Settings
from tensorkeep.bench.run.rounds import Rounds, run_rounds
from tensorkeep.bench.run.scratch import scratch_folder
from tensorkeep.bench.tune.stage import FEWEST_ROUNDS, Setting, Stage
from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save
from tensorkeep.errors import UsageError
from tensorkeep.state.tree import flatten
from tensorkeep.storage.buffers import DEFAULT_BUDGET

DEFAULT_SECONDS = 15.0
DEFAULT_BYTES = 512 * 10**6
FEWEST_BYTES = 64 * 10**6
MOST_ROUNDS = 30

_MARGIN = 1.25
"""A round takes longer than its saves: each checkpoint is also removed."""
_MOST_THREADS = 32
_SEED = 20_250_301


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of tuning: a description of the state, its bytes, and the stages."""

    subject: str
    nbytes: int
    stages: tuple[Stage, ...]

    @property
    def choice(self) -> Setting:
        """The recommended setting."""
        return self.stages[-1].winner()

    def sentence(self) -> str:
        """Return the recommendation in a sentence."""
        if self.choice == Setting.default():
            reason = "no other setting is faster beyond the noise"
            if any(stage.verdict(setting) == "too few rounds" for stage in self.stages for setting in stage.settings):
                reason = f"there was time for too few rounds; --seconds {self._seconds_needed()} would be enough"
            return f"Keep the defaults ({self.choice.name}): {reason}."
        gains = []
        for stage in self.stages:
            found = stage.comparisons.get(stage.winner())
            if found is not None:
                text = f"{found.gain:.2f}x as fast as {stage.settings[0].name}"
                gains.append(f"{text} (95% {found.low:.2f} to {found.high:.2f})")
        return f"Save with {self.choice.name}: {', then '.join(gains)}."

    def _seconds_needed(self) -> int:
        # Each stage gets an equal part of the time that the earlier ones left.
        parts = range(len(self.stages), 0, -1)
        longest = max(stage.seconds_needed() * part for stage, part in zip(self.stages, parts, strict=True))
        return math.ceil(max(longest, sum(stage.seconds_needed() for stage in self.stages)) * _MARGIN)

    def as_dict(self) -> Settings:
        """Return everything as plain values, with the raw samples."""
        return {
            "subject": {"description": self.subject, "bytes": self.nbytes},
            "stages": [
                {
                    "arms": [stage.row(setting) for setting in stage.settings],
                    "rounds": stage.rounds.count,
                    "samples": msgspec.to_builtins(stage.rounds),
                }
                for stage in self.stages
            ],
            "recommendation": {"text": self.sentence(), "settings": self.choice.table()},
        }


def tune(
    directory: Path,
    *,
    seconds: float = DEFAULT_SECONDS,
    nbytes: int = DEFAULT_BYTES,
    source: Path | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Tuned:
    """Measure which settings save a state fastest in an existing folder. All files written there are removed.

    Measuring takes about so many ``seconds``, after the state was built or loaded; the first round always runs. The
    state is the checkpoint ``source``, or a random one of ``nbytes`` bytes: fewer where the disk is slow, but at least
    64 MB. ``progress`` is called with the number of measurements done and the name of the next setting.

    Raises UsageError if the state holds no tensor; StoreError if memory or disk do not suffice, or nothing can be
    written; MissingExtraError if scipy is not installed.
    """
    require_scipy()
    with scratch_folder(directory) as scratch:
        path = scratch / "state"
        if source is None:
            nbytes = min(nbytes, _affordable_bytes(directory, path, seconds / 2))
        subject, state = _make_state(directory, nbytes, source)
        size = sum(leaf.nbytes for leaf in flatten(state).leaves.values())
        if size == 0:
            raise UsageError("there is nothing to measure: the state holds no tensor", path=source)
        check_capacity(directory, disk=2 * size, memory=DEFAULT_BUDGET)
        stages: list[Stage] = []
        end = time.perf_counter() + seconds
        for vary in (_vary_writing, _vary_threads):
            settings = vary(stages[-1].winner() if stages else Setting.default())
            now = time.perf_counter()
            until = now + (end - now) / (2 - len(stages))
            stages.append(Stage(settings, _measure(state, path, settings, until, progress), size))
    return Tuned(subject, size, tuple(stages))


def _vary_writing(start: Setting) -> list[Setting]:
    raw = [start, replace(start, compression="lossless")]
    return [*raw, *(replace(setting, direct_io=False) for setting in raw)]


def _vary_threads(start: Setting) -> list[Setting]:
    most = min(_MOST_THREADS, 2 * len(machine.usable_processors()))
    counts = [2**power for power in range(int(math.log2(most)) + 1)]
    return [start, *(replace(start, threads=count) for count in counts if count != start.threads)]


def _measure(
    state: object, path: Path, settings: Sequence[Setting], until: float, progress: Callable[[int, str], None] | None
) -> Rounds:
    # A warm-up, because the first save of each kind uses fresh memory.
    for setting in settings:
        _save(state, path, setting)
    arms = {setting.name: partial(_save, state, path, setting) for setting in settings}
    left = max(0.0, until - time.perf_counter())
    return run_rounds(arms, MOST_ROUNDS, seed=_SEED, seconds=left, progress=progress)


def _save(state: object, path: Path, setting: Setting) -> Outcome:
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
    return Outcome(figures={SAVE: report.durable_seconds, STORED: float(report.stored_bytes)})


def _make_state(directory: Path, nbytes: int, source: Path | None) -> tuple[str, object]:
    if source is not None:
        return str(source), load(source)
    spec = spec_of_size(nbytes)
    check_capacity(directory, disk=2 * nbytes, memory=2 * nbytes)
    return f"random bfloat16 weights ({spec})", build(spec)


def _affordable_bytes(directory: Path, path: Path, seconds: float) -> int:
    """Return the bytes of a state that each stage can save in enough rounds within some seconds."""
    state = _make_state(directory, FEWEST_BYTES, None)[1]
    settings = _vary_writing(Setting.default())
    for setting in settings:  # A warm-up, as in `_measure`.
        _save(state, path, setting)
    begin = time.perf_counter()
    for setting in settings:
        _save(state, path, setting)
    seconds_per_save = (time.perf_counter() - begin) / len(settings)
    most = max(len(vary(Setting.default())) for vary in (_vary_writing, _vary_threads))
    saves = most * (FEWEST_ROUNDS + 1)
    return max(FEWEST_BYTES, int(FEWEST_BYTES * seconds / (seconds_per_save * saves * _MARGIN)))
