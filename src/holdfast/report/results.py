"""Reading a results file that nobody vouches for; ``docs/reference/results.md`` says what is in it."""

from __future__ import annotations

import errno
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from holdfast.errors import CorruptCheckpointError, NotACheckpointError, StoreError, UnsupportedError, UsageError
from holdfast.report.plain import clean

FILE_NAME = "results.json"
KIND = "holdfast-results"
SCHEMA = 1
MAX_BYTES = 64 * 1024**2
MAX_ARMS = 2000
MAX_CELLS = 200_000
MAX_NAME = 200

_AGAIN = "measure again, or take another copy of the file"

T = TypeVar("T")

Status = Literal["ok", "planned", "gate", "failed", "timeout", "memory", "disk", "not-run"]


class Measure(msgspec.Struct, frozen=True):
    """What was measured: the key of a cell's figures, what people call it, and which direction is better.

    `read_results` makes the label, the unit and the sentence about it harmless; the label is never empty.
    """

    name: str
    label: str = ""
    unit: str = "s"
    better: Literal["lower", "higher"] = "lower"
    primary: bool = False
    about: str = ""


class Arm(msgspec.Struct, frozen=True):
    """One way of doing the thing that is compared."""

    name: str
    role: Literal["baseline", "placebo", "arm"] = "arm"
    settings: dict[str, Any] = {}
    about: str = ""
    place: dict[str, Any] = {}


class Cell(msgspec.Struct, frozen=True):
    """One process: an arm in a block. ``amount`` is in raw bytes, ``seconds`` and ``clocks`` are wall clock."""

    arm: str
    block: int
    status: Status
    order: int = 0
    reason: str | None = None
    command: list[str] = []
    started: str | None = None
    seconds: float | None = None
    amount: float | None = None
    subject: str | None = None
    figures: dict[str, float | None] = {}
    clocks: dict[str, float | None] = {}


class Statistics(msgspec.Struct, frozen=True):
    """What the samples of one arm say of one measure; ``gain`` is how many times better than the baseline."""

    n: int = 0
    mean: float | None = None
    std: float | None = None
    median: float | None = None
    low: float | None = None
    high: float | None = None
    per_byte: float | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    change_percent: float | None = None
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None
    verdict: str = ""
    reason: str | None = None


class Noise(msgspec.Struct, frozen=True):
    """How far the baseline lies from itself: the 95% interval of the placebo's gain."""

    low: float | None = None
    high: float | None = None
    floor: float | None = None
    n: int = 0


class Step(msgspec.Struct, frozen=True):
    """One change on the way from the baseline to the full stack."""

    change: str
    measure: str
    arm: str = ""
    gain_from_previous: float | None = None
    gain_from_previous_low: float | None = None
    gain_from_previous_high: float | None = None
    gain_from_base: float | None = None
    share: float | None = None
    alone: float | None = None
    without: float | None = None
    notes: str | list[str] | dict[str, str | None] | None = None


class Effect(msgspec.Struct, frozen=True):
    """A main effect (one factor) or an interaction (two) of a factorial design."""

    factors: list[str]
    measure: str
    gain: float | None = None
    low: float | None = None
    high: float | None = None


class Interaction(msgspec.Struct, frozen=True):
    """What some changes do together, against the product of what each does alone."""

    changes: list[str]
    measure: str
    arm: str = ""
    gain: float | None = None
    product: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Caution(msgspec.Struct, frozen=True):
    """What a reader must know before believing the figures, and what to do about it."""

    text: str
    remedy: str | None = None


class Recommendation(msgspec.Struct, frozen=True, rename={"purpose": "for"}):
    """What to use on this machine, computed from the figures."""

    text: str
    purpose: str = "all"
    arm: str | None = None
    settings: dict[str, Any] | None = None


class Claim(msgspec.Struct, frozen=True):
    """What others reported, beside what was measured here."""

    id: str | int
    claim: str
    theirs: str | None = None
    ours: str | None = None
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None
    verdict: str = ""
    reason: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """What was computed from the cells; every part may be empty."""

    arms: dict[str, dict[str, Statistics]] = {}
    noise: dict[str, Noise | None] | None = None
    steps: list[Step] | None = None
    effects: list[Effect] | None = None
    interactions: list[Interaction] | None = None
    warnings: list[Caution] | None = None
    recommendations: list[Recommendation] | None = None
    claims: list[Claim] | None = None


class Experiment(msgspec.Struct, frozen=True):
    """The experiment as it was run."""

    name: str
    title: str | None = None
    about: str | None = None
    workload: str = ""
    design: str = ""
    baseline: str | None = None
    runs: int | None = None
    seed: int | None = None
    limits: dict[str, Any] | None = None
    factors: dict[str, Any] | None = None
    aliases: list[Any] | None = None
    settings: dict[str, Any] | None = None


class Subject(msgspec.Struct, frozen=True):
    """What was worked on."""

    description: str = ""
    tensors: int | None = None
    bytes: int | None = None
    dtypes: dict[str, int] | None = None


class Results(msgspec.Struct, frozen=True, dict=True):
    """A results file."""

    experiment: Experiment
    measures: list[Measure]
    arms: list[Arm]
    cells: list[Cell]
    holdfast: str | None = None
    command: str | None = None
    started: str | None = None
    finished: str | None = None
    complete: bool = False
    environment: dict[str, Any] | None = None
    subject: Subject | None = None
    summary: Summary | None = None

    @cached_property
    def computed(self) -> Summary:
        """The summary, or an empty one where there is none yet."""
        return self.summary or Summary()

    @cached_property
    def cells_by_arm(self) -> dict[str, list[Cell]]:
        """All cells of each arm, in the order in which they were run."""
        found: dict[str, list[Cell]] = {arm.name: [] for arm in self.arms}
        for cell in sorted(self.cells, key=lambda cell: cell.order):
            found[cell.arm].append(cell)
        return found

    @property
    def baseline(self) -> str | None:
        """Name of the arm that the others are compared with."""
        return self.experiment.baseline

    def primary(self) -> list[Measure]:
        """Return the measures that get a verdict and a plot and of which there is at least one sample."""
        taken = {name for cell in self.cells for name, value in cell.figures.items() if value is not None}
        return [measure for measure in self.measures if measure.primary and measure.name in taken]

    def statistics(self, arm: str, measure: str) -> Statistics | None:
        """Return what was computed for an arm and a measure, or None."""
        return self.computed.arms.get(arm, {}).get(measure)

    def noise(self, measure: str) -> Noise | None:
        """Return the noise floor of a measure, or None without a placebo."""
        return (self.computed.noise or {}).get(measure)


class _Head(msgspec.Struct):
    kind: str | None = None
    schema: int | None = None


def read_results(path: str | os.PathLike[str]) -> Results:
    """Return the results of a run, checked.

    Parameters
    ----------
    path : path-like
        A results file, or the folder that holds ``results.json``.

    Raises
    ------
    NotACheckpointError
        If there is nothing there.
    UsageError
        If it is some other file.
    UnsupportedError
        If a later Holdfast wrote it, or it is too large.
    CorruptCheckpointError
        If it breaks the rules of a results file.
    StoreError
        If the operating system refuses.
    """
    file, content = _read(Path(path))
    head = _decode(content, _Head, file)
    if head.kind != KIND:
        raise UsageError(
            "is no results file of Holdfast", path=file, remedy="give the results.json that `holdfast bench` wrote"
        )
    if head.schema is None or head.schema > SCHEMA:
        raise UnsupportedError(
            f"has schema {head.schema}, this Holdfast reads up to {SCHEMA}",
            path=file,
            remedy="install a later Holdfast: pip install -U holdfast",
        )
    results = _decode(content, Results, file)
    problem = _problem(results)
    if problem:
        raise CorruptCheckpointError(f"is no valid results file: {problem}", path=file, remedy=_AGAIN)
    return msgspec.structs.replace(results, measures=[_harmless(measure) for measure in results.measures])


def _harmless(measure: Measure) -> Measure:
    label, unit = clean(measure.label or measure.name), clean(measure.unit)
    return msgspec.structs.replace(measure, label=label[:MAX_NAME], unit=unit[:MAX_NAME], about=clean(measure.about))


def _read(path: Path) -> tuple[Path, bytes]:
    file = path / FILE_NAME if path.is_dir() else path
    try:
        # A named pipe must not keep the reader waiting for ever.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise UsageError(
                    "is no regular file", path=file, remedy="give a results.json, or the folder it lies in"
                )
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            remedy = "give the folder that `holdfast bench` wrote, or its results.json"
            raise NotACheckpointError("there is no results file", path=file, remedy=remedy) from None
        raise StoreError(f"cannot read the results: {error.strerror}", path=file) from error
    if len(content) > MAX_BYTES:
        raise UnsupportedError(f"is larger than {MAX_BYTES >> 20} MiB", path=file, remedy="this is no results file")
    return file, content


def _decode(content: bytes, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptCheckpointError(f"is no valid results file: {said}", path=file, remedy=_AGAIN) from None


def _problem(results: Results) -> str | None:
    """Return what is wrong with the document as a whole, which no type can say."""
    names = [arm.name for arm in results.arms]
    known = set(names)
    measures = [measure.name for measure in results.measures]
    if len(names) > MAX_ARMS or len(results.cells) > MAX_CELLS:
        return f"it claims {len(names)} arms and {len(results.cells)} cells"
    if not names:
        return "it has no arms"
    if len(known) < len(names) or len(set(measures)) < len(measures):
        return "two arms or two measures have the same name"
    for name in [*names, *measures]:
        if not 0 < len(name) <= MAX_NAME:
            return f"a name has {len(name)} characters; 1 to {MAX_NAME} are allowed"
    if results.baseline is not None and results.baseline not in known:
        return f"its baseline {results.baseline[:MAX_NAME]!r} is no arm"
    for cell in results.cells:
        if cell.arm not in known:
            return f"a cell belongs to {cell.arm[:MAX_NAME]!r}, which is no arm"
    return None
