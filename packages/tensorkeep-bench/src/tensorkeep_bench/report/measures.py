"""The arms and measures that a report compares, and their units."""

from collections import Counter
from typing import Any, NamedTuple

import msgspec

from tensorkeep.ext import counted, prepared
from tensorkeep_bench.analysis.samples import comparable_figures
from tensorkeep_bench.results import Arm, CellRecord, Measure, Results
from tensorkeep_bench.statistics import Description, describe
from tensorkeep_bench.wording import capitalised

_SECONDS = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
_BYTES = (("TB", 1e-12), ("GB", 1e-9), ("MB", 1e-6), ("kB", 1e-3), ("B", 1.0))
GIB = 1024.0**3
# A cold load is what a restarted job waits for, so it is preferred.
_LOADS = {"load_cold": "cold load", "load_warm": "warm load"}


class Compared(NamedTuple):
    """The three measures of a comparison; each is None where it has no sample."""

    save: Measure | None
    load: Measure | None
    size: Measure | None

    def named(self) -> dict[str, Measure]:
        if self.save is not None and self.save.name == "save":
            named = {"save": self.save, self.load_words: self.load, "size": self.size}
            return {word: measure for word, measure in named.items() if measure is not None}
        return {measure.label: measure for measure in (self.save, self.load, self.size) if measure is not None}

    @property
    def title(self) -> str:
        if self.save is None or self.save.name == "save":
            return "Saving, loading and size"
        *first, last = self.named()
        return capitalised(f"{', '.join(first)} and {last}" if first else last)

    @property
    def load_words(self) -> str:
        # Named, because the page cache makes a difference of several times.
        return _LOADS.get(self.load.name if self.load else "", "load")


def compared_measures(results: Results) -> Compared:
    """Return save, load and size of checkpoints; of another workload the first three primary measures."""
    primary = results.primary()
    by_name = {measure.name: measure for measure in primary}
    if "save" in by_name or "stored" in by_name:
        load = next((by_name[name] for name in _LOADS if name in by_name), None)
        return Compared(by_name.get("save"), load, by_name.get("stored"))
    return Compared(*[*primary, None, None, None][:3])


def compared_arms(results: Results) -> list[Arm]:
    """Return all arms but the A/A control, the baseline first."""
    arms = [arm for arm in results.arms if arm.role != "control"]
    measures, experiment = results.primary(), results.experiment
    # Changes made one at a time, and a choice of techniques, have no order of their own: they come by their gain in the
    # first measure, those without a gain last. Others keep the order of the design.
    unordered = experiment.design == "one-at-a-time" or (experiment.workload, experiment.design) == ("training", "arms")
    if measures and unordered:
        arms.sort(key=lambda arm: -(results.statistics(arm.name, measures[0].name).gain or 0.0))
    return sorted(arms, key=lambda arm: arm.role != "baseline")


class FigureScale(NamedTuple):
    measure: Measure
    unit: str  # behind a figure and in an axis label, such as ``s``, ``GB`` or ``s per GB of state``
    factor: float  # from the measure's own unit
    per_byte: bool = False  # whether figures are divided by the raw bytes that their cell worked on

    @property
    def label(self) -> str:
        return f"{self.measure.label} ({self.unit})"

    def figure(self, cell: CellRecord, value: float | None) -> float | None:
        """Return the figure of a cell in this unit; None if it has none."""
        if value is None or cell.status != "ok" or (self.per_byte and not cell.amount):
            return None
        # Divided by the raw bytes, because arms that worked on a smaller subject have smaller figures.
        return value * self.factor / (cell.amount or 1) if self.per_byte else value * self.factor

    def values(self, results: Results, arm: str) -> list[float]:
        shown = comparable_figures(results, arm, self.measure.name)
        found = [self.figure(cell, shown.get(cell.block)) for cell in results.cells_by_arm[arm]]
        return [value for value in found if value is not None]

    def describe(self, results: Results, arm: str) -> Description | None:
        return describe(values) if (values := self.values(results, arm)) else None


def amounts_differ(results: Results) -> bool:
    return len({cell.amount for cell in results.cells if cell.status == "ok" and cell.figures}) > 1


def scale_of(results: Results, measure: Measure) -> FigureScale:
    """Return the scale that suits all figures of a measure: the largest figure is at least 1 in its unit."""
    per_byte = amounts_differ(results) and measure.unit in ("s", "B")
    if per_byte and measure.unit == "B":
        return FigureScale(
            measure, "stored bytes per raw byte" if measure.name == "stored" else "B per raw byte", 1.0, True
        )
    # Seconds per byte are too small to read, so they are per GB.
    plain = FigureScale(measure, measure.unit, 1e9 if per_byte else 1.0, per_byte)
    figures = (plain.figure(cell, cell.figures.get(measure.name)) for cell in results.cells)
    largest = max((abs(value) for value in figures if value is not None), default=0.0)
    unit, factor = _unit(measure.unit, largest)
    return FigureScale(measure, f"{unit} per GB of state" if per_byte else unit, factor * plain.factor, per_byte)


def _unit(unit: str, largest: float) -> tuple[str, float]:
    if unit == "s":
        # From half a unit on, so that 0.6 s is not shown as 600 ms.
        return next((choice for choice in _SECONDS if largest * choice[1] >= 0.5), _SECONDS[0])
    if unit == "B":
        return next((choice for choice in _BYTES if largest * choice[1] >= 1), _BYTES[-1])
    return unit, 1.0


# Titles: what was measured, and where


class _Processor(msgspec.Struct, frozen=True):
    model: str = ""
    usable_cores: int = 0


class _Device(msgspec.Struct, frozen=True):
    name: str = ""


class _Machine(msgspec.Struct, frozen=True):
    processor: _Processor = _Processor()
    devices: tuple[_Device, ...] = ()


def subject_name(results: Results) -> str:
    # The description begins with the model or recipe and a colon.
    return results.subject.description.partition(": ")[0] or results.experiment.name


def subject_and_machine(results: Results) -> str:
    return " on ".join(filter(None, (subject_name(results), machine_name(results.environment))))


def machine_name(environment: dict[str, Any]) -> str:
    """Return the GPUs and the processor, such as ``AMD EPYC, 2 cores``; empty if the environment lacks them."""
    try:
        found = msgspec.convert(environment, prepared(_Machine))
    except msgspec.ValidationError:
        # The schema of a results file allows any environment.
        return ""
    devices = Counter(device.name for device in found.devices if device.name)
    parts = [f"{count} x {name}" if count > 1 else name for name, count in devices.items()]
    if found.processor.model:
        parts.append(found.processor.model)
    if found.processor.usable_cores:
        parts.append(counted(found.processor.usable_cores, "core"))
    return ", ".join(parts)
