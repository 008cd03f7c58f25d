"""Which measures the documents' tables and plots show: saving, loading, size; whatever the workload calls them."""

from __future__ import annotations

from dataclasses import dataclass

from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.wording import sentence

# The documents loaded from the page cache and did not say so; a cold load is what a restarted job waits for.
_LOADS = ("load_cold", "load_warm")


@dataclass(frozen=True, slots=True)
class Trio:
    """The three measures of a comparison, each None where no sample of it was taken."""

    save: Measure | None
    load: Measure | None
    size: Measure | None

    def all(self) -> list[Measure]:
        """Return those that exist."""
        return [measure for measure in (self.save, self.load, self.size) if measure is not None]

    @property
    def words(self) -> str:
        """What is compared, such as ``Saving, loading and size``."""
        if self.save is None or self.save.name == "save":
            return "Saving, loading and size"
        *first, last = [measure.label for measure in self.all()]
        return sentence(f"{', '.join(first)} and {last}" if first else last)

    @property
    def load_words(self) -> str:
        """What the load is called: the page cache makes a difference of several times."""
        return {"load_cold": "cold load", "load_warm": "warm load"}.get(self.load.name if self.load else "", "load")


def trio(results: Results) -> Trio:
    """Return the measures of a checkpoint's comparison; of another workload the first three primary ones."""
    primary = results.primary()
    by_name = {measure.name: measure for measure in primary}
    if "save" in by_name or "stored" in by_name:
        load = next((by_name[name] for name in _LOADS if name in by_name), None)
        return Trio(by_name.get("save"), load, by_name.get("stored"))
    first = [*primary[:3], None, None, None]
    return Trio(first[0], first[1], first[2])


def compared(results: Results) -> list[Arm]:
    """Return the arms that tables of results compare: all but the A/A control, the baseline first.

    Those of changes that were made one at a time, and a choice of techniques, whose order means nothing, come by what
    they gained in the first measure, and those without a gain last; others in the order of the design.
    """
    arms = [arm for arm in results.arms if arm.role != "control"]
    measures = results.primary()
    kind = (results.experiment.workload, results.experiment.design)
    if measures and (kind[1] == "one-at-a-time" or kind == ("training", "arms")):
        arms.sort(key=lambda arm: -_gain(results, arm, measures[0]))
    return sorted(arms, key=lambda arm: arm.name != results.baseline)


def _gain(results: Results, arm: Arm, measure: Measure) -> float:
    found = results.statistics(arm.name, measure.name)
    return (found.gain if found else None) or 0.0
