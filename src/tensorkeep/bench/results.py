"""The schema of a results file.

`tensorkeep.bench.results_file` validates every field against these structs. ``docs/reference/results.md`` explains them
at length. All times of day are UTC, ISO 8601; all sizes are bytes.
"""

from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

KIND = "tensorkeep-results"
SCHEMA = 1

Status = Literal["ok", "planned", "gate", "failed", "timeout", "memory", "disk", "not-run"]
Role = Literal["baseline", "control", "arm"]
Judged = Literal["helps", "hurts", "about the same", "within noise"]
"""The verdicts on an arm that was compared with the baseline often enough, on a state that is large enough."""
Verdict = Literal["baseline", "control", Judged, "too few runs", "too small", "not run"]
ClaimVerdict = Literal["reproduced", "not reproduced", "confounded", "not run"]
PlaceKind = Literal["arm", "control", "base", "full", "alone", "without", "step", "point", "combination"]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Index = Annotated[int, Meta(ge=0)]
Settings = dict[str, Any]
"""JSON values that only the workload interprets."""


class Measure(msgspec.Struct, frozen=True):
    """What is measured: a key of each cell's figures."""

    name: Name
    label: Name  # in tables and plots, such as "durable save"
    unit: Annotated[str, Meta(max_length=200)]  # "s", "B", "tokens/s", "nats" or "1"
    about: str = ""
    better: Literal["lower", "higher"] = "lower"
    primary: bool = False  # whether arms get a verdict on it, and plots show it


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """A position in the experiment's design.

    ``arm`` and ``control`` stand outside a design. ``base`` and ``full`` have none and all of the changes, ``alone``
    and ``without`` have one change and all but one, ``step`` has all changes up to one, ``combination`` has several,
    and ``point`` is a point of a factorial design.
    """

    kind: PlaceKind
    change: str = ""  # of alone, without and step
    index: Index = 0  # of step, from 1
    levels: dict[str, str] = {}  # of point: factor to level
    changes: tuple[str, ...] = ()  # of combination


class Arm(msgspec.Struct, frozen=True):
    """One of the alternatives that are compared."""

    name: Name
    role: Role = "arm"  # the control is the baseline measured again under another name (A/A)
    settings: Settings = {}
    about: str = ""
    places: tuple[Place, ...] = (Place("arm"),)  # its own, then those of other arms with the same settings
    slow: bool = False  # whether it works on the smaller model, if the experiment has one


class Cell(msgspec.Struct, frozen=True):
    """One process: one arm in one block."""

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
    observed: dict[str, str] = {}  # technique to what the first training step showed of it
    # By measure: this cell's figure and the baseline's, again and again, in processes that take turns.
    turns: dict[str, tuple[tuple[float, float], ...]] = {}
    # Of training: step, and mean training loss of the steps since the one before. Earlier files do not have it.
    losses: tuple[tuple[Index, float], ...] = ()


class Statistics(msgspec.Struct, frozen=True):
    """The statistics of one arm in one measure; the verdict is None for measures that are not primary."""

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
    change_percent: float | None = None  # how much lower (of a rate: higher) the mean is than the baseline's
    p: float | None = None
    p_holm: float | None = None
    detectable: float | None = None  # the smallest gain that so many blocks would have shown
    verdict: Verdict | None = None
    reason: str | None = None


class Noise(msgspec.Struct, frozen=True):
    """The 95% interval of the A/A control's gain over ``n`` blocks; ``floor`` is its larger distance from 1."""

    low: float
    high: float
    floor: float
    n: int


class Step(msgspec.Struct, frozen=True):
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
    """The main effect of one factor, or the interaction of two, in one measure."""

    factors: Annotated[tuple[str, ...], Meta(min_length=1, max_length=2)]
    measure: str
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    aliases: tuple[tuple[str, ...], ...] = ()  # effects that it cannot be separated from


class Interaction(msgspec.Struct, frozen=True):
    """The gain of a combination of changes, the product of their single gains, and the ratio of both."""

    changes: tuple[str, ...]
    arm: str
    measure: str
    gain: float | None = None
    product: float | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Caution(msgspec.Struct, frozen=True):
    """A warning about the figures, with a remedy."""

    text: str
    remedy: str = ""


class Recommendation(msgspec.Struct, frozen=True, rename={"purpose": "for"}):
    """A recommendation for this machine; ``arm`` is None if no arm is better than the baseline."""

    purpose: str
    text: str
    arm: str | None = None
    settings: Settings = {}


class Claim(msgspec.Struct, frozen=True):
    """A published claim and the result measured here."""

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

    arms: dict[str, dict[str, Statistics]] = {}  # arm -> measure
    noise: dict[str, Noise | None] = {}  # by measure
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
    budget: int | None = None  # seconds; no block begins that would end later
    limits: Limits = Limits()
    factors: Annotated[dict[str, tuple[str, ...]], Meta(max_length=64)] = {}  # to levels, the base's first
    aliases: tuple[tuple[tuple[str, ...], ...], ...] = ()  # groups of effects that cannot be separated
    omitted: tuple[Omitted, ...] = ()
    settings: Settings = {}


class Subject(msgspec.Struct, frozen=True):
    """What the cells work on."""

    description: str = ""
    tensors: int | None = None
    bytes: int | None = None
    dtypes: dict[str, int] = {}  # to bytes


class Results(msgspec.Struct, frozen=True, dict=True, kw_only=True):
    """A results file."""

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

    @property
    def blocks(self) -> int:
        """How many blocks have cells."""
        return len({cell.block for cell in self.cells})

    def ran(self, arm: str) -> bool:
        """Return whether a cell of the arm has figures."""
        return any(cell.status == "ok" for cell in self.cells_by_arm[arm])

    def measure(self, name: str) -> Measure | None:
        """Return the measure of this name, or None."""
        return next((measure for measure in self.measures if measure.name == name), None)

    def primary(self) -> list[Measure]:
        """Return the primary measures of which at least one cell has a figure."""
        taken = {name for cell in self.cells for name, value in cell.figures.items() if value is not None}
        return [measure for measure in self.measures if measure.primary and measure.name in taken]

    def statistics(self, arm: str, measure: str) -> Statistics:
        """Return the summary of an arm in a measure; an empty one if it has none."""
        return self.summary.arms.get(arm, {}).get(measure) or Statistics()
