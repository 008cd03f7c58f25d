"""What a design was made for: steps on the way to the full stack, effects of factors, interactions of combinations.

Everything is computed within each block, on a log scale, and summed up over the blocks as every other ratio is.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tensorkeep.bench.analysis.samples import Arm, Measure, Samples
from tensorkeep.bench.analysis.statistics import compare

Levels = tuple[int, ...]
Point = Mapping[Levels, float]
"""The logs of one block, larger is better, by the indexes of the levels."""


def steps_of(samples: Samples) -> list[dict[str, Any]]:
    """Return each step of the design "steps" for each primary measure, as the results file has them."""
    stairs = sorted(_steps(samples), key=lambda step: step[0])
    base = samples.standing(kind="base")
    if not stairs or base is None:
        return []
    arms = [base, *(arm for _, _, arm in stairs)]
    return [
        _step(samples, change, arms, place, measure)
        for measure in _primary(samples)
        for place, (_, change, _) in enumerate(stairs, start=1)
    ]


def _steps(samples: Samples) -> Iterable[tuple[int, str, Arm]]:
    for arm in samples.arms:
        for at in arm.places:
            if at.get("kind") == "step":
                yield at["index"], str(at.get("change")), arm


def _step(samples: Samples, change: str, arms: Sequence[Arm], index: int, measure: Measure) -> dict[str, Any]:
    base, before, arm, last = arms[0].name, arms[index - 1].name, arms[index].name, arms[-1].name
    step = samples.compare(arm, before, measure)
    so_far = samples.compare(arm, base, measure)
    alone, why_not_alone = _other(samples, "alone", change)
    without, why_not_without = _other(samples, "without", change)
    added = samples.compare(alone, base, measure) if alone else None
    missed = samples.compare(last, without, measure) if without else None
    share, why_no_share = _share(samples.log_gains(arm, before, measure), samples.log_gains(last, base, measure))
    notes = [
        *([] if step else [f"{change}: {arm} and {before} have no block in common"]),
        *([] if added else [f"alone: {why_not_alone}"]),
        *([] if missed else [f"without: {why_not_without}"]),
        *([] if share is not None else [f"share: {why_no_share}"]),
    ]
    return {
        "change": change,
        "arm": arm,
        "measure": measure.name,
        "gain_from_previous": step and step.gain,
        "gain_from_previous_low": step and step.low,
        "gain_from_previous_high": step and step.high,
        "gain_from_base": so_far and so_far.gain,
        "share": share,
        "alone": added and added.gain,
        "without": missed and missed.gain,
        "notes": notes,
    }


def _other(samples: Samples, kind: str, change: str) -> tuple[str | None, str]:
    """Return the arm that has only this change, or all but it, and what to say if it has no figures."""
    arm = samples.standing(kind=kind, change=change)
    if arm is not None:
        return arm.name, f"{arm.name} has no figures"
    for entry in samples.experiment["omitted"]:
        if (entry["place"].get("kind"), entry["place"].get("change")) == (kind, change):
            return None, entry["reason"]
    return None, "it was not planned"


def _share(step: Sequence[float], whole: Sequence[float]) -> tuple[float | None, str]:
    if not step or not whole:
        return None, "the whole way, or this step, has no figures"
    way = compare(whole)
    if min(way.gain, way.low or way.gain) <= 1:
        return None, "the full stack is not shown to be better than the base"
    return (sum(step) / len(step)) / (sum(whole) / len(whole)), ""


def interactions_of(samples: Samples) -> list[dict[str, Any]]:
    """Return, for each combination and primary measure, what it gave against the product of its changes alone."""
    base = samples.standing(kind="base")
    found = []
    for arm in samples.arms:
        for at in arm.places:
            if at.get("kind") == "combination" and base is not None:
                changes = at["changes"]
                singles = [samples.standing(kind="alone", change=change) for change in changes]
                names = [single.name for single in singles if single is not None]
                if names and len(names) == len(changes):
                    parts = (base.name, names)
                    found += [_interaction(samples, arm.name, changes, *parts, m) for m in _primary(samples)]
    return found


def _interaction(
    samples: Samples, arm: str, changes: list[str], base: str, singles: list[str], measure: Measure
) -> dict[str, Any]:
    logs = {name: samples.logs(name, measure) for name in (base, arm, *singles)}
    blocks = sorted(set.intersection(*(set(found) for found in logs.values())))
    together = [logs[arm][block] - logs[base][block] for block in blocks]
    product = [sum(logs[single][block] - logs[base][block] for single in singles) for block in blocks]
    extra = compare([a - b for a, b in zip(together, product, strict=True)]) if blocks else None
    return {
        "changes": changes,
        "arm": arm,
        "measure": measure.name,
        "gain": compare(together).gain if blocks else None,
        "product": compare(product).gain if blocks else None,
        "ratio": extra and extra.gain,
        "low": extra and extra.low,
        "high": extra and extra.high,
    }


def effects_of(samples: Samples) -> list[dict[str, Any]]:
    """Return main effects and interactions of two factors, for factorial and fractional designs.

    An effect compares the last level of a factor with its first. In a full factorial it is the mean over all settings
    of the other factors that a block has both levels of. In a fraction there are no such pairs: it is the contrast of a
    whole block, a block with a missing point does not count, and ``aliases`` lists what it cannot be told apart from.
    """
    factors = samples.experiment["factors"]
    points = _points(samples, factors)
    if not points:
        return []
    fraction = samples.experiment.get("design") == "fractional"
    names = list(factors)
    wanted = [[name] for name in names] + [list(pair) for pair in itertools.combinations(names, 2)]
    sizes = [len(levels) for levels in factors.values()]
    return [
        _effect(
            samples, effect, [names.index(name) for name in effect], points, sizes if not fraction else None, measure
        )
        for measure in _primary(samples)
        for effect in wanted
    ]


def _points(samples: Samples, factors: Mapping[str, Sequence[object]]) -> dict[str, Levels]:
    """Return the level indexes of each arm that is a point of the design."""
    points = {}
    for arm in samples.arms:
        for at in arm.places:
            if at.get("kind") == "point" and arm.role != "placebo":
                levels = at["levels"]
                if all(levels.get(name) in known for name, known in factors.items()):
                    points[arm.name] = tuple(known.index(levels[name]) for name, known in factors.items())
    return points


def _effect(
    samples: Samples,
    effect: list[str],
    axes: list[int],
    points: Mapping[str, Levels],
    sizes: Sequence[int] | None,
    measure: Measure,
) -> dict[str, Any]:
    blocks: dict[int, dict[Levels, float]] = defaultdict(dict)
    for arm, levels in points.items():
        for block, log in samples.logs(arm, measure).items():
            blocks[block][levels] = log
    found = [_contrast(b, axes, len(points)) if sizes is None else _paired(b, axes, sizes) for b in blocks.values()]
    logs = [value for value in found if value is not None]
    summed = compare(logs) if logs else None
    return {
        "factors": effect,
        "measure": measure.name,
        "gain": summed and summed.gain,
        "low": summed and summed.low,
        "high": summed and summed.high,
        "aliases": _aliases(samples.experiment["aliases"], effect),
    }


def _paired(block: Point, axes: list[int], sizes: Sequence[int]) -> float | None:
    """Return the mean, over the settings of the other factors, of last level against first (or of what two add)."""
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


def _contrast(block: Point, axes: list[int], points: int) -> float | None:
    """Return the same from a fraction of two-level points: a contrast of the whole block, if it is whole."""
    if len(block) < points:
        return None
    signed = (math.prod(1 if levels[axis] else -1 for axis in axes) * value for levels, value in block.items())
    return math.fsum(signed) * float(2 ** len(axes)) / points


def _aliases(groups: Sequence[list[list[str]]], effect: list[str]) -> list[list[str]]:
    for group in groups:
        if effect in group:
            return [other for other in group if other != effect]
    return []


def _primary(samples: Samples) -> list[Measure]:
    return [measure for measure in samples.measures if measure.primary]
