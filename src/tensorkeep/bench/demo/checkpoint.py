"""``tensorkeep demo``: compare tools, verify a checkpoint, flip a bit in a copy of it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.bench.analysis.statistics import Description, describe
from tensorkeep.bench.checkpoint.measure import LOADS, SAVE, STORED
from tensorkeep.bench.checkpoint.models import build, parse
from tensorkeep.bench.checkpoint.probes import check_capacity
from tensorkeep.bench.checkpoint.state_pair import COPIES_IN_MEMORY, StatePair
from tensorkeep.bench.checkpoint.tools.registry import COMMON_TOOLS
from tensorkeep.bench.run.rounds import Rounds
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

_SAVED = "step-1000"
SEED = 20_240_601
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
    """Return the figures by measure and arm, without measures that no arm has."""
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

    Raises UsageError if it holds no tensor with data.
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


@contextmanager
def temporary_folder(directory: Path) -> Iterator[Path]:
    """Make a folder in ``directory``, and remove it with its content at the end; StoreError if it cannot be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="tensorkeep-demo-", dir=directory)
    except OSError as error:
        message = f"cannot write here: {error.strerror}"
        raise StoreError(message, path=directory, remedy="choose a folder with --dir") from error
    with folder as path:
        yield Path(path)


def build_states(folder: Path, source: Path | None, scale: float) -> StatePair:
    """Load a checkpoint, or build OpenLLaMA-3B at a scale; StoreError if memory or disk do not suffice."""
    spec = f"openllama-3b:scale={scale:.10f}"
    nbytes = parse(spec).nbytes if source is None else info(source).total.nbytes
    disk, memory = _COPIES_ON_DISK * nbytes, COPIES_IN_MEMORY * nbytes
    check_capacity(folder, disk=disk + _OVERHEAD_BYTES // 8, memory=memory + _OVERHEAD_BYTES)
    return StatePair(build(spec, seed=SEED) if source is None else load(source))


def save_and_verify(folder: Path, states: StatePair) -> VerifyReport:
    """Save the state compressed, and verify it."""
    save(states.source, folder / _SAVED, compression="lossless")
    return verify(folder / _SAVED)


def damage_and_verify(folder: Path) -> DamageReport:
    """Flip a bit in a copy of what `save_and_verify` saved; verify and load the copy."""
    path = folder / f"{_SAVED}-damaged"
    shutil.copytree(folder / _SAVED, path)
    flip = flip_bit(path)
    report = verify(path)
    try:
        load(path, select=[flip.name])
    except CorruptCheckpointError as error:
        return DamageReport(flip, report, error.message)
    raise AssertionError("a damaged block was loaded")  # pragma: no cover
