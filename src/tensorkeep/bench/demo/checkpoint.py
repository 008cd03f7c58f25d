"""``tensorkeep demo``: compare tools, verify a checkpoint, flip a bit in a copy of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tensorkeep.bench.analysis.statistics import Description, describe
from tensorkeep.bench.checkpoint.measure import LOADS, SAVE, STORED
from tensorkeep.bench.checkpoint.models import build, parse
from tensorkeep.bench.checkpoint.probes import check_capacity
from tensorkeep.bench.checkpoint.state_pair import COPIES_IN_MEMORY, StatePair
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS
from tensorkeep.bench.run.rounds import Rounds, run_rounds, tool_measurements
from tensorkeep.checkpoint.inspect.info import info
from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.load.verify import VerifyReport, verify
from tensorkeep.checkpoint.save.save import save
from tensorkeep.errors import CorruptCheckpointError, StoreError, UsageError
from tensorkeep.formats.native import manifest
from tensorkeep.io.directory import Directory

DEFAULT_SCALE = 0.1
DEFAULT_ROUNDS = 3
LONGEST_SECONDS = 75.0
"""Seconds after which no further round starts."""

_SEED = 20_240_601
_COPIES_ON_DISK = 2
_OVERHEAD_BYTES = 512 * 1024**2


@dataclass(frozen=True, slots=True)
class BitFlip:
    """A byte that was changed: file and offset, the tensor and block that it belongs to, its values."""

    file: str
    offset: int
    name: str
    block: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class DamageReport:
    """A flipped bit, the report of `verify`, and the message with which `load` refuses the tensor."""

    flip: BitFlip
    report: VerifyReport
    refusal: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in seconds or bytes, and the ratio to torch by round: its speedup, or the fraction of its bytes."""

    median: float
    against_torch: Description | None


def figures(rounds: Rounds) -> dict[str, dict[str, Figure]]:
    """Return what was measured by measure and arm, without measures that no arm has."""
    found: dict[str, dict[str, Figure]] = {}
    for measure in (SAVE, *LOADS, STORED):
        for arm in COMMON_TOOLS:
            values = list(rounds.figures(arm, measure).values())
            own, torch = (arm, measure), ("torch", measure)
            ratios = rounds.ratios(own, torch) if measure == STORED else rounds.ratios(torch, own)
            if values:
                figure = Figure(describe(values).median, describe(ratios) if ratios else None)
                found.setdefault(measure, {})[arm] = figure
    return found


def flip_bit(checkpoint: Path) -> BitFlip:
    """Flip one bit of a native checkpoint: in the middle of the middle block of its largest tensor.

    Raises
    ------
    UsageError
        If it holds no tensor with data.
    """
    with Directory(checkpoint) as directory:
        found = manifest.read(directory)
    leaf = max(found.leaves, key=lambda leaf: leaf.nbytes, default=None)
    if leaf is None or not leaf.blocks:
        raise UsageError("holds no tensor whose data could be damaged", path=checkpoint)
    block = len(leaf.blocks) // 2
    offset = leaf.offset + sum(each.length for each in leaf.blocks[:block]) + leaf.blocks[block].length // 2
    file = found.files[leaf.file].name
    with (checkpoint / file).open("r+b") as opened:
        opened.seek(offset)
        before = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([before ^ 1]))
    return BitFlip(file, offset, leaf.name, block, before, before ^ 1)


@dataclass(slots=True)
class CheckpointDemo(AbstractContextManager["CheckpointDemo"]):
    """The stages of ``tensorkeep demo``; a context manager that removes what it wrote.

    Parameters
    ----------
    directory : Path
        Where a temporary folder is made.
    source : Path, optional
        A checkpoint of the user; by default OpenLLaMA-3B at ``scale`` in bfloat16.
    scale : float
    rounds : int
    seconds : float
        After which no further round starts.

    Raises
    ------
    UsageError
        If a number is out of range.
    StoreError
        If the folder cannot be made.
    """

    directory: Path
    source: Path | None = None
    scale: float = DEFAULT_SCALE
    rounds: int = DEFAULT_ROUNDS
    seconds: float = LONGEST_SECONDS
    _folder: Path = field(init=False)
    _states: StatePair = field(init=False)

    def __enter__(self) -> Self:
        if self.rounds < 1:
            raise UsageError(f"{self.rounds} rounds measure nothing", remedy="give 1 or more")
        parse(self.spec)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="tensorkeep-demo-", dir=self.directory))
        except OSError as error:
            message = f"cannot write here: {error.strerror}"
            raise StoreError(message, path=self.directory, remedy="choose a folder with --dir") from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)

    @property
    def spec(self) -> str:
        """The spec of the model; see `tensorkeep.bench.checkpoint.models`."""
        return f"openllama-3b:scale={self.scale:.10f}"

    def build(self) -> StatePair:
        """Build or load the state; StoreError if memory or disk do not suffice."""
        nbytes = parse(self.spec).nbytes if self.source is None else info(self.source).total.nbytes
        check_capacity(
            self._folder,
            disk=_COPIES_ON_DISK * nbytes + _OVERHEAD_BYTES // 8,
            memory=COPIES_IN_MEMORY * nbytes + _OVERHEAD_BYTES,
        )
        state: Any = build(self.spec, seed=_SEED) if self.source is None else load(self.source)
        self._states = StatePair(state)
        return self._states

    def compare(self, progress: Callable[[int, str], None] | None = None) -> Rounds:
        """Measure every tool in interleaved rounds; GateError if one does not load what it saved."""
        arms = tool_measurements(COMMON_TOOLS, self._states, self._folder)
        return run_rounds(arms, self.rounds, seed=_SEED, seconds=self.seconds, progress=progress)

    def verify(self) -> VerifyReport:
        """Save the state compressed, and verify it."""
        path = self._folder / "step-1000"
        save(self._states.source, path, compression="lossless")
        return verify(path)

    def damage(self) -> DamageReport:
        """Flip a bit in a copy of what `verify` saved; verify and load the copy."""
        path = self._folder / "step-1000-damaged"
        shutil.copytree(self._folder / "step-1000", path)
        flip = flip_bit(path)
        report = verify(path)
        try:
            load(path, select=[flip.name])
        except CorruptCheckpointError as error:
            return DamageReport(flip, report, error.message)
        raise AssertionError("a damaged block was loaded")  # pragma: no cover
