"""The sentences of a report: subject, verdicts, noise, and missing results."""

from tensorkeep.bench.analysis.verdicts import TOO_SMALL, too_small
from tensorkeep.bench.analysis.warnings import too_noisy
from tensorkeep.bench.analysis.wording import capitalised, difference, gain, interval
from tensorkeep.bench.results import Measure, Recommendation, Results, Statistics
from tensorkeep.report.measures import compared_arms
from tensorkeep.units import counted, format_bytes

_COUNTED = {
    "helps": "better",
    "hurts": "worse",
    "about the same": "about the same",
    "within noise": "within noise",
    "too few runs": "with too few runs",
    "not run": "not run",
}


def measured_by(results: Results) -> str:
    """Return one line with the number of arms and blocks, the design, the subject and the date."""
    design = "" if results.experiment.design == "arms" else f", design: {results.experiment.design}"
    arms = f"{len(results.arms)} arms, {counted(results.blocks, 'block')}{design}"
    return "; ".join(filter(None, (arms, results.subject.description, results.started)))


def completeness(results: Results) -> str:
    """Return a sentence about cells that have no outcome yet, or an empty string."""
    waiting = sum(cell.status == "planned" for cell in results.cells)
    if waiting:
        return f"This run is not complete: {waiting} of {len(results.cells)} cells were not reached."
    return "" if results.complete else "This run was not finished."


def headlines(results: Results) -> list[str]:
    """Return one sentence per primary measure: the best arm that helps, and how many arms have which verdict.

    A state that is too small has one sentence.
    """
    if too_small(results):
        return [f"{capitalised(TOO_SMALL.format(format_bytes(results.subject.bytes or 0)))}"]
    if results.baseline is None:
        return ["The experiment has no baseline, so no arm is called better or worse."]
    if not results.ran(results.baseline):
        return [f"The baseline, {results.baseline}, has no figures, so no arm is called better or worse."]
    return [_headline(results, measure, results.baseline) for measure in results.primary()]


def noise_lines(results: Results) -> list[str]:
    """Return one line per primary measure: which differences are noise."""
    return [f"{measure.label}: {_noise(results, measure)}" for measure in results.primary()]


def purpose(recommendation: Recommendation) -> str:
    """Return the heading of a recommendation."""
    return "All round" if recommendation.purpose == "all" else capitalised(recommendation.purpose)


def _headline(results: Results, measure: Measure, baseline: str) -> str:
    label = capitalised(measure.label)
    found = {arm.name: results.statistics(arm.name, measure.name) for arm in compared_arms(results)}
    counts = _counts(list(found.values()))
    if noisy := too_noisy(results, measure):
        return f"{label}: {noisy}{counts}."
    helping = [(name, one) for name, one in found.items() if one.verdict == "helps"]
    if not helping:
        return f"{label}: no arm is shown to be better than {baseline}{counts}."
    name, best = max(helping, key=lambda pair: pair[1].gain or 0)
    words = {"s": "faster", "B": "smaller"} if measure.better == "lower" else {"tokens/s": "faster"}
    better = f"{gain(best.gain)} {words.get(measure.unit, 'better')} than {baseline}"
    return f"{label}: {name} is {better} (95% {interval(best.gain_low, best.gain_high)}){counts}."


def _counts(found: list[Statistics]) -> str:
    counts = {words: sum(one.verdict == verdict for one in found) for verdict, words in _COUNTED.items()}
    parts = [f"{count} {words}" for words, count in counts.items() if count]
    return f"; of {sum(counts.values())}: {', '.join(parts)}" if parts else ""


def _noise(results: Results, measure: Measure) -> str:
    noise = results.summary.noise.get(measure.name)
    if noise is None:
        few = any(arm.role == "control" for arm in results.arms)
        return f"no noise floor, because no A/A control ran{' in two blocks' if few else ''}"
    if noise.floor < 1.0005:
        return "the same in every run, so that every difference counts"
    if noisy := too_noisy(results, measure):
        return noisy
    band = f"the baseline against itself: {interval(noise.low, noise.high)} (95%)"
    return f"differences below {difference(noise.floor)} are noise; {band}"
