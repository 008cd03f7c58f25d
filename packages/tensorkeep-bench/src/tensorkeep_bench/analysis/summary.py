"""The summary of a results file, computed from its cells alone: statistics, verdicts, results of its design."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from msgspec.structs import replace

from tensorkeep.ext import format_bytes, number
from tensorkeep_bench.analysis.advice import avoid, recommendations, try_first, warnings
from tensorkeep_bench.analysis.claims import check_claims
from tensorkeep_bench.analysis.samples import SMALLEST_STATE, Samples, judge, noise_of, threshold, too_short, too_small
from tensorkeep_bench.results import (
    Arm,
    ArmStatistics,
    Effect,
    Interaction,
    Measure,
    Noise,
    Results,
    ResultsSummary,
    StackStep,
    Verdict,
)
from tensorkeep_bench.statistics import Comparison, compare, describe, detectable_gain, holm
from tensorkeep_bench.wording import capitalised, gain, gate_words, interval_95, listed

_GIB = 1024.0**3

Levels = tuple[int, ...]  # a point of a factorial design: the index of the level, factor by factor


def summarise(results: Results) -> ResultsSummary:
    """Return the summary, and ignore an earlier one; MissingExtraError if scipy is not installed."""
    samples = Samples(results)
    noise: dict[str, Noise | None] = {}
    statistics: dict[str, dict[str, ArmStatistics]] = {arm.name: {} for arm in samples.arms}
    for measure in samples.measures:
        others = [arm for arm in samples.arms if arm.role != "baseline"]
        found = {arm.name: samples.compare(arm.name, samples.baseline, measure) for arm in others}
        compared = {name: one for name, one in found.items() if one is not None}
        controls = [compared[arm.name] for arm in others if arm.role == "control" and arm.name in compared]
        noise[measure.name] = noise_of(controls)
        # The control is not a test: it would only make the adjustment stricter.
        tested = {
            arm.name: p for arm in others if arm.role == "arm" and (p := _p_value(compared.get(arm.name))) is not None
        }
        adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
        for arm in samples.arms:
            one = compared.get(arm.name)
            statistics[arm.name][measure.name] = _statistics(samples, arm, measure, one, adjusted, noise[measure.name])
    # Recommendations and warnings read the verdicts from the summary.
    samples = Samples(replace(results, summary=ResultsSummary(arms=statistics, noise=noise)))
    return replace(
        samples.results.summary,
        tests=means_of(samples),
        steps=tuple(steps_of(samples)),
        effects=tuple(effects_of(samples)),
        interactions=tuple(interactions_of(samples)),
        warnings=tuple(warnings(samples)),
        recommendations=tuple(recommendations(samples)),
        try_first=tuple(try_first(samples)),
        avoid=tuple(avoid(samples)),
        claims=tuple(check_claims(samples)),
        key=key_change(samples),
    )


def means_of(samples: Samples) -> dict[str, dict[str, float | None]]:
    """Return `ResultsSummary.tests`; it is empty unless checkpoints were saved."""
    measures, whole = {measure.name: measure for measure in samples.measures}, samples.results.subject.bytes
    if "save" not in measures:
        return {}
    loads = [name for name in ("load_cold", "load_warm") if name in measures]
    load = next((name for name in loads if any(samples.raw(arm.name, measures[name]) for arm in samples.arms)), "")
    found: dict[str, dict[str, float | None]] = {arm.name: {} for arm in samples.arms}
    for name, measure, unit in (("save", "save", 1.0), ("load", load, 1.0), ("size", "stored", _GIB)):
        for arm in samples.arms if measure in measures else ():
            # Scaled to the whole state: an arm that saved the smaller one would look faster than the others.
            figures = (samples.per_byte if whole else samples.raw)(arm.name, measures[measure])
            values = [value * (whole or 1) / unit for value in figures.values()]
            described = describe(values) if values else None
            found[arm.name] |= {f"{name}_{kind}": getattr(described, kind, None) for kind in ("mean", "std")}
    return found


def _p_value(found: Comparison | None) -> float | None:
    return None if found is None else found.p


def _statistics(
    samples: Samples,
    arm: Arm,
    measure: Measure,
    found: Comparison | None,
    adjusted: Mapping[str, float],
    noise: Noise | None,
) -> ArmStatistics:
    raw = list(samples.raw(arm.name, measure).values())
    per_byte = list(samples.per_byte(arm.name, measure).values())
    p_holm = adjusted.get(arm.name)
    verdict: tuple[Verdict, str] | tuple[None, None] = (None, None)
    if measure.primary:
        verdict = _unjudged(samples, arm, measure) or (
            judge(found, p_holm, noise, threshold(measure))
            if found
            else ("not compared", _why_not_compared(samples, measure))
        )
    return ArmStatistics(
        **(asdict(describe(raw)) if raw else {}),
        per_byte=describe(per_byte).median if per_byte else None,
        gain=found and found.gain,
        gain_low=found and found.low,
        gain_high=found and found.high,
        change_percent=_change_percent(measure, found.gain) if found else None,
        p=_p_value(found),
        p_holm=p_holm,
        detectable=_detectable(found, len(adjusted), noise, threshold(measure)) if found else None,
        verdict=verdict[0],
        reason=verdict[1],
        blocks=found.n if found else 0,
    )


def _detectable(comparison: Comparison, tests: int, noise: Noise | None, least: float) -> float | None:
    # A size of one block has no deviation to test.
    if comparison.std is None or comparison.n < 2:
        return None
    by_test = detectable_gain(comparison.std, comparison.n, tests, comparison.borrowed)
    # A gain counts only if the test shows it, above the noise floor and ``least``.
    return None if by_test is None else max(by_test, least, noise.floor if noise else 1.0)


def _change_percent(measure: Measure, gain: float) -> float:
    # Not from the means: one slow block would move them to the other side of the gain and its interval.
    return (gain - 1) * 100 if measure.better == "higher" else (1 - 1 / gain) * 100


def _unjudged(samples: Samples, arm: Arm, measure: Measure) -> tuple[Verdict, str] | None:
    """Return verdict and reason of an arm without figures, or that is not an alternative; None if it is judged."""
    why_not = _why_not_run(samples, arm.name, measure)
    if why_not is not None:
        # A wrong result was run, and some of its cells may have figures.
        return "wrong result" if samples.failed_gate(arm.name) else "not run", why_not
    if arm.role == "baseline":
        return "baseline", "the others are compared with it"
    if arm.role == "control":
        return "control", f"{samples.baseline} measured again: any difference is noise"
    # Bytes are the same in every run, so a state of any size shows them.
    if too_small(samples.results) and measure.unit == "s":
        return "too small", f"states below {format_bytes(SMALLEST_STATE)} are too small to time"
    return None


def _why_not_run(samples: Samples, arm: str, measure: Measure) -> str | None:
    cells = samples.cells_of(arm)
    # First: one wrong result makes all figures of the arm worthless.
    if samples.failed_gate(arm):
        bad = [cell for cell in cells if cell.status == "gate"]
        because = f": {bad[0].reason}" if bad[0].reason else ""
        return f"{gate_words(samples.experiment.workload)}, in {len(bad)} of {len(cells)} blocks{because}"
    if samples.raw(arm, measure):
        return None
    if failures := samples.failures(arm):
        return failures[0].reason or failures[0].status
    # For example a cold load where the file system keeps its files in memory.
    if samples.results.ran(arm):
        return f"{measure.label} could not be measured here"
    return "not reached yet"


def _why_not_compared(samples: Samples, measure: Measure) -> str:
    if samples.baseline is None:
        return "the experiment has no baseline to compare with"
    why_not = _why_not_run(samples, samples.baseline, measure)
    if why_not:
        return f"the baseline {samples.baseline} was not run: {why_not}"
    return f"no block has figures above zero for this arm and for {samples.baseline}"


# The change that matters most. The settings of an arm, and the optimisation that they belong to.

_CHANGES = {"chunk": "chunking", "chunking": "chunking", "concurrency": "concurrency", "compressor": "compression"}


def key_change(samples: Samples) -> str:
    """Return a sentence if one kind of single change saves more time than all others, by intervals that do not overlap.

    The changes are those of one arm: the baseline, or the arm that most kinds of change can be compared with.
    """
    measure = samples.results.measure("save")
    # A design has a table that says the same of its changes.
    if measure is None or samples.experiment.design != "arms":
        return ""
    arms = [arm for arm in samples.arms if arm.role != "control"]
    # The sort is stable, so the baseline comes first among equals.
    found = [
        (base, _single_changes(samples, base, measure)) for base in sorted(arms, key=lambda arm: arm.role != "baseline")
    ]
    base, kinds = max(found, key=lambda pair: len(pair[1]))
    if len(kinds) < 2:
        return ""
    (kind, (arm, best)), *others = sorted(kinds.items(), key=lambda pair: -pair[1][1].gain)
    if (best.low or 0.0) <= max([1.0, *(other.high or math.inf for _, (_, other) in others)]):
        return ""
    rest = [f"{name} {gain(one.gain)} ({interval_95(one.low, one.high)})" for name, (_, one) in others]
    saves = f"{arm} saves {number(best.gain)} times as fast as {base.name} ({interval_95(best.low, best.high)})"
    return f"{capitalised(kind)} is the key: {saves}; alone, {listed(rest)}."


def _single_changes(samples: Samples, base: Arm, measure: Measure) -> dict[str, tuple[str, Comparison]]:
    """Return, by kind of change, the best arm that differs from another one in nothing else."""
    found: dict[str, tuple[str, Comparison]] = {}
    for arm in samples.arms:
        both = arm.settings.keys() | base.settings.keys()
        keys = [key for key in both if arm.settings.get(key) != base.settings.get(key)]
        kinds = {_CHANGES.get(key) for key in keys}
        if len(kinds) != 1 or any(too_short(samples.results, one.name, measure) for one in (arm, base)):
            continue
        kind, compared = kinds.pop(), samples.compare(arm.name, base.name, measure)
        if kind is None or compared is None or compared.low is None:
            continue
        if kind not in found or compared.gain > found[kind][1].gain:
            found[kind] = arm.name, compared
    return found


# The design ``steps``


def steps_of(samples: Samples) -> Iterator[StackStep]:
    base = samples.arm_at("base")
    steps = sorted(
        (place.index, place.change, arm.name) for arm in samples.arms for place in arm.places if place.kind == "step"
    )
    if not steps or base is None:
        return
    arms = [base.name, *(arm for _, _, arm in steps)]
    for measure in samples.primary:
        for index, (_, change, _) in enumerate(steps, start=1):
            yield _step(samples, change, arms, index, measure)


def _step(samples: Samples, change: str, arms: Sequence[str], index: int, measure: Measure) -> StackStep:
    base, before, arm, last = arms[0], arms[index - 1], arms[index], arms[-1]
    step = samples.compare(arm, before, measure)
    so_far = samples.compare(arm, base, measure)
    alone, why_not_alone = _arm_at(samples, "alone", change)
    without, why_not_without = _arm_at(samples, "without", change)
    gain_alone = samples.compare(alone, base, measure)
    gain_without = samples.compare(last, without, measure)
    # Within each block on a log scale, and summarised over the blocks like every other ratio.
    whole = samples.compare(last, base, measure)
    fraction = _fraction(samples.log_gains(arm, before, measure), samples.log_gains(last, base, measure), whole)
    notes = [
        *([] if step else [f"{change}: {arm} and {before} did not run in the same block"]),
        *([] if gain_alone else [f"alone: {why_not_alone}"]),
        *([] if gain_without else [f"without: {why_not_without}"]),
        *([f"fraction: {fraction}"] if isinstance(fraction, str) else []),
    ]
    return StackStep(
        change=change,
        arm=arm,
        measure=measure.name,
        gain_from_previous=step and step.gain,
        gain_from_previous_low=step and step.low,
        gain_from_previous_high=step and step.high,
        gain_from_base=so_far and so_far.gain,
        fraction=None if isinstance(fraction, str) else fraction,
        alone=gain_alone and gain_alone.gain,
        without=gain_without and gain_without.gain,
        notes=tuple(notes),
    )


def _arm_at(samples: Samples, kind: str, change: str) -> tuple[str | None, str]:
    arm = samples.arm_at(kind, change)
    if arm is not None:
        return arm.name, f"{arm.name} has no figures"
    # The design gave the reason when it omitted the place.
    for omitted in samples.experiment.omitted:
        if (omitted.place.kind, omitted.place.change) == (kind, change):
            return None, omitted.reason
    return None, "it was not planned"


def _fraction(step: Sequence[float], total: Sequence[float], full: Comparison | None) -> float | str:
    if not step or not total or full is None:
        return "this step, or the full stack, has no figures"
    # A fraction of a gain that may be none would be arbitrarily large.
    if min(full.gain, full.low or full.gain) <= 1:
        return "the full stack is not shown to be better than the base"
    return (sum(step) / len(step)) / (sum(total) / len(total))


# The design ``combinations``


def interactions_of(samples: Samples) -> Iterator[Interaction]:
    """Yield, per combination and primary measure, its gain against the product of the single gains."""
    base = samples.arm_at("base")
    for arm in samples.arms:
        for place in arm.places:
            if place.kind == "combination" and base is not None:
                singles = [single.name for change in place.changes if (single := samples.arm_at("alone", change))]
                if singles and len(singles) == len(place.changes):
                    for measure in samples.primary:
                        gains = _interaction(samples, arm.name, base.name, singles, measure)
                        yield Interaction(place.changes, arm.name, measure.name, *gains)


def _interaction(samples: Samples, arm: str, base: str, singles: list[str], measure: Measure) -> Sequence[float | None]:
    logs = {name: samples.logs(name, measure) for name in (base, arm, *singles)}
    # Only blocks that have all arms, so that both sides of the ratio come from the same blocks.
    blocks = sorted(set.intersection(*(set(found) for found in logs.values())))
    if not blocks:
        return ()
    together = [logs[arm][block] - logs[base][block] for block in blocks]
    # On a log scale, the product of the single gains is a sum.
    product = [sum(logs[single][block] - logs[base][block] for single in singles) for block in blocks]
    ratio = compare([a - b for a, b in zip(together, product, strict=True)])
    return compare(together).gain, compare(product).gain, ratio.gain, ratio.low, ratio.high


# The designs ``factorial`` and ``fractional``


def effects_of(samples: Samples) -> Iterator[Effect]:
    """Yield main effects and two-factor interactions: the last level of a factor against its first."""
    factors = samples.experiment.factors
    points = _points(samples, factors)
    if not points:
        return
    fractional = samples.experiment.design == "fractional"
    names = list(factors)
    sizes = [len(levels) for levels in factors.values()]
    for measure in samples.primary:
        blocks: dict[int, dict[Levels, float]] = defaultdict(dict)
        for arm, levels in points.items():
            for block, log in samples.logs(arm, measure).items():
                blocks[block][levels] = log
        # In a full factorial, an effect is the mean over all settings of the other factors where a block has both
        # levels. A fraction has no such pairs: the effect is the contrast of a whole block.
        for effect in [*((name,) for name in names), *itertools.combinations(names, 2)]:
            axes = [names.index(name) for name in effect]
            found = [
                _contrast(block, axes, len(points)) if fractional else _paired(block, axes, sizes)
                for block in blocks.values()
            ]
            logs = [value for value in found if value is not None]
            aliases = next((group for group in samples.experiment.aliases if effect in group), ())
            # A fraction cannot separate these effects; the reader must know.
            others = tuple(other for other in aliases if other != effect)
            gain = compare(logs) if logs else None
            interval = {"gain": gain.gain, "low": gain.low, "high": gain.high} if gain else {}
            yield Effect(effect, measure.name, **interval, aliases=others)


def _points(samples: Samples, factors: Mapping[str, Sequence[str]]) -> dict[str, Levels]:
    points = {}
    for arm in samples.arms:
        for place in arm.places:
            # A file from elsewhere may name levels that its factors do not have.
            if place.kind == "point" and all(place.levels.get(name) in known for name, known in factors.items()):
                points[arm.name] = tuple(known.index(place.levels[name]) for name, known in factors.items())
    return points


def _paired(block: Mapping[Levels, float], axes: list[int], sizes: Sequence[int]) -> float | None:
    """Return the mean, over the settings of the other factors, of last level against first."""
    values = []
    for levels in block:
        # Each set of corners is counted once, from the corner where all its factors are at their first level.
        if any(levels[axis] for axis in axes):
            continue
        corners = []
        for ends in itertools.product((0, 1), repeat=len(axes)):
            corner = list(levels)
            for axis, end in zip(axes, ends, strict=True):
                corner[axis] = (sizes[axis] - 1) * end
            # The sign of a corner: plus where all factors are at their last level, then alternating.
            corners.append((block.get(tuple(corner)), (-1) ** (len(axes) - sum(ends))))
        if all(value is not None for value, _ in corners):
            values.append(sum(sign * value for value, sign in corners if value is not None))
    return sum(values) / len(values) if values else None


def _contrast(block: Mapping[Levels, float], axes: list[int], points: int) -> float | None:
    # A missing point would leave the columns unbalanced, and mix other effects into this one.
    if len(block) < points:
        return None
    signed = (math.prod(1 if levels[axis] else -1 for axis in axes) * value for levels, value in block.items())
    return math.fsum(signed) * float(2 ** len(axes)) / points
