"""What to use on this machine, in sentences computed from the figures.

Only an arm that *helps* is recommended. Never the placebo, never an arm that does not sync what it wrote, and never one
that gave back something else than was saved, even once. Where nothing helps, the sentence says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensorkeep.bench.analysis.phrases import interval, listed, number
from tensorkeep.bench.analysis.samples import Arm, Measure, Samples

Statistics = Mapping[str, Mapping[str, Mapping[str, Any]]]

_SYNCING = ("sync", "fsync", "durable")
_LOADS = ("load_cold", "load_warm")
_OF_TRAINING = (
    ("speed", "tokens_per_second"),
    ("memory", "peak_memory"),
    ("loss", "loss"),
    ("loss in equal time", "loss_in_time"),
)
_JUDGED = ("helps", "hurts", "within noise")


def recommendations(samples: Samples, statistics: Statistics) -> list[dict[str, Any]]:
    """Return a recommendation for saving, loading and size, or what else was measured, and for all of it together.

    ``arm`` is None where nothing is recommended; the text says why. Measures that no arm was judged on are left out.
    """
    if samples.baseline is None:
        return []
    save, stored = samples.measure("save"), samples.measure("stored")
    load = next((m for name in _LOADS if (m := samples.measure(name)) and _judged(samples, statistics, m)), None)
    training = ((purpose, samples.measure(name)) for purpose, name in _OF_TRAINING)
    purposes = (("saving", save), ("loading", load), ("size", stored), *training)
    judged = {purpose: m for purpose, m in purposes if m is not None and _judged(samples, statistics, m)}
    found = [_single(samples, statistics, purpose, measure) for purpose, measure in judged.items()]
    if len(judged) > 1:
        found.append(_all_round(samples, statistics, judged))
    return found


def candidates(samples: Samples) -> list[Arm]:
    """Return the arms that may be recommended: real, durable, and right every time."""
    return [arm for arm in samples.arms if arm.role == "arm" and _durable(arm) and not samples.failed_gate(arm.name)]


def _durable(arm: Arm) -> bool:
    return all(arm.settings.get(key) is not False for key in _SYNCING)


def _judged(samples: Samples, statistics: Statistics, measure: Measure) -> bool:
    return any(statistics[arm.name][measure.name].get("verdict") in _JUDGED for arm in samples.arms)


def _single(samples: Samples, statistics: Statistics, purpose: str, measure: Measure) -> dict[str, Any]:
    helping = [arm for arm in candidates(samples) if statistics[arm.name][measure.name].get("verdict") == "helps"]
    what = _what(purpose, measure)
    if not helping:
        return _nothing(purpose, f"on this machine, {what}: nothing here is shown to be better than {samples.baseline}")
    ranked = sorted(helping, key=lambda arm: -statistics[arm.name][measure.name]["gain"])
    best = ranked[0]
    text = f"on this machine, {what}: {best.name}, {_gain_text(samples, statistics, best, measure)}"
    if purpose != "size":
        text += _bytes_text(samples, best)
    text += _peers(samples, ranked, measure) + _but(samples, statistics, best)
    return {"for": purpose, "arm": best.name, "text": text, "settings": dict(best.settings)}


def _nothing(purpose: str, text: str) -> dict[str, Any]:
    return {"for": purpose, "arm": None, "text": text, "settings": {}}


def _gain_text(samples: Samples, statistics: Statistics, arm: Arm, measure: Measure) -> str:
    found = statistics[arm.name][measure.name]
    if measure.unit == "B":
        # A share of the bytes reads better than how many times fewer they are.
        low, high = (found[key] and 1 / found[key] for key in ("gain_high", "gain_low"))
        spread = "" if low is None or high is None or high / low < 1.0005 else f" ({interval(low, high)})"
        return f"{number(1 / found['gain'])} of the bytes of {samples.baseline}{spread}"
    return f"{number(found['gain'])}x {samples.baseline} ({interval(found['gain_low'], found['gain_high'])})"


def _bytes_text(samples: Samples, arm: Arm) -> str:
    stored = samples.measure("stored")
    share = stored and samples.compare(arm.name, samples.baseline or "", stored)
    return f", {number(1 / share.gain)} of the bytes" if share else ""


def _peers(samples: Samples, ranked: Sequence[Arm], measure: Measure) -> str:
    """Return which others are not clearly behind the best: their interval against it reaches 1."""
    level = []
    for other in ranked[1:]:
        against = samples.compare(ranked[0].name, other.name, measure)
        if against is not None and (against.low is None or against.low <= 1):
            level.append(other.name)
    return f"; {listed(level)} {'is' if len(level) == 1 else 'are'} not clearly behind" if level else ""


def _but(samples: Samples, statistics: Statistics, arm: Arm) -> str:
    """Return in what else the arm is worse than the baseline."""
    found = [(measure.label, statistics[arm.name][measure.name]) for measure in samples.measures]
    worse = [f"{label} ({number(entry['gain'])}x)" for label, entry in found if entry.get("verdict") == "hurts"]
    return f"; but worse in {listed(worse)}" if worse else ""


def _what(purpose: str, measure: Measure) -> str:
    return f"{purpose} ({measure.label})" if purpose == "loading" else purpose


def _all_round(samples: Samples, statistics: Statistics, judged: Mapping[str, Measure]) -> dict[str, Any]:
    """Recommend the arm with the largest mean gain among those that help somewhere, hurt nowhere and lead somewhere."""
    measures = list(judged.values())
    sound = [arm for arm in candidates(samples) if _helps_and_never_hurts(statistics, arm, measures)]
    if not sound:
        what = listed(list(judged))
        return _nothing(
            "all", f"on this machine, all round: nothing here helps in one of {what} without hurting in another"
        )
    front = list(_front(sound, statistics, measures))
    best = max(front, key=lambda arm: _mean_log(statistics, arm, measures))
    parts = [f"{_what(*pair)}: {_part(samples, statistics, best, pair[1])}" for pair in judged.items()]
    text = f"on this machine, all round: {best.name}; {'; '.join(parts)}"
    others = [arm.name for arm in front if arm is not best]
    if others:
        text += f"; {listed(others)} {'is' if len(others) == 1 else 'are'} better in some and worse in others"
    return {"for": "all", "arm": best.name, "text": text, "settings": dict(best.settings)}


def _part(samples: Samples, statistics: Statistics, arm: Arm, measure: Measure) -> str:
    if statistics[arm.name][measure.name].get("verdict") != "helps":
        return f"no difference from {samples.baseline} is shown"
    return _gain_text(samples, statistics, arm, measure)


def _helps_and_never_hurts(statistics: Statistics, arm: Arm, measures: Sequence[Measure]) -> bool:
    words = [statistics[arm.name][measure.name].get("verdict") for measure in measures]
    return "helps" in words and all(word in ("helps", "within noise") for word in words)


def _front(arms: Sequence[Arm], statistics: Statistics, measures: Sequence[Measure]) -> Iterator[Arm]:
    """Yield the arms that no other is at least as good as everywhere and better than somewhere (Pareto)."""
    gains = {arm.name: [statistics[arm.name][measure.name]["gain"] for measure in measures] for arm in arms}
    for arm in arms:
        own = gains[arm.name]
        beaten = any(other != own and all(a >= b for a, b in zip(other, own, strict=True)) for other in gains.values())
        if not beaten:
            yield arm


def _mean_log(statistics: Statistics, arm: Arm, measures: Sequence[Measure]) -> float:
    return sum(math.log(statistics[arm.name][measure.name]["gain"]) for measure in measures) / len(measures)
