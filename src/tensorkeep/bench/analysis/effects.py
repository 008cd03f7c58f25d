"""Results of designs: steps to the full stack, effects of factors, interactions.

Everything is computed within each block, on a log scale, and summarised over the blocks like every other ratio.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tensorkeep.bench.analysis.samples import Samples
from tensorkeep.bench.analysis.statistics import Comparison, compare
from tensorkeep.bench.results import Effect, Interaction, Measure, Step

Levels = tuple[int, ...]
"""A point of a factorial design: the index of each factor's level."""


def steps_of(samples: Samples) -> Iterator[Step]:
    """Yield each step of the design ``steps``, for each primary measure."""
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


def _step(samples: Samples, change: str, arms: Sequence[str], index: int, measure: Measure) -> Step:
    base, before, arm, last = arms[0], arms[index - 1], arms[index], arms[-1]
    step = samples.compare(arm, before, measure)
    so_far = samples.compare(arm, base, measure)
    alone, why_not_alone = _arm_at(samples, "alone", change)
    without, why_not_without = _arm_at(samples, "without", change)
    gain_alone = samples.compare(alone, base, measure)
    gain_without = samples.compare(last, without, measure)
    whole = samples.compare(last, base, measure)
    fraction = _fraction(samples.log_gains(arm, before, measure), samples.log_gains(last, base, measure), whole)
    notes = [
        *([] if step else [f"{change}: {arm} and {before} have no block in common"]),
        *([] if gain_alone else [f"alone: {why_not_alone}"]),
        *([] if gain_without else [f"without: {why_not_without}"]),
        *([f"fraction: {fraction}"] if isinstance(fraction, str) else []),
    ]
    return Step(
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
    """Return the arm that has only this change, or all but it, and the reason to give if it has no figures."""
    arm = samples.arm_at(kind, change)
    if arm is not None:
        return arm.name, f"{arm.name} has no figures"
    for omitted in samples.experiment.omitted:
        if (omitted.place.kind, omitted.place.change) == (kind, change):
            return None, omitted.reason
    return None, "it was not planned"


def _fraction(step: Sequence[float], total: Sequence[float], full: Comparison | None) -> float | str:
    """Return which fraction of the total log gain a step contributes, or why that is not defined."""
    if not step or not total or full is None:
        return "this step, or the full stack, has no figures"
    if min(full.gain, full.low or full.gain) <= 1:
        return "the full stack is not shown to be better than the base"
    return (sum(step) / len(step)) / (sum(total) / len(total))


def interactions_of(samples: Samples) -> Iterator[Interaction]:
    """Yield, for each combination and primary measure, its gain against the product of its changes' single gains."""
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
    """Return the gain of a combination, the product of its single gains, and their ratio with its interval."""
    logs = {name: samples.logs(name, measure) for name in (base, arm, *singles)}
    blocks = sorted(set.intersection(*(set(found) for found in logs.values())))
    if not blocks:
        return ()
    together = [logs[arm][block] - logs[base][block] for block in blocks]
    product = [sum(logs[single][block] - logs[base][block] for single in singles) for block in blocks]
    ratio = compare([a - b for a, b in zip(together, product, strict=True)])
    return compare(together).gain, compare(product).gain, ratio.gain, ratio.low, ratio.high


def effects_of(samples: Samples) -> Iterator[Effect]:
    """Yield main effects and two-factor interactions of factorial and fractional designs.

    An effect compares the last level of a factor with its first. In a full factorial it is the mean over all settings
    of the other factors for which a block has both levels. A fraction has no such pairs: the effect is the contrast of
    a whole block, a block with a missing point does not count, and ``aliases`` lists what it is confounded with.
    """
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
        for effect in [*((name,) for name in names), *itertools.combinations(names, 2)]:
            axes = [names.index(name) for name in effect]
            found = [
                _contrast(block, axes, len(points)) if fractional else _paired(block, axes, sizes)
                for block in blocks.values()
            ]
            logs = [value for value in found if value is not None]
            aliases = next((group for group in samples.experiment.aliases if effect in group), ())
            others = tuple(other for other in aliases if other != effect)
            gain = compare(logs) if logs else None
            interval = {"gain": gain.gain, "low": gain.low, "high": gain.high} if gain else {}
            yield Effect(effect, measure.name, **interval, aliases=others)


def _points(samples: Samples, factors: Mapping[str, Sequence[str]]) -> dict[str, Levels]:
    """Return the point of the design at which each arm stands."""
    points = {}
    for arm in samples.arms:
        for place in arm.places:
            if place.kind == "point" and all(place.levels.get(name) in known for name, known in factors.items()):
                points[arm.name] = tuple(known.index(place.levels[name]) for name, known in factors.items())
    return points


def _paired(block: Mapping[Levels, float], axes: list[int], sizes: Sequence[int]) -> float | None:
    """Return the mean, over the settings of the other factors, of last level against first (or of an interaction)."""
    values = []
    for levels in block:
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
    """Return the effect from a fraction of two-level points: a contrast of the block, None if a point is missing."""
    if len(block) < points:
        return None
    signed = (math.prod(1 if levels[axis] else -1 for axis in axes) * value for levels, value in block.items())
    return math.fsum(signed) * float(2 ** len(axes)) / points
