"""``tensorkeep tune checkpoint``: measure which settings save fastest on this machine, and write them to a file."""

import json
import math
import os
import re
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from tensorkeep import load, save
from tensorkeep.errors import UsageError
from tensorkeep.ext import counted, machine
from tensorkeep.ext.checkpoint import options
from tensorkeep.ext.formats import BLOCK_BYTES, thread_bytes
from tensorkeep.ext.state import flatten
from tensorkeep.ext.storage import DEFAULT_BUDGET, default_threads, replace_file, store_errors
from tensorkeep_bench.analysis.samples import judge
from tensorkeep_bench.checkpoint.files import check_capacity, remove
from tensorkeep_bench.checkpoint.measure import SAVE, STORED
from tensorkeep_bench.checkpoint.models import build, spec_of_size
from tensorkeep_bench.results import Results, Settings, Verdict
from tensorkeep_bench.run.runner import run_rounds, scratch_folder
from tensorkeep_bench.statistics import Comparison, compare, describe, holm, require_scipy
from tensorkeep_bench.workload import Outcome

DEFAULT_SECONDS = 15.0
DEFAULT_BYTES = 512 * 10**6
FEWEST_BYTES = 64 * 10**6
MOST_ROUNDS = 30
# Fewer rounds give no verdict: times of a disk have outliers, against which a test of a few values is not robust.
FEWEST_ROUNDS = 5

_MARGIN = 1.25  # a round takes longer than its saves: each checkpoint is also removed
_MOST_THREADS = 32
_SEED = 20_250_301
_PER_THREAD = thread_bytes(BLOCK_BYTES, buffers=3)

TuneVerdict = Literal["default", "first", "faster", "slower", "about the same", "undecided", "too few rounds"]
_TUNE_VERDICTS: dict[Verdict, TuneVerdict] = {"helps": "faster", "hurts": "slower", "about the same": "about the same"}
Progress = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Setting:
    compression: str
    threads: int
    direct_io: bool

    @classmethod
    def default(cls) -> "Setting":
        # The default memory budget limits the threads of a save without settings.
        return cls("none", min(default_threads(), DEFAULT_BUDGET // _PER_THREAD), direct_io=True)

    @property
    def memory_budget(self) -> int:
        # With the default budget, a save would use fewer threads than were measured.
        return max(DEFAULT_BUDGET, self.threads * _PER_THREAD)

    @property
    def name(self) -> str:
        return f"{self.compression}, {counted(self.threads, 'thread')}, {'direct' if self.direct_io else 'page cache'}"

    def table(self) -> Settings:
        """Return the table ``[save]`` of ``tensorkeep.toml``: the compression, and settings other than the default."""
        names, default = ("threads", "direct_io", "memory_budget"), Setting.default()
        # Only what differs, so that later defaults apply to the rest.
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}
        return {"compression": self.compression, **changed}


@dataclass(frozen=True)
class TuningStage:
    settings: Sequence[Setting]
    rounds: Results
    nbytes: int  # bytes of the state

    @cached_property
    def comparisons(self) -> dict[Setting, Comparison]:
        # The others are compared with the first, which is kept unless another one is faster.
        first = (self.settings[0].name, SAVE)
        ratios = {each: self.rounds.ratios(first, (each.name, SAVE)) for each in self.settings[1:]}
        return {each: compare([math.log(ratio) for ratio in found]) for each, found in ratios.items() if found}

    def verdict(self, setting: Setting) -> TuneVerdict:
        """Return the verdict on a setting; the first is ``"default"`` or, if an earlier stage chose it, ``"first"``."""
        if setting == self.settings[0]:
            return "default" if setting == Setting.default() else "first"
        comparison = self.comparisons.get(setting)
        # A time budget may end a stage after one round.
        if comparison is None or comparison.n < FEWEST_ROUNDS:
            return "too few rounds"
        others = list(self.comparisons)
        adjusted = holm([self.comparisons[each].p or 0.0 for each in others])[others.index(setting)]
        # As in the bench: a paired test of the log-ratios, adjusted for all settings of the stage, its 95% interval,
        # and at least 5% gain.
        word, _ = judge(comparison, adjusted, None)
        return _TUNE_VERDICTS.get(word, "undecided")

    def winner(self) -> Setting:
        faster = [setting for setting in self.settings if self.verdict(setting) == "faster"]
        return max(faster, key=lambda setting: self.comparisons[setting].gain, default=self.settings[0])

    def seconds_needed(self) -> float:
        """Estimate the seconds of `FEWEST_ROUNDS` rounds and the warm-up round before them."""
        seconds = [self.rounds.figures(setting.name, SAVE).values() for setting in self.settings]
        # One more round, for the warm-up.
        return sum(describe(list(each)).median for each in seconds if each) * (FEWEST_ROUNDS + 1)

    def row(self, setting: Setting) -> Settings:
        """Return the figures of a setting; rates are bytes of the state per second."""
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

    def as_dict(self) -> Settings:
        return {
            "arms": [self.row(setting) for setting in self.settings],
            "rounds": self.rounds.blocks,
            "samples": {"seed": self.rounds.experiment.seed, "cells": msgspec.to_builtins(self.rounds.cells)},
        }


@dataclass(frozen=True, slots=True)
class TunedSave:
    subject: str
    nbytes: int
    stages: tuple[TuningStage, ...]

    @property
    def choice(self) -> Setting:
        return self.stages[-1].winner()

    def sentence(self) -> str:
        if self.choice == Setting.default():
            reason = "no other setting is shown to be faster"
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
        return {
            "subject": {"description": self.subject, "bytes": self.nbytes},
            "stages": [stage.as_dict() for stage in self.stages],
            "recommendation": {"text": self.sentence(), "settings": self.choice.table()},
        }


def tune(
    directory: Path,
    *,
    seconds: float = DEFAULT_SECONDS,
    nbytes: int = DEFAULT_BYTES,
    source: Path | None = None,
    progress: Progress | None = None,
) -> TunedSave:
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
        # Checked again, because the size of a checkpoint is known only now.
        check_capacity(directory, disk=2 * size, memory=DEFAULT_BUDGET)
        stages: list[TuningStage] = []
        end = time.perf_counter() + seconds
        # Two stages instead of every combination, which would take many times as long: first raw and lossless, each
        # with direct I/O and through the page cache; then, with the winner, the number of threads.
        for vary in (_vary_writing, _vary_threads):
            settings = vary(stages[-1].winner() if stages else Setting.default())
            now = time.perf_counter()
            until = now + (end - now) / (2 - len(stages))
            stages.append(TuningStage(settings, _measure(state, path, settings, until, progress), size))
    return TunedSave(subject, size, tuple(stages))


def _vary_writing(start: Setting) -> list[Setting]:
    raw = [start, replace(start, compression="lossless")]
    return [*raw, *(replace(setting, direct_io=False) for setting in raw)]


def _vary_threads(start: Setting) -> list[Setting]:
    most = min(_MOST_THREADS, 2 * len(machine.usable_processors()))
    counts = [2**power for power in range(int(math.log2(most)) + 1)]
    return [start, *(replace(start, threads=count) for count in counts if count != start.threads)]


def _measure(
    state: object, path: Path, settings: Sequence[Setting], until: float, progress: Progress | None
) -> Results:
    # A warm-up, because the first save with a setting uses fresh memory.
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
    # A slow disk would otherwise spend the whole time on one round.
    state = _make_state(directory, FEWEST_BYTES, None)[1]
    one_round = _measure(state, path, _vary_writing(Setting.default()), until=0.0, progress=None)
    seconds_per_save = fmean(cell.seconds or 0.0 for cell in one_round.cells)
    most = max(len(vary(Setting.default())) for vary in (_vary_writing, _vary_threads))
    saves = most * (FEWEST_ROUNDS + 1)
    return max(FEWEST_BYTES, int(FEWEST_BYTES * seconds / (seconds_per_save * saves * _MARGIN)))


# The table ``[save]`` of a ``tensorkeep.toml``. In an existing table, the lines of its keys and the comments that begin
# with ``#:`` are replaced; everything else in the file is kept byte by byte.

_MARK = "#:"
_MOST_BYTES = 1024**2
_OWN_LINE = re.compile(rf"\s*(?:{_MARK}|(?:{'|'.join(options.KEYS)})\s*=)")
_THIS_TABLE = re.compile(rf"\s*\[\s*{options.TABLE}\s*\]\s*(?:#.*)?$")
_ANY_TABLE = re.compile(r"\s*\[")


def write_tuned(path: Path, values: Mapping[str, object], comments: Sequence[str]) -> str:
    """Write or change a ``tensorkeep.toml`` atomically, and return its text; UsageError or StoreError if it cannot."""
    text = with_table(read_text(path), values, comments, path)
    replace_file(path, text.encode())
    return text


def check_writable(path: Path) -> None:
    """Raise UsageError if the folder does not exist, StoreError if no file can be created in it."""
    # Through links, because the file is replaced where it really lies.
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        remedy = "make the folder, or give another file with --out"
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", path=path, remedy=remedy)
    # A file is created, because permissions alone do not show a read-only disk.
    with store_errors(path, "write the settings"), tempfile.NamedTemporaryFile(dir=target.parent):
        pass


def read_text(path: Path) -> str:
    """Return the text, empty without a file; UsageError if it is not text, StoreError if it cannot be read."""
    with store_errors(path, "read the settings"):
        if not path.exists():
            return ""
        # A device or a huge file would be read without end.
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise UsageError("is not a settings file", path=path, remedy="give another one with --out")
        content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file") from error


def with_table(text: str, values: Mapping[str, object], comments: Sequence[str], path: Path) -> str:
    """Return the text with these values in its table ``[save]``; UsageError if the table cannot be replaced."""
    try:
        before = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file, or remove it") from error
    options.parse(before, path)  # Refuses unknown keys, as a save does.
    # JSON's strings, integers and booleans are also TOML's.
    lines = [
        *(f"{_MARK} {line}" for line in comments),
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    changed = _replace_table(text, lines)
    try:
        after = tomllib.loads(changed)
    except ValueError:
        after = {}
    # Lines are replaced without a TOML parser, so the result is parsed and refused if it means something else.
    if after != {**before, options.TABLE: dict(values)}:
        raise UsageError(
            f"the table [{options.TABLE}] is written in a way that cannot be changed without loss",
            path=path,
            remedy=f"write it below a line [{options.TABLE}], one key a line, or remove it",
        )
    return changed


def _replace_table(text: str, block: list[str]) -> str:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if _THIS_TABLE.match(line):
            rest = lines[number + 1 :]
            end = next((index for index, each in enumerate(rest) if _ANY_TABLE.match(each)), len(rest))
            # Comments of the user stay; our own begin with a mark.
            kept = [each for each in rest[:end] if not _OWN_LINE.match(each)]
            return "\n".join([*lines[: number + 1], *block, *kept, *rest[end:]])
    gap = [] if not text else ["", ""] if not text.endswith("\n") else [""]
    return text + "\n".join([*gap, f"[{options.TABLE}]", *block, ""])
