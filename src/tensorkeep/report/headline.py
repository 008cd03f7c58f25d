"""What it all comes to, in a sentence per measure, computed from the verdicts."""

from __future__ import annotations

from tensorkeep.bench.results import Measure, Results, Statistics
from tensorkeep.bench.results import printable as clean
from tensorkeep.report.panels import compared
from tensorkeep.report.wording import gain, interval, no_verdict, sentence


def headlines(results: Results) -> list[str]:
    """Return one sentence per primary measure: the best arm that is really better, and how the others fared."""
    if results.baseline is None:
        return ["There is no baseline, so nothing is called better or worse."]
    return [_headline(results, measure) for measure in results.primary()]


def completeness(results: Results) -> str:
    """Return a sentence about cells that have no outcome yet, or nothing."""
    waiting = sum(cell.status == "planned" for cell in results.cells)
    if waiting:
        return f"This run is not complete: {waiting} of {len(results.cells)} cells were not reached."
    return "" if results.complete else "This run was not finished."


def _headline(results: Results, measure: Measure) -> str:
    label = sentence(measure.label)
    found = [(arm.name, one) for arm in compared(results) if (one := results.statistics(arm.name, measure.name))]
    helping = sorted((pair for pair in found if pair[1].verdict == "helps"), key=lambda pair: -(pair[1].gain or 0))
    counts = _counts([one for _, one in found])
    if said := no_verdict(results, measure):
        return f"{label}: {said}{counts}."
    if not helping:
        return f"{label}: nothing is shown to beat {clean(results.baseline or '')}{counts}."
    name, best = helping[0]
    bounds = interval(best.gain_low, best.gain_high)
    said = f"{clean(name)} is {gain(best.gain)} {_better(measure)} than {clean(results.baseline or '')}"
    return f"{label}: {said} (95% {bounds}){counts}."


def _counts(found: list[Statistics]) -> str:
    words = {
        "helps": "better",
        "hurts": "worse",
        "within noise": "within noise",
        "too few runs": "with too few runs",
        "not run": "not run",
    }
    counts = {word: sum(one.verdict == verdict for one in found) for verdict, word in words.items()}
    parts = [f"{count} {word}" for word, count in counts.items() if count]
    return f"; of {sum(counts.values())}: {', '.join(parts)}" if parts else ""


def _better(measure: Measure) -> str:
    words = {"s": "faster", "B": "smaller"} if measure.better == "lower" else {"tokens/s": "faster"}
    return words.get(measure.unit, "better")
