"""Recommendations for this machine, computed from the results.

Only an arm with the verdict *helps* is recommended; never the A/A control, an arm that does not sync what it wrote, or
an arm that failed its gate even once. Where no arm helps, the text reports it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from tensorkeep.bench.analysis.samples import Samples
from tensorkeep.bench.analysis.wording import interval_95, listed, number
from tensorkeep.bench.results import Arm, Measure, Recommendation, Verdict

_SYNCING = ("sync", "fsync", "durable")
_LOADS = ("load_cold", "load_warm")
_OF_TRAINING = (
    ("speed", "tokens_per_second"),
    ("memory", "peak_memory"),
    ("loss", "loss"),
    ("loss in equal time", "loss_in_time"),
)
_JUDGED = ("helps", "hurts", "within noise")


def recommendations(samples: Samples) -> Iterator[Recommendation]:
    """Yield a recommendation for each purpose (saving, loading, size; speed, memory, loss), and one for all of them.

    ``arm`` is None where nothing is recommended; the text gives the reason. Measures on which no arm was judged are
    left out.
    """
    if samples.baseline is None:
        return
    measures = {
        measure.name: measure
        for measure in samples.measures
        if any(samples.statistics(arm, measure).verdict in _JUDGED for arm in samples.arms)
    }
    load = next((name for name in _LOADS if name in measures), "")
    purposes = (("saving", "save"), ("loading", load), ("size", "stored"), *_OF_TRAINING)
    judged = {purpose: measures[name] for purpose, name in purposes if name in measures}
    for purpose, measure in judged.items():
        yield _single(samples, purpose, measure)
    if len(judged) > 1:
        yield _all_round(samples, judged)


def candidates(samples: Samples) -> list[Arm]:
    """Return the arms that may be recommended: not a control, durable, and correct in every block."""
    return [
        arm
        for arm in samples.arms
        if arm.role == "arm"
        and all(arm.settings.get(key) is not False for key in _SYNCING)
        and not samples.failed_gate(arm.name)
    ]


def _gain(samples: Samples, arm: Arm, measure: Measure) -> float:
    return samples.statistics(arm, measure).gain or 0.0


def _single(samples: Samples, purpose: str, measure: Measure) -> Recommendation:
    helping = [arm for arm in candidates(samples) if samples.statistics(arm, measure).verdict == "helps"]
    what = f"on this machine, {_what(purpose, measure)}"
    if not helping:
        return Recommendation(purpose, f"{what}: no arm is shown to be better than {samples.baseline}")
    ranked = sorted(helping, key=lambda arm: -_gain(samples, arm, measure))
    best = ranked[0]
    text = f"{what}: {best.name}, {_gain_text(samples, best, measure)}"
    if purpose != "size":
        stored = samples.compare(best.name, samples.baseline, samples.results.measure("stored"))
        text += f", {number(1 / stored.gain)} of the bytes" if stored else ""
    text += _peers(samples, ranked, measure) + _worse(samples, best)
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


def _what(purpose: str, measure: Measure) -> str:
    return f"{purpose} ({measure.label})" if purpose == "loading" else purpose


def _all_round(samples: Samples, judged: Mapping[str, Measure]) -> Recommendation:
    """Recommend the largest mean gain of the arms on the Pareto front that help somewhere and hurt nowhere."""
    measures = list(judged.values())
    verdicts = {arm.name: {samples.statistics(arm, measure).verdict for measure in measures} for arm in samples.arms}
    useful: tuple[set[Verdict | None], ...] = ({"helps"}, {"helps", "within noise"})
    sound = [arm for arm in candidates(samples) if verdicts[arm.name] in useful]
    if not sound:
        text = f"no arm improves one of {listed(list(judged))} without making another worse"
        return Recommendation("all", f"on this machine, all round: {text}")
    front = list(_front(samples, sound, measures))
    best = max(front, key=lambda arm: sum(math.log(_gain(samples, arm, measure)) for measure in measures))
    parts = [f"{_what(*pair)}: {_part(samples, best, pair[1])}" for pair in judged.items()]
    text = f"on this machine, all round: {best.name}; {'; '.join(parts)}"
    others = [arm.name for arm in front if arm is not best]
    if others:
        text += f"; {listed(others)} {'is' if len(others) == 1 else 'are'} better in some and worse in others"
    return Recommendation("all", text, best.name, best.settings)


def _part(samples: Samples, arm: Arm, measure: Measure) -> str:
    if samples.statistics(arm, measure).verdict != "helps":
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
