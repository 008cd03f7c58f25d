"""The results file of a bench run: its schema, its validated reading, and its atomic writing.

The structs below are the only definition of the schema: the bench writes them, the analysis fills the summary, and the
report reads them. ``docs/reference/results.md`` explains every field.

A results file may come from a stranger. `read_results` limits its size and depth, validates every field and number, and
replaces unprintable characters, which could otherwise drive a terminal.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tensorkeep.errors import CorruptCheckpointError, NotFoundError, StoreError, UnsupportedError, UsageError
from tensorkeep.io.files import sync_directory

FILE_NAME = "results.json"
KIND = "tensorkeep-results"
SCHEMA = 1
MAX_BYTES = 64 * 1024**2
MAX_DEPTH = 50
_LARGEST_INTEGER = 2**63

Status = Literal["ok", "planned", "gate", "failed", "timeout", "memory", "disk", "not-run"]
Role = Literal["baseline", "control", "arm"]
Verdict = Literal["baseline", "control", "helps", "hurts", "within noise", "too few runs", "not run"]
ClaimVerdict = Literal["reproduced", "not reproduced", "confounded", "not run"]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Index = Annotated[int, Meta(ge=0)]
Settings = dict[str, Any]
"""JSON values whose meaning only the workload knows."""


class Measure(msgspec.Struct, frozen=True):
    """What is measured.

    Attributes
    ----------
    name : str
        Key of a cell's figures.
    label : str
        Name in tables and plots, such as ``durable save``.
    unit : str
        ``"s"``, ``"B"``, ``"tokens/s"``, ``"nats"`` or ``"1"``.
    about : str
        One sentence.
    better : str
        Which direction is better: ``"lower"`` or ``"higher"``.
    primary : bool
        Whether arms get a verdict on it, and plots show it.
    """

    name: Name
    label: Name
    unit: Annotated[str, Meta(max_length=200)]
    about: str = ""
    better: Literal["lower", "higher"] = "lower"
    primary: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether larger figures are better."""
        return self.better == "higher"


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """A position in the experiment's design; the fields that a kind does not use keep their defaults.

    Attributes
    ----------
    kind : str
        ``"arm"`` and ``"control"`` stand alone; ``"base"`` and ``"full"`` have none and all of the changes; ``"alone"``
        and ``"without"`` have only one change and all but one; ``"step"`` has all changes up to one; ``"point"`` is a
        cell of a factorial design; ``"combination"`` has several changes.
    change : str
        Of ``alone``, ``without`` and ``step``.
    index : int
        Of ``step``, from 1.
    levels : dict of str to str
        Of ``point``: factor to level.
    changes : tuple of str
        Of ``combination``.
    """

    kind: Literal["arm", "control", "base", "full", "alone", "without", "step", "point", "combination"]
    change: str = ""
    index: Index = 0
    levels: dict[str, str] = {}
    changes: tuple[str, ...] = ()


class Arm(msgspec.Struct, frozen=True):
    """One of the alternatives that are compared.

    Attributes
    ----------
    name : str
    role : str
        ``"baseline"``, ``"control"`` (the A/A control: the baseline measured again under another name) or ``"arm"``.
    settings : dict
        The workload's own.
    about : str
        One sentence, or empty.
    places : tuple of Place
        Where the arm stands in the design: its own place, then the others whose settings are the same.
    slow : bool
        Whether it works on the smaller model, if the experiment has one.
    """

    name: Name
    role: Role = "arm"
    settings: Settings = {}
    about: str = ""
    places: tuple[Place, ...] = (Place("arm"),)
    slow: bool = False


class Cell(msgspec.Struct, frozen=True):
    """One process: one arm in one block.

    Attributes
    ----------
    arm : str
    block, order : int
        The block, and the position in the whole run; both from 0.
    status : str
    reason : str or None
        Why the cell has no figures; None where it has.
    command : tuple of str
        Runs the cell again.
    started : str or None
        UTC, ISO 8601.
    seconds : float or None
        Wall clock of the process.
    amount : float or None
        Raw bytes that the cell worked on.
    subject : str or None
        Description of what the cell worked on.
    figures : dict of str to float or None
        By measure, in the measure's unit.
    clocks : dict of str to float or None
        Seconds of import, build, gate: what no figure contains.
    observed : dict of str to str
        Technique to a sentence: what the first training step showed of it.
    """

    arm: str
    block: Index
    status: Status
    order: Index = 0
    reason: str | None = None
    command: tuple[str, ...] = ()
    started: str | None = None
    seconds: float | None = None
    amount: float | None = None
    subject: str | None = None
    figures: dict[str, float | None] = {}
    clocks: dict[str, float | None] = {}
    observed: dict[str, str] = {}


class Statistics(msgspec.Struct, frozen=True):
    """What the samples of one arm show in one measure; ``gain`` is how many times better than the baseline.

    Every field is explained in ``docs/reference/results.md``. ``verdict`` and ``reason`` are None for measures that are
    not primary.
    """

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
    verdict: Verdict | None = None
    reason: str | None = None


class Noise(msgspec.Struct, frozen=True):
    """The 95% interval of the A/A control's gain over ``n`` blocks; ``floor`` is its larger distance from 1."""

    low: float
    high: float
    floor: float
    n: int


class Step(msgspec.Struct, frozen=True):
    """One change on the way from the base to the full stack, in one measure."""

    change: str
    arm: str
    measure: str
    gain_from_previous: float | None = None
    gain_from_previous_low: float | None = None
    gain_from_previous_high: float | None = None
    gain_from_base: float | None = None
    fraction: float | None = None
    alone: float | None = None
    without: float | None = None
    notes: tuple[str, ...] = ()


class Effect(msgspec.Struct, frozen=True):
    """The main effect of one factor, or the interaction of two, in one measure."""

    factors: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2)]
    measure: str
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    aliases: tuple[tuple[str, ...], ...] = ()


class Interaction(msgspec.Struct, frozen=True):
    """What a combination of changes gains, against the product of the gains of each change alone."""

    changes: tuple[str, ...]
    arm: str
    measure: str
    gain: float | None = None
    product: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Caution(msgspec.Struct, frozen=True):
    """What a reader must know before believing the figures, and the next step."""

    text: str
    remedy: str = ""


class Recommendation(msgspec.Struct, frozen=True, rename={"purpose": "for"}):
    """What to use on this machine; ``arm`` is None where nothing is better than the baseline."""

    purpose: str
    text: str
    arm: str | None = None
    settings: Settings = {}


class Claim(msgspec.Struct, frozen=True):
    """A published claim beside what was measured here."""

    id: str
    claim: str
    theirs: str
    ours: str
    verdict: ClaimVerdict
    reason: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None


class Summary(msgspec.Struct, frozen=True):
    """Everything that is computed from the cells, and can be computed again."""

    arms: dict[str, dict[str, Statistics]] = {}
    noise: dict[str, Noise | None] = {}
    steps: tuple[Step, ...] = ()
    effects: tuple[Effect, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    warnings: tuple[Caution, ...] = ()
    recommendations: tuple[Recommendation, ...] = ()
    claims: tuple[Claim, ...] = ()


class Limits(msgspec.Struct, frozen=True):
    """The most that one cell may use: seconds of wall clock, bytes of memory; None for no limit."""

    seconds: int | None = None
    memory_bytes: int | None = None


class Omitted(msgspec.Struct, frozen=True):
    """A place of the design that has no arm, and why."""

    place: Place
    reason: str


class Experiment(msgspec.Struct, frozen=True):
    """The experiment as it was run, with all defaults filled in.

    Attributes
    ----------
    name, title, about : str
    workload : str
        ``"checkpoint"`` or ``"training"``.
    design : str
        ``"arms"``, ``"one-at-a-time"``, ``"leave-one-out"``, ``"steps"``, ``"factorial"``, ``"fractional"`` or
        ``"combinations"``.
    baseline : str or None
        The arm that the others are compared with.
    runs : int
        Number of blocks.
    seed : int
        Of the order of the arms in each block.
    control : bool
        Whether the baseline is measured again as an A/A control.
    limits : Limits
    factors : dict of str to tuple of str
        Factor to its levels, the base's first; empty unless the design is factorial or fractional.
    aliases : tuple
        Of fractional designs: groups of effects that cannot be separated; an effect is the tuple of its factors.
    omitted : tuple of Omitted
    settings : dict
        The workload's own.
    """

    name: str
    workload: str
    title: str = ""
    about: str = ""
    design: str = "arms"
    baseline: str | None = None
    runs: int | None = None
    seed: int | None = None
    control: bool = False
    limits: Limits = Limits()
    factors: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}
    aliases: tuple[tuple[tuple[str, ...], ...], ...] = ()
    omitted: tuple[Omitted, ...] = ()
    settings: Settings = {}


class Subject(msgspec.Struct, frozen=True):
    """What the cells work on: a sentence, the number of tensors, raw bytes, and bytes by dtype."""

    description: str = ""
    tensors: int | None = None
    bytes: int | None = None
    dtypes: dict[str, int] = {}


class Results(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """A results file. ``finished`` is None until the run is over; ``complete`` means that every cell has an outcome."""

    schema: int = SCHEMA
    kind: str = KIND
    tensorkeep: str = ""
    command: str = ""
    started: str = ""
    finished: str | None = None
    complete: bool = False
    experiment: Experiment
    environment: dict[str, Any] = {}
    subject: Subject = Subject()
    measures: tuple[Measure, ...]
    arms: Annotated[tuple[Arm, ...], Meta(min_length=1, max_length=2000)]
    cells: Annotated[tuple[Cell, ...], Meta(max_length=200_000)]
    summary: Summary = Summary()

    @cached_property
    def cells_by_arm(self) -> dict[str, list[Cell]]:
        """All cells of each arm, by block."""
        found: dict[str, list[Cell]] = {arm.name: [] for arm in self.arms}
        for cell in sorted(self.cells, key=lambda cell: (cell.block, cell.order)):
            found[cell.arm].append(cell)
        return found

    @property
    def baseline(self) -> str | None:
        """Name of the arm that the others are compared with; None where the experiment has none."""
        return next((arm.name for arm in self.arms if arm.role == "baseline"), None)

    def ran(self, arm: str) -> bool:
        """Return whether a cell of the arm has figures."""
        return any(cell.status == "ok" for cell in self.cells_by_arm[arm])

    def measure(self, name: str) -> Measure | None:
        """Return the measure of this name, or None."""
        return next((measure for measure in self.measures if measure.name == name), None)

    def primary(self) -> list[Measure]:
        """Return the primary measures that at least one cell has a figure of."""
        taken = {name for cell in self.cells for name, value in cell.figures.items() if value is not None}
        return [measure for measure in self.measures if measure.primary and measure.name in taken]

    def statistics(self, arm: str, measure: str) -> Statistics:
        """Return the summary of an arm in a measure; an empty one where there is none."""
        return self.summary.arms.get(arm, {}).get(measure) or Statistics()


def read_results(path: str | os.PathLike[str], *, printable: bool = True) -> Results:
    """Return the results of a run, validated.

    Parameters
    ----------
    path : path-like
        A results file, or the folder that holds ``results.json``.
    printable : bool, optional
        Replace every character that is not printable. Without it, texts are as the file has them: only for a run that
        is resumed, whose settings may name odd paths.

    Raises
    ------
    NotFoundError
        If nothing is there.
    UsageError
        If it is a file of another kind.
    UnsupportedError
        If a later version wrote it, or it is too large.
    CorruptCheckpointError
        If it breaks the schema.
    StoreError
        If the operating system refuses.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    content = _content(file)
    try:
        document = _checked(msgspec.json.decode(content), printable)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _corrupt(file, error) from None
    kind, schema = (document.get("kind"), document.get("schema")) if isinstance(document, dict) else (None, None)
    if kind != KIND:
        raise UsageError(
            "is not a results file of Tensorkeep", path=file, remedy="give the results.json of `tensorkeep bench`"
        )
    if not isinstance(schema, int) or schema > SCHEMA:
        message = f"has schema {schema}; this version reads up to {SCHEMA}"
        raise UnsupportedError(message, path=file, remedy="install a later Tensorkeep")
    try:
        results = msgspec.convert(document, Results)
        _check_references(results)
    except (msgspec.ValidationError, ValueError) as error:
        raise _corrupt(file, error) from None
    return results


def write_results(results: Results, path: Path) -> None:
    """Replace the file atomically and durably; numbers that are not finite become null.

    Raises
    ------
    StoreError
        If the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.absolute().parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write the results: {error.strerror}", path=path) from error


def printable(text: str) -> str:
    """Return a text on one line, every unprintable character replaced by a blank or its escape sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


def _content(file: Path) -> bytes:
    try:
        # O_NONBLOCK: opening a named pipe must not block.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = opened.read(MAX_BYTES + 1) if regular else b""
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            remedy = "give the folder that `tensorkeep bench` wrote; a first run starts without --resume"
            raise NotFoundError("there is no results file", path=file, remedy=remedy) from None
        raise StoreError(f"cannot read the results: {error.strerror}", path=file) from error
    if not regular:
        raise UsageError("is not a regular file", path=file, remedy="give a results.json, or its folder")
    if len(content) > MAX_BYTES:
        raise UnsupportedError(f"is larger than {MAX_BYTES >> 20} MiB", path=file, remedy="give a results.json")
    return content


def _checked(value: Any, clean: bool, depth: int = 0) -> Any:
    """Return JSON values with printable texts, if asked; raise ValueError if they are too deep or too large."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        return printable(value) if clean else value
    if isinstance(value, dict):
        return {_checked(key, clean): _checked(item, clean, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, clean, depth + 1) for item in value]
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ValueError("a number is out of range")
    return value


def _check_references(results: Results) -> None:
    """Raise ValueError if names are ambiguous or refer to nothing."""
    arms = {arm.name for arm in results.arms}
    if len(arms) < len(results.arms) or len({one.name for one in results.measures}) < len(results.measures):
        raise ValueError("two arms or two measures have the same name")
    if sum(arm.role == "baseline" for arm in results.arms) > 1:
        raise ValueError("two arms have the role of the baseline")
    if results.experiment.baseline != results.baseline:
        raise ValueError(f"its baseline {results.experiment.baseline!r} is not an arm with that role")
    for cell in results.cells:
        if cell.arm not in arms:
            raise ValueError(f"a cell belongs to {cell.arm[:200]!r}, which is not an arm")


def _corrupt(file: Path, error: Exception) -> CorruptCheckpointError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
    remedy = "measure again, or use another copy of the file"
    return CorruptCheckpointError(f"is not a valid results file: {reason}", path=file, remedy=remedy)
