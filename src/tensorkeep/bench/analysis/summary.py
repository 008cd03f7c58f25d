"""The summary of a results file, computed from its cells alone."""

from collections.abc import Mapping
from dataclasses import asdict

from msgspec.structs import replace

from tensorkeep.bench.analysis.claims import check_claims
from tensorkeep.bench.analysis.effects import effects_of, interactions_of, steps_of
from tensorkeep.bench.analysis.recommendations import recommendations
from tensorkeep.bench.analysis.samples import Samples
from tensorkeep.bench.analysis.statistics import Comparison, describe, detectable_gain, holm
from tensorkeep.bench.analysis.verdicts import SMALLEST_STATE, judge, noise_of, threshold, too_small
from tensorkeep.bench.analysis.warnings import cautions
from tensorkeep.bench.analysis.wording import gate_words
from tensorkeep.bench.results import Arm, Measure, Noise, Results, Statistics, Summary, Verdict
from tensorkeep.units import format_bytes


def summarise(results: Results) -> Summary:
    """Return the summary of a results file, with verdicts on primary measures only; an earlier one is ignored.

    Raises MissingExtraError if scipy is not installed.
    """
    samples = Samples(results)
    noise: dict[str, Noise | None] = {}
    statistics: dict[str, dict[str, Statistics]] = {arm.name: {} for arm in samples.arms}
    for measure in samples.measures:
        others = [arm for arm in samples.arms if arm.role != "baseline"]
        found = {arm.name: samples.compare(arm.name, samples.baseline, measure) for arm in others}
        compared = {name: one for name, one in found.items() if one is not None}
        noise[measure.name] = noise_of(
            [compared[arm.name] for arm in others if arm.role == "control" and arm.name in compared]
        )
        arms = [arm.name for arm in others if arm.role == "arm" and arm.name in compared]
        tested = {name: p for name in arms if (p := compared[name].p) is not None}
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        for arm in samples.arms:
            one = compared.get(arm.name)
            statistics[arm.name][measure.name] = _statistics(samples, arm, measure, one, adjusted, noise[measure.name])
    samples = Samples(replace(results, summary=Summary(arms=statistics, noise=noise)))
    return replace(
        samples.results.summary,
        steps=tuple(steps_of(samples)),
        effects=tuple(effects_of(samples)),
        interactions=tuple(interactions_of(samples)),
        warnings=tuple(cautions(samples)),
        recommendations=tuple(recommendations(samples)),
        claims=tuple(check_claims(samples)),
    )


def _statistics(
    samples: Samples,
    arm: Arm,
    measure: Measure,
    found: Comparison | None,
    adjusted: Mapping[str, float],
    noise: Noise | None,
) -> Statistics:
    raw = list(samples.raw(arm.name, measure).values())
    per_byte = list(samples.per_byte(arm.name, measure).values())
    p_holm = adjusted.get(arm.name)
    verdict: tuple[Verdict, str] | tuple[None, None] = (None, None)
    if measure.primary:
        verdict = _unjudged(samples, arm, measure) or (
            judge(found, p_holm, noise, threshold(measure))
            if found
            else ("not run", _why_not_compared(samples, measure))
        )
    return Statistics(
        **(asdict(describe(raw)) if raw else {}),
        per_byte=describe(per_byte).median if per_byte else None,
        gain=found and found.gain,
        gain_low=found and found.low,
        gain_high=found and found.high,
        change_percent=_change_percent(samples, arm, measure, found) if found else None,
        p=found and found.p,
        p_holm=p_holm,
        detectable=_detectable(found, len(adjusted), noise, threshold(measure)) if found else None,
        verdict=verdict[0],
        reason=verdict[1],
    )


def _detectable(comparison: Comparison, tests: int, noise: Noise | None, least: float) -> float | None:
    """Return the smallest gain that would have counted: shown by the test, above the noise floor and ``least``."""
    if comparison.std is None:
        return None
    by_test = detectable_gain(comparison.std, comparison.n, tests, comparison.lent)
    return None if by_test is None else max(by_test, least, noise.floor if noise else 1.0)


def _change_percent(samples: Samples, arm: Arm, measure: Measure, found: Comparison) -> float | None:
    """Return how much lower (of a rate: higher) the mean is than the baseline's, in percent."""
    if samples.in_turns(arm.name, measure):
        return (found.gain - 1) * 100 if measure.better == "higher" else (1 - 1 / found.gain) * 100
    own = list(samples.per_byte(arm.name, measure).values())
    base = list(samples.per_byte(samples.baseline or "", measure).values())
    if not own or not base or (before := describe(base).mean) == 0:
        return None
    change = (before - describe(own).mean) / before * 100
    return -change if measure.better == "higher" else change


def _unjudged(samples: Samples, arm: Arm, measure: Measure) -> tuple[Verdict, str] | None:
    """Return the verdict on an arm that did not run or is not an alternative, with its reason; None if it is judged."""
    why_not = _why_not_run(samples, arm.name, measure)
    if why_not is not None:
        return "not run", why_not
    if arm.role == "baseline":
        return "baseline", "the others are compared with it"
    if arm.role == "control":
        return "control", f"{samples.baseline} measured again: any difference is noise"
    if too_small(samples.results):
        return "too small", f"states below {format_bytes(SMALLEST_STATE)} are too small to time"
    return None


def _why_not_run(samples: Samples, arm: str, measure: Measure) -> str | None:
    """Return why an arm has no figures that count; None if it has some."""
    cells = samples.cells_of(arm)
    if samples.failed_gate(arm):
        bad = [cell for cell in cells if cell.status == "gate"]
        because = f": {bad[0].reason}" if bad[0].reason else ""
        return f"{gate_words(samples.experiment.workload)}, in {len(bad)} of {len(cells)} blocks{because}"
    if samples.raw(arm, measure):
        return None
    if failures := samples.failures(arm):
        return failures[0].reason or failures[0].status
    if samples.results.ran(arm):
        return f"{measure.label} could not be measured here"
    return "not reached yet"


def _why_not_compared(samples: Samples, measure: Measure) -> str:
    if samples.baseline is None:
        return "the experiment has no baseline to compare with"
    why_not = _why_not_run(samples, samples.baseline, measure)
    if why_not:
        return f"the baseline {samples.baseline} was not run: {why_not}"
    return f"no block has a figure above zero of both this arm and {samples.baseline}"
