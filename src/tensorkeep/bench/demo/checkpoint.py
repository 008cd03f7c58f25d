"""What ``tensorkeep demo`` does, stage by stage: build, compare, verify, damage, clean up."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorkeep.bench.checkpoint.measure import LOADS, SAVE, STORED
from tensorkeep.bench.checkpoint.models import build, parse
from tensorkeep.bench.checkpoint.probes import check_room
from tensorkeep.bench.checkpoint.subject import COPIES_IN_MEMORY, Subject
from tensorkeep.bench.checkpoint.tools.known import USUAL
from tensorkeep.bench.demo.damage import Flip, flip_bit
from tensorkeep.bench.tune.rounds import Ratio, Rounds, run_rounds, visitor
from tensorkeep.checkpoint.inspect.info import info
from tensorkeep.checkpoint.inspect.verify import VerifyReport, verify
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import CorruptCheckpointError, StoreError, UsageError

DEFAULT_SCALE = 0.1
DEFAULT_ROUNDS = 3
PATIENCE = 75.0
"""Seconds after which no further round begins."""

_SEED = 20_240_601
_COPIES_ON_DISK = 2
_OVERHEAD = 512 * 1024**2


@dataclass(frozen=True, slots=True)
class Damaged:
    """A byte that was flipped, what `verify` says of it, and how `load` refuses it."""

    flip: Flip
    report: VerifyReport
    refusal: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in seconds or bytes, and how it compares with torch: times faster, or its share of torch's bytes."""

    median: float
    against_torch: Ratio | None


def figures(rounds: Rounds) -> dict[str, dict[str, Figure]]:
    """Return what was measured, by measure and arm; what was not measured is not there."""
    found: dict[str, dict[str, Figure]] = {measure: {} for measure in (SAVE, *LOADS, STORED)}
    for measure, row in found.items():
        for arm in USUAL:
            median = rounds.median(arm, measure)
            if median is not None:
                mine, torchs = (arm, measure), ("torch", measure)
                ratio = rounds.ratio(mine, torchs) if measure == STORED else rounds.ratio(torchs, mine)
                row[arm] = Figure(median, ratio)
    return {measure: row for measure, row in found.items() if row}


@dataclass(slots=True)
class Demonstration:
    """The stages of the demo; a context manager that removes what it wrote.

    Parameters
    ----------
    directory : Path
        Where a temporary folder is made.
    source : Path, optional
        A checkpoint of the user's own; else OpenLLaMA-3B at ``scale`` in bfloat16.
    scale : float
    rounds : int

    Raises
    ------
    UsageError
        If a number is out of range.
    """

    directory: Path
    source: Path | None = None
    scale: float = DEFAULT_SCALE
    rounds: int = DEFAULT_ROUNDS
    seconds: float = PATIENCE
    _folder: Path = field(init=False)
    _subject: Subject = field(init=False)

    def __enter__(self) -> Self:
        if self.rounds < 1:
            raise UsageError(f"{self.rounds} rounds measure nothing", remedy="give 1 or more")
        parse(self.spec)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="tensorkeep-demo-", dir=self.directory))
        except OSError as error:
            raise StoreError(
                f"cannot write here: {error.strerror}", path=self.directory, remedy="choose a folder with --dir"
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        shutil.rmtree(self._folder)

    @property
    def spec(self) -> str:
        """The model that stands in for a checkpoint of the user's own."""
        return f"openllama-3b:scale={self.scale:.10f}"

    def build(self) -> Subject:
        """Make or load the state, having checked that it fits.

        Raises
        ------
        StoreError
            If memory or disk are too small.
        """
        nbytes = parse(self.spec).nbytes if self.source is None else info(self.source).total.nbytes
        check_room(
            self._folder,
            disk=_COPIES_ON_DISK * nbytes + _OVERHEAD // 8,
            memory=COPIES_IN_MEMORY * nbytes + _OVERHEAD,
        )
        state: Any = build(self.spec, seed=_SEED) if self.source is None else load(self.source)
        self._subject = Subject(state)
        return self._subject

    def compare(self, on_visit: Callable[[int, str], None] | None = None) -> Rounds:
        """Measure every arm in interleaved rounds.

        Raises
        ------
        GateError
            If an arm does not give back what it was given.
        """
        visits = {name: visitor(tool, name, self._subject, self._folder) for name, tool in USUAL.items()}
        return run_rounds(visits, self.rounds, seed=_SEED, seconds=self.seconds, on_visit=on_visit)

    def verify(self) -> VerifyReport:
        """Save the state compressed, and verify it."""
        path = self._folder / "step-1000"
        save(self._subject.state, path, compression="lossless")
        return verify(path)

    def damage(self) -> Damaged:
        """Flip a bit in a copy of what `verify` saved, and look at it again."""
        path = self._folder / "step-1000-damaged"
        shutil.copytree(self._folder / "step-1000", path)
        flip = flip_bit(path)
        report = verify(path)
        try:
            load(path, select=[flip.name])
        except CorruptCheckpointError as error:
            return Damaged(flip, report, error.message)
        raise AssertionError("a damaged block was loaded")  # pragma: no cover
