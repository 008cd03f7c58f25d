"""Recommendations for this machine, computed from the results.

For one purpose, only an arm with the verdict *helps* is recommended. For all purposes together, an arm is recommended
that helps somewhere and is nowhere more than 10% worse: a few percent of bytes do not outweigh many times the speed.
Never recommended are the A/A control, an arm that does not sync what it wrote, an arm that failed its gate even once,
an arm that is ten times slower than another one, and any arm on a state that is too small to time. Where no arm
qualifies, the text reports it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from tensorkeep.bench.analysis.samples import Samples
from tensorkeep.bench.analysis.verdicts import too_small
from tensorkeep.bench.analysis.wording import interval_95, listed, number
from tensorkeep.bench.results import Arm, Judged, Measure, Recommendation
from tensorkeep.units import counted

_SYNCING = ("sync", "fsync", "durable")
_LOADS = ("load_cold", "load_warm")
_OF_TRAINING = (
    ("speed", "tokens_per_second"),
    ("memory", "peak_memory"),
    ("loss", "loss"),
    ("loss in equal time", "loss_in_time"),
)
_TIMES = ("s", "tokens/s")
_TEN_TIMES = 10.0
_TOLERATED = 1.10
"""How many times worse than the baseline an arm may be in one measure and still be recommended all round."""


def recommendations(samples: Samples) -> Iterator[Recommendation]:
    """Yield a recommendation for each purpose (such as saving, or the speed of training), and one for all of them.

    ``arm`` is None where nothing is recommended; the text gives the reason. Measures on which no arm was judged are
    left out.
    """
    if samples.baseline is None or too_small(samples.results):
        return
    measures = {
        measure.name: measure
        for measure in samples.measures
        if any(samples.statistics(arm, measure).verdict in get_args(Judged) for arm in samples.arms)
    }
    load = next((name for name in _LOADS if name in measures), "")
    first = ("first load", "load_first")
    purposes = (("saving", "save"), first, ("loading", load), ("size", "stored"), *_OF_TRAINING)
    judged = {purpose: measures[name] for purpose, name in purposes if name in measures}
    for purpose, measure in judged.items():
        yield _single(samples, purpose, measure)
    if len(judged) > 1:
        yield _all_round(samples, judged)


def candidates(samples: Samples) -> list[Arm]:
    """Return the arms that may be recommended: not a control, durable, correct in every block, and not far too slow."""
    return [arm for arm in _sound(samples) if not slowness(samples, arm)]


def slowness(samples: Samples, arm: Arm) -> str:
    """Return a sentence if an arm is at least ten times slower than another one in a primary measure, else nothing."""
    for measure in samples.primary:
        if measure.unit not in _TIMES or samples.statistics(arm, measure).gain is None:
            continue
        others = [other for other in samples.arms if other.role == "baseline" or other in _sound(samples)]
        best = max(others, key=lambda other: _gain(samples, other, measure), default=arm)
        factor = _gain(samples, best, measure) / _gain(samples, arm, measure)
        if factor >= _TEN_TIMES:
            return f"{number(factor)} times slower than {best.name} ({measure.label})"
    return ""


def _sound(samples: Samples) -> list[Arm]:
    return [
        arm
        for arm in samples.arms
        if arm.role == "arm"
        and all(arm.settings.get(key) is not False for key in _SYNCING)
        and not samples.failed_gate(arm.name)
    ]


def _gain(samples: Samples, arm: Arm, measure: Measure) -> float:
    """Return the gain over the baseline; 1 for the baseline, and for an arm that was not compared."""
    return samples.statistics(arm, measure).gain or 1.0


def _single(samples: Samples, purpose: str, measure: Measure) -> Recommendation:
    helping = [arm for arm in _sound(samples) if samples.statistics(arm, measure).verdict == "helps"]
    ranked = sorted(helping, key=lambda arm: -_gain(samples, arm, measure))
    excluded = {arm.name: reason for arm in ranked if (reason := slowness(samples, arm))}
    ranked = [arm for arm in ranked if arm.name not in excluded]
    what = f"on this machine, {_what(purpose, measure)}"
    left_out = "".join(f"; {name} is left out: {reason}" for name, reason in excluded.items())
    if not ranked:
        return Recommendation(purpose, f"{what}: no arm is shown to be better than {samples.baseline}{left_out}")
    best = ranked[0]
    text = f"{what}: {best.name}, {_gain_text(samples, best, measure)}"
    if purpose != "size":
        stored = samples.compare(best.name, samples.baseline, samples.results.measure("stored"))
        text += f", {number(1 / stored.gain)} of the bytes" if stored else ""
    text += _peers(samples, ranked, measure) + _worse(samples, best) + _failures(samples, best) + left_out
    return Recommendation(purpose, text, best.name, best.settings)


def _gain_text(samples: Samples, arm: Arm, measure: Measure) -> str:
    found = samples.statistics(arm, measure)
    gain = found.gain or 1.0
    if measure.unit == "B" and found.gain_low and found.gain_high:
        # A fraction of the bytes reads better than how many times fewer they are.
        low, high = 1 / found.gain_high, 1 / found.gain_low
        spread = "" if high / low < 1.0005 else f" ({interval_95(low, high)})"
        return f"{number(1 / gain)} of the bytes of {samples.baseline}{spread}"
    return f"{number(gain)}x {samples.baseline} ({interval_95(found.gain_low, found.gain_high)})"


def _peers(samples: Samples, ranked: Sequence[Arm], measure: Measure) -> str:
    """Name the arms that are not clearly slower than the best: their interval against it reaches 1."""
    level = []
    for other in ranked[1:]:
        against = samples.compare(ranked[0].name, other.name, measure)
        if against is not None and (against.low is None or against.low <= 1):
            level.append(other.name)
    return f"; {listed(level)} {'is' if len(level) == 1 else 'are'} not clearly behind" if level else ""


def _worse(samples: Samples, arm: Arm) -> str:
    """Name the measures in which the arm is worse than the baseline."""
    worse = [
        f"{measure.label} ({number(_gain(samples, arm, measure))}x)"
        for measure in samples.measures
        if samples.statistics(arm, measure).verdict == "hurts"
    ]
    return f"; but worse in {listed(worse)}" if worse else ""


def _failures(samples: Samples, arm: Arm) -> str:
    failed, blocks = len(samples.failures(arm.name)), len(samples.cells_of(arm.name))
    return f"; but it failed in {failed} of {counted(blocks, 'block')}" if failed else ""


def _what(purpose: str, measure: Measure) -> str:
    return f"{purpose} ({measure.label})" if purpose == "loading" else purpose


def _all_round(samples: Samples, judged: Mapping[str, Measure]) -> Recommendation:
    """Recommend the arm with the best score of those that help somewhere and are nowhere more than a little worse."""
    measures = list(judged.values())
    sound = [arm for arm in candidates(samples) if _is_better_all_round(samples, arm, measures)]
    if not sound:
        helping = any(samples.statistics(arm, one).verdict == "helps" for arm in _sound(samples) for one in measures)
        text = f"no arm is shown to be better than {samples.baseline}"
        if helping:
            text = f"no arm improves one of {listed(list(judged))} without making another worse"
        return Recommendation("all", f"on this machine, all round: {text}")
    front = list(_front(samples, sound, measures))
    best = max(front, key=lambda arm: _score(samples, arm, measures))
    parts = [f"{_what(*pair)}: {_part(samples, best, pair[1])}" for pair in judged.items()]
    text = f"on this machine, all round: {best.name}; {'; '.join(parts)}{_failures(samples, best)}"
    others = [arm.name for arm in front if arm is not best]
    if others:
        text += f"; {listed(others)} {'is' if len(others) == 1 else 'are'} better in some and worse in others"
    return Recommendation("all", text, best.name, best.settings)


def _is_better_all_round(samples: Samples, arm: Arm, measures: Sequence[Measure]) -> bool:
    verdicts = [samples.statistics(arm, measure).verdict for measure in measures]
    tolerated = all(
        verdict != "hurts" or (measure.unit != "nats" and _gain(samples, arm, measure) >= 1 / _TOLERATED)
        for verdict, measure in zip(verdicts, measures, strict=True)
    )
    return tolerated and "helps" in verdicts and set(verdicts) <= set(get_args(Judged))


def _score(samples: Samples, arm: Arm, measures: Sequence[Measure]) -> float:
    """Return the sum of the logs of an arm's gains, in which all times together count as much as the bytes."""
    times = [math.log(_gain(samples, arm, one)) for one in measures if one.unit in _TIMES]
    others = [math.log(_gain(samples, arm, one)) for one in measures if one.unit not in _TIMES]
    return sum(times) / max(1, len(times)) + sum(others)


def _part(samples: Samples, arm: Arm, measure: Measure) -> str:
    verdict = samples.statistics(arm, measure).verdict
    if verdict == "about the same":
        return f"about the same as {samples.baseline}"
    if verdict == "within noise":
        return f"no difference from {samples.baseline} is shown"
    return _gain_text(samples, arm, measure)


def _front(samples: Samples, arms: Sequence[Arm], measures: Sequence[Measure]) -> Iterator[Arm]:
    """Yield the arms that no other arm matches everywhere and beats somewhere (the Pareto front)."""
    gains = {arm.name: [_gain(samples, arm, measure) for measure in measures] for arm in arms}
    for arm in arms:
        own = gains[arm.name]
        beaten = any(other != own and all(a >= b for a, b in zip(other, own, strict=True)) for other in gains.values())
        if not beaten:
            yield arm
