"""What a results file holds, as types; ``docs/reference/results.md`` says what each part means."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import msgspec

Status = Literal["ok", "planned", "gate", "failed", "timeout", "memory", "disk", "not-run"]


class Measure(msgspec.Struct, frozen=True):
    """What was measured: the key of a cell's figures, what people call it, and which direction is better.

    Its reader makes the label, the unit and the sentence about it harmless; the label is never empty.
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
    seen: dict[str, str] = {}


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
    tensorkeep: str | None = None
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
