"""The summary of a results document: everything that is computed from its cells, and can be computed again.

The same cells give the same summary, to the last digit, whenever and wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tensorkeep.bench.analysis.claims import check_claims, has_claims
from tensorkeep.bench.analysis.effects import effects_of, interactions_of, steps_of
from tensorkeep.bench.analysis.phrases import gate_words
from tensorkeep.bench.analysis.recommendations import recommendations
from tensorkeep.bench.analysis.samples import Arm, Measure, Samples, read_samples
from tensorkeep.bench.analysis.statistics import Comparison, describe, detectable_gain, holm
from tensorkeep.bench.analysis.verdicts import SMALLEST, Noise, Verdict, judge, noise_of
from tensorkeep.bench.analysis.warnings import cautions

_EMPTY: dict[str, Any] = dict.fromkeys(
    (
        *("mean", "std", "median", "low", "high", "per_byte"),
        *("gain", "gain_low", "gain_high", "change_percent", "p", "p_holm", "detectable"),
    )
)


def summarise(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``summary`` of a results document, computed from its measures, arms and cells alone.

    Verdicts are given on primary measures; the others have all their figures, and no ``verdict`` and ``reason``.

    Parameters
    ----------
    results : mapping
        As docs/reference/results.md describes it; a ``summary`` in it is not looked at.

    Raises
    ------
    UsageError
        If it is not a results document.
    """
    samples = read_samples(results)
    noise = {measure.name: _noise(samples, measure) for measure in samples.measures}
    statistics: dict[str, dict[str, Any]] = {arm.name: {} for arm in samples.arms}
    for measure in samples.measures:
        for name, entry in _of_measure(samples, measure, noise[measure.name]).items():
            statistics[name][measure.name] = entry
    return {
        "arms": statistics,
        "noise": {name: asdict(found) if found else None for name, found in noise.items()},
        "steps": steps_of(samples),
        "effects": effects_of(samples),
        "interactions": interactions_of(samples),
        "warnings": cautions(samples, statistics, noise),
        "recommendations": recommendations(samples, statistics),
        "claims": check_claims(results) if has_claims(samples) else [],
    }


def _noise(samples: Samples, measure: Measure) -> Noise | None:
    found = [_against_baseline(samples, arm, measure) for arm in samples.arms if arm.role == "placebo"]
    return noise_of([comparison for comparison in found if comparison is not None])


def _against_baseline(samples: Samples, arm: Arm, measure: Measure) -> Comparison | None:
    baseline = samples.baseline
    return None if baseline is None or arm.role == "baseline" else samples.compare(arm.name, baseline, measure)


def _of_measure(samples: Samples, measure: Measure, noise: Noise | None) -> dict[str, dict[str, Any]]:
    """Return the statistics of one measure by arm: adjusted for each other, so computed together."""
    compared = {arm.name: _against_baseline(samples, arm, measure) for arm in samples.arms}
    tested = {
        arm.name: found.p
        for arm in samples.arms
        if arm.role == "arm" and (found := compared[arm.name]) is not None and found.p is not None
    }
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return {arm.name: _statistics(samples, arm, measure, compared[arm.name], adjusted, noise) for arm in samples.arms}


def _statistics(
    samples: Samples,
    arm: Arm,
    measure: Measure,
    comparison: Comparison | None,
    adjusted: Mapping[str, float],
    noise: Noise | None,
) -> dict[str, Any]:
    raw = list(samples.raw(arm.name, measure).values())
    entry: dict[str, Any] = {"n": len(raw), **_EMPTY}
    if raw:
        per_byte = list(samples.per_byte(arm.name, measure).values())
        entry |= asdict(describe(raw)) | {"per_byte": describe(per_byte).median if per_byte else None}
    if comparison is not None:
        entry |= {
            "gain": comparison.gain,
            "gain_low": comparison.low,
            "gain_high": comparison.high,
            "p": comparison.p,
            "p_holm": adjusted.get(arm.name),
            "detectable": _detectable(comparison, len(adjusted), noise),
            "change_percent": _change_percent(samples, arm, measure),
        }
    if measure.primary:
        verdict = _verdict(samples, arm, measure, comparison, adjusted.get(arm.name), noise)
        entry |= {"verdict": verdict.word, "reason": verdict.reason}
    return entry


def _detectable(comparison: Comparison, tests: int, noise: Noise | None) -> float | None:
    """Return the smallest gain that would have been called one: by the test, and above the noise floor."""
    if comparison.std is None:
        return None
    by_test = detectable_gain(comparison.std, comparison.n, tests)
    return None if by_test is None else max(by_test, SMALLEST, noise.floor if noise else 1.0)


def _change_percent(samples: Samples, arm: Arm, measure: Measure) -> float | None:
    """Return the origin's "improvement": how much lower (of a rate: higher) the mean is than the baseline's."""
    own = list(samples.per_byte(arm.name, measure).values())
    base = list(samples.per_byte(samples.baseline or "", measure).values())
    if not own or not base or (before := describe(base).mean) == 0:
        return None
    change = (before - describe(own).mean) / before * 100
    return -change if measure.higher_is_better else change


def _verdict(
    samples: Samples,
    arm: Arm,
    measure: Measure,
    comparison: Comparison | None,
    p_holm: float | None,
    noise: Noise | None,
) -> Verdict:
    why_not = _why_not_run(samples, arm, measure)
    if why_not is not None:
        return Verdict("not run", why_not)
    if arm.role == "baseline":
        return Verdict("baseline", "all others are compared with it")
    if arm.role == "placebo":
        return Verdict("placebo", f"{samples.baseline} once more: what differs is noise")
    if comparison is None:
        return Verdict("not run", _why_not_compared(samples, measure))
    return judge(comparison, p_holm, noise)


def _why_not_run(samples: Samples, arm: Arm, measure: Measure) -> str | None:
    """Return why an arm has no verdict of its own; None if it has figures that count."""
    cells = samples.cells_of(arm.name)
    if samples.failed_gate(arm.name):
        bad = [cell for cell in cells if cell.status == "gate"]
        because = f": {bad[0].reason}" if bad[0].reason else ""
        words = gate_words(samples.experiment.get("workload"))
        return f"{words}, in {len(bad)} of {len(cells)} blocks{because}"
    if samples.raw(arm.name, measure):
        return None
    failures = samples.failures(arm.name)
    if failures:
        return failures[0].reason or failures[0].status
    if any(cell.status == "ok" for cell in cells):
        return f"{measure.label} could not be measured here"
    return "not reached yet"


def _why_not_compared(samples: Samples, measure: Measure) -> str:
    baseline = next((arm for arm in samples.arms if arm.role == "baseline"), None)
    if baseline is None:
        return "there is no baseline to compare with"
    why_not = _why_not_run(samples, baseline, measure)
    return (
        f"the baseline {baseline.name} was not run: {why_not}"
        if why_not
        else (f"no block has a figure above zero of it and of {baseline.name}")
    )
