"""The schema of a results file, which may come from a stranger, and reading and writing it."""

import errno
import gzip
import io
import math
import os
import stat
import zlib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tensorkeep.errors import CorruptCheckpointError, NotFoundError, StoreError, UnsupportedError, UsageError
from tensorkeep.ext import prepared
from tensorkeep.ext.storage import replace_file

# ``docs/reference/results.md`` explains every field. Times of day are UTC in ISO 8601, sizes are bytes.
KIND = "tensorkeep-results"
# 2 has more verdicts than 1, which earlier versions would call corrupt.
SCHEMA = 2
# A cell that fails a gate did something else than it should: it loaded other values, or its technique was not active.
Status = Literal["ok", "planned", "gate", "failed", "timeout", "memory", "disk", "not-run"]
Role = Literal["baseline", "control", "arm"]
# The verdicts on an arm that was compared with the baseline often enough, on a state that is large enough.
# `tensorkeep_bench.analysis.samples` has their rules. Earlier versions used "within noise" for "undecided" as well.
Judged = Literal["helps", "hurts", "about the same", "within noise", "undecided"]
Verdict = Literal["baseline", "control", Judged, "too few runs", "too small", "wrong result", "not compared", "not run"]
ClaimVerdict = Literal[
    "reproduced",
    "same direction",
    "same direction, larger",
    "same direction, smaller",
    "confounded",
    "undecided",
    "not reproduced",
    "not run",
]
PlaceKind = Literal["arm", "control", "base", "full", "alone", "without", "step", "point", "combination"]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Index = Annotated[int, Meta(ge=0)]
Compared = Annotated[float, Meta(ge=1e-100, le=1e100)]  # a figure with a ratio to another one, in either direction
PlotName = Literal["three-way", "comparison", "impact", "gains", "pareto", "steps", "effects", "interactions"]
FileStem = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,80}\Z")]  # of a file that a report writes
Settings = dict[str, Any]  # JSON values that only the workload interprets


class Measure(msgspec.Struct, frozen=True):
    """A measured quantity; its name is a key of `CellRecord.figures`."""

    name: Name
    label: Name  # in tables and plots, such as "durable save"
    unit: Annotated[str, Meta(max_length=200)]  # "s", "B", "tokens/s", "nats" or "1"
    about: str = ""
    better: Literal["lower", "higher"] = "lower"
    primary: bool = False  # whether arms get a verdict on it, and plots show it


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """A position in the experiment's design; ``arm`` and ``control`` stand outside a design."""

    # ``base`` has no change, ``full`` has all changes, ``alone`` has one, ``without`` has all but one, ``step`` has all
    # up to one, ``combination`` has several. ``point`` is a point of a factorial design.
    kind: PlaceKind
    change: str = ""  # of alone, without and step
    index: Index = 0  # of step, from 1
    levels: dict[str, str] = {}  # of point: factor to level
    changes: tuple[str, ...] = ()  # of combination


class Arm(msgspec.Struct, frozen=True):
    name: Name
    role: Role = "arm"  # the control is the baseline measured again under another name (A/A)
    settings: Settings = {}
    about: str = ""
    places: tuple[Place, ...] = (Place("arm"),)  # its own place, then places of arms with the same settings
    slow: bool = False  # whether it works on the smaller model, if the experiment has one
    use: str = ""  # the command or the call by which a user does what it does


class CellRecord(msgspec.Struct, frozen=True):
    arm: str
    block: Index
    status: Status
    order: Index = 0  # position in the whole run
    reason: str | None = None  # why it has no figures
    command: tuple[str, ...] = ()  # runs the cell again
    started: str | None = None
    seconds: float | None = None  # wall clock of the process
    amount: float | None = None  # raw bytes that it worked on
    subject: str | None = None
    figures: dict[str, float | None] = {}  # by measure, in the measure's unit
    clocks: dict[str, float | None] = {}  # seconds of import, build, gate, which no figure contains
    observed: dict[str, str] = {}  # technique -> what the first training step showed
    # By measure: (this cell, baseline) for each turn, where both processes took turns.
    turns: dict[str, tuple[tuple[Compared, Compared], ...]] = {}
    # Of training: step, and mean training loss of the steps since the one before. Earlier files do not have it.
    losses: tuple[tuple[Index, float], ...] = ()


class ArmStatistics(msgspec.Struct, frozen=True):
    n: int = 0
    mean: float | None = None
    std: float | None = None  # n - 1
    median: float | None = None
    low: float | None = None
    high: float | None = None
    per_byte: float | None = None  # median of figure / amount
    gain: float | None = None  # how many times better than the baseline: geometric mean over the blocks
    gain_low: float | None = None
    gain_high: float | None = None
    change_percent: float | None = (
        None  # the gain as a percentage: how much lower (of a rate: higher) than the baseline
    )
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None  # the smallest gain that so many blocks would have shown
    # None for measures that are not primary.
    verdict: Verdict | None = None
    reason: str | None = None
    blocks: int = 0  # that the gain was computed from


class Noise(msgspec.Struct, frozen=True):
    """The 95% interval of the A/A control's gain over ``n`` blocks; ``floor`` is the larger distance from 1."""

    low: float
    high: float
    floor: float
    n: int


class StackStep(msgspec.Struct, frozen=True):
    """One change on the way from the base to the full stack, in one measure; ``notes`` give the reasons for None."""

    change: str
    arm: str
    measure: str
    gain_from_previous: float | None = None
    gain_from_previous_low: float | None = None
    gain_from_previous_high: float | None = None
    gain_from_base: float | None = None
    fraction: float | None = None  # of the total log gain
    alone: float | None = None  # gain of this change added alone to the base
    without: float | None = None  # how many times worse the full stack is without it
    notes: tuple[str, ...] = ()


class Effect(msgspec.Struct, frozen=True):
    factors: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2)]
    measure: str
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    aliases: tuple[tuple[str, ...], ...] = ()  # effects that it cannot be separated from


class Interaction(msgspec.Struct, frozen=True):
    changes: tuple[str, ...]
    arm: str
    measure: str
    gain: float | None = None
    # The product of the gains of the single changes; ``ratio`` is ``gain`` over it.
    product: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Caution(msgspec.Struct, frozen=True):
    text: str
    remedy: str = ""


class Recommendation(msgspec.Struct, frozen=True, rename={"purpose": "for"}):
    # ``arm`` is None if no arm is better than the baseline.
    purpose: str
    text: str
    arm: str | None = None
    settings: Settings = {}
    use: str = ""  # of the arm


class Advice(msgspec.Struct, frozen=True):
    """An arm to try, or to avoid; an arm to try has its command or call."""

    arm: str
    text: str
    use: str = ""


class Claim(msgspec.Struct, frozen=True):
    id: str
    claim: str
    theirs: str
    ours: str
    verdict: ClaimVerdict
    reason: str
    gain: float | None = None
    gain_low: float | None = None
    gain_high: float | None = None


class ResultsSummary(msgspec.Struct, frozen=True):
    """Everything that is computed from the cells, and can be computed again."""

    arms: dict[str, dict[str, ArmStatistics]] = {}  # arm -> measure
    # Of checkpoints: arm -> save_mean, save_std, load_mean, load_std (seconds; cold loads where there are some),
    # size_mean, size_std (GiB). The same figures as in `arms`, by the names of isolated-optimisation suites, and scaled
    # to the whole state.
    tests: dict[str, dict[str, float | None]] = {}
    noise: dict[str, Noise | None] = {}  # by measure
    steps: tuple[StackStep, ...] = ()
    effects: tuple[Effect, ...] = ()
    interactions: tuple[Interaction, ...] = ()
    warnings: tuple[Caution, ...] = ()
    recommendations: tuple[Recommendation, ...] = ()
    try_first: tuple[Advice, ...] = ()  # in this order
    avoid: tuple[Advice, ...] = ()
    claims: tuple[Claim, ...] = ()
    key: str = ""  # a sentence if one of several single changes saves much more time than the others


class Limits(msgspec.Struct, frozen=True):
    """The most that one cell may use: seconds of wall clock, bytes of memory; None for no limit."""

    seconds: int | None = None
    memory_bytes: int | None = None


class Omitted(msgspec.Struct, frozen=True):
    place: Place
    reason: str


class Experiment(msgspec.Struct, frozen=True):
    """The experiment as it was run, with all defaults filled in."""

    name: str
    workload: str  # "checkpoint" or "training"
    title: str = ""
    about: str = ""
    design: str = "arms"  # one-at-a-time, leave-one-out, steps, factorial, fractional or combinations
    baseline: str | None = None
    runs: int | None = None  # the largest number of blocks
    seed: int | None = None  # of the order of the arms in each block
    control: bool = False  # whether the baseline is measured again as an A/A control
    # An arm is not measured again once the 95% interval of its gain in the first primary measure spans no more.
    precision: float | None = None
    budget: float | None = None  # seconds; no block begins that would end later
    limits: Limits = Limits()
    factors: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}  # to levels, the base's first
    aliases: tuple[tuple[tuple[str, ...], ...], ...] = ()  # groups of effects that cannot be separated
    omitted: tuple[Omitted, ...] = ()
    settings: Settings = {}
    # Plot to the further name under which reports write it as PNG, beside the page.
    figure_names: dict[str, FileStem] = {}


class Subject(msgspec.Struct, frozen=True):
    description: str = ""
    tensors: int | None = None
    bytes: int | None = None
    dtypes: dict[str, int] = {}  # to bytes


class Results(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    schema: int = SCHEMA
    kind: str = KIND
    tensorkeep: str = ""  # version
    command: str = ""
    started: str = ""
    finished: str | None = None  # None until the run is over
    complete: bool = False  # whether every cell has an outcome
    experiment: Experiment
    environment: dict[str, Any] = {}  # as `tensorkeep.machine.describe` returns it
    subject: Subject = Subject()
    measures: tuple[Measure, ...]  # in the order of tables
    arms: Annotated[tuple[Arm, ...], Meta(min_length=1, max_length=2000)]
    cells: Annotated[tuple[CellRecord, ...], Meta(max_length=200_000)]
    summary: ResultsSummary = ResultsSummary()

    @cached_property
    def cells_by_arm(self) -> dict[str, list[CellRecord]]:
        found: dict[str, list[CellRecord]] = {arm.name: [] for arm in self.arms}
        for cell in sorted(self.cells, key=lambda cell: (cell.block, cell.order)):
            found[cell.arm].append(cell)
        return found

    @property
    def baseline(self) -> str | None:
        return next((arm.name for arm in self.arms if arm.role == "baseline"), None)

    @property
    def blocks(self) -> int:
        return len({cell.block for cell in self.cells})

    def figures(self, arm: str, measure: str) -> dict[int, float]:
        """Return the finite figures of an arm's ``ok`` cells in a measure, by block."""
        return {
            cell.block: value
            for cell in self.cells_by_arm.get(arm, ())
            if cell.status == "ok" and (value := cell.figures.get(measure)) is not None and 0 <= value < math.inf
        }

    def ratios(self, above: tuple[str, str], below: tuple[str, str]) -> list[float]:
        """Return the ratio of two figures, each given by arm and measure, in each block that has both."""
        numerators, denominators = self.figures(*above), self.figures(*below)
        # Only within a block: what slows a block down slows both sides of the ratio.
        return [numerators[block] / denominators[block] for block in sorted(numerators.keys() & denominators.keys())]

    @property
    def failures(self) -> dict[str, str]:
        # Reversed, because the last one wins in a dict: the first failure has the cause, later ones only repeat it.
        return {cell.arm: cell.reason or "" for cell in reversed(self.cells) if cell.status not in ("ok", "planned")}

    def ran(self, arm: str) -> bool:
        return any(cell.status == "ok" for cell in self.cells_by_arm[arm])

    def measure(self, name: str) -> Measure | None:
        return next((measure for measure in self.measures if measure.name == name), None)

    def primary(self) -> list[Measure]:
        """Return the primary measures that at least one cell has a figure for."""
        taken = {name for cell in self.cells for name, value in cell.figures.items() if value is not None}
        return [measure for measure in self.measures if measure.primary and measure.name in taken]

    def statistics(self, arm: str, measure: str) -> ArmStatistics:
        return self.summary.arms.get(arm, {}).get(measure) or ArmStatistics()


FILE_NAME = "results.json"
MAX_BYTES = 64 * 1024**2
MAX_DEPTH = 50
_LARGEST_INTEGER = 2**63
_GZIP_MAGIC = b"\x1f\x8b"


def read_results(path: str | os.PathLike[str], *, printable: bool = True) -> Results:
    """Read and validate ``*.json``, ``*.json.gz`` or the ``results.json`` of a folder.

    Raises NotFoundError if nothing is there; UsageError if it is a file of another kind; UnsupportedError if a later
    version wrote it, or it is too large; CorruptCheckpointError if it breaks the schema; StoreError if the operating
    system refuses.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    content = _content(file)
    try:
        # Size, depth and numbers are limited before anything is built from them. Unprintable characters, which could
        # drive a terminal, are replaced. Only a resumed run needs the texts as they are: its settings may name odd
        # paths.
        document = _checked(msgspec.json.decode(_decompressed(content)), printable)
    except (msgspec.DecodeError, ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _corrupt(file, error) from None
    # Checked before the schema: another kind of file is a mistake of the user, not a corrupt file.
    kind, schema = (document.get("kind"), document.get("schema")) if isinstance(document, dict) else (None, None)
    if kind != KIND:
        raise UsageError(
            "is not a results file of Tensorkeep", path=file, remedy="give the results.json of `tensorkeep bench`"
        )
    if not isinstance(schema, int) or schema > SCHEMA:
        message = f"has schema {schema}; this version reads up to {SCHEMA}"
        raise UnsupportedError(message, path=file, remedy="install a later Tensorkeep")
    try:
        results = msgspec.convert(document, prepared(Results))
        # The schema cannot express that names are unique and refer to arms.
        _check_references(results)
    except (msgspec.ValidationError, ValueError) as error:
        raise _corrupt(file, error) from None
    return results


def write_results(results: Results, path: Path) -> None:
    """Replace the file atomically and durably, or raise StoreError; NaN and infinity become null."""
    # An interrupted run resumes from this file, so a crash must leave the old or the new content. msgspec writes NaN
    # and infinity as null.
    document = msgspec.structs.replace(results, schema=SCHEMA)  # a resumed run may have begun with an earlier version
    replace_file(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def printable(text: str) -> str:
    """Return a text on one line, with a blank or an escape sequence for each unprintable character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


def _content(file: Path) -> bytes:
    try:
        # With O_NONBLOCK, opening a named pipe without a writer does not block.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            # A device such as /dev/zero never ends, so only regular files are read.
            content = opened.read(MAX_BYTES + 1) if regular else b""
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            remedy = "give the folder that `tensorkeep bench` wrote; a first run starts without --resume"
            raise NotFoundError("the results file does not exist", path=file, remedy=remedy) from None
        raise StoreError(f"cannot read the results: {error.strerror}", path=file) from error
    if not regular:
        raise UsageError("is not a regular file", path=file, remedy="give a results.json, or its folder")
    if len(content) > MAX_BYTES:
        raise UnsupportedError(f"is larger than {MAX_BYTES >> 20} MiB", path=file, remedy="give a results.json")
    return content


def _decompressed(content: bytes) -> bytes:
    if not content.startswith(_GZIP_MAGIC):
        return content
    # Read through a file object, which stops at the limit: a small file may expand to any size.
    with gzip.open(io.BytesIO(content)) as stream:
        expanded = stream.read(MAX_BYTES + 1)
    if len(expanded) > MAX_BYTES:
        raise ValueError(f"it expands to more than {MAX_BYTES >> 20} MiB")
    return expanded


def _checked(value: Any, clean: bool, depth: int = 0) -> Any:
    """Return JSON values, with printable texts if ``clean``; ValueError if too deep or too large."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        return printable(value) if clean else value
    if isinstance(value, dict):
        return {_checked(key, clean): _checked(item, clean, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, clean, depth + 1) for item in value]
    # msgspec decodes integers of any size, which numpy and JavaScript do not hold.
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ValueError("a number is out of range")
    return value


def _check_references(results: Results) -> None:
    arms = {arm.name for arm in results.arms}
    # Names are keys everywhere: of two equal names, one would silently take the figures of the other.
    if len(arms) < len(results.arms) or len({one.name for one in results.measures}) < len(results.measures):
        raise ValueError("two arms or two measures have the same name")
    if sum(arm.role == "baseline" for arm in results.arms) > 1:
        raise ValueError("two arms have the role of the baseline")
    # The file has the baseline in two places, which must agree.
    if results.experiment.baseline != results.baseline:
        raise ValueError(f"its baseline {results.experiment.baseline!r} is not an arm with that role")
    for cell in results.cells:
        if cell.arm not in arms:
            raise ValueError(f"a cell belongs to {cell.arm[:200]!r}, which is not an arm")


def _corrupt(file: Path, error: Exception) -> CorruptCheckpointError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
    remedy = "measure again, or use another copy of the file"
    return CorruptCheckpointError(f"is not a valid results file: {reason}", path=file, remedy=remedy)
