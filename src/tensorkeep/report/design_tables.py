"""The tables that a design adds: steps, effects, interactions, the claims of others; and what it all comes to."""

from __future__ import annotations

from tensorkeep.bench.results import Claim, Results, Step
from tensorkeep.bench.results import printable as clean
from tensorkeep.report.sheet import Entry, Sheet, entry
from tensorkeep.report.wording import NOTHING, gain, interval

_CLAIM_TONES = {"reproduced": "good", "not reproduced": "bad", "confounded": "bad", "not run": "faint"}


def steps_tables(results: Results) -> list[Sheet]:
    """Return the way from the baseline to the full stack, one table per measure."""
    headings = ("=change", ">step", ">95% interval", ">from the start", ">share", ">alone", ">without it", "notes")
    note = (
        "Step: gain over what was before it. Share: of the whole way, on a log scale. Alone: gain of this change "
        "added alone to the start. Without it: how many times worse everything together is without this change."
    )
    sheets = []
    for measure, label in _measures(results, [step.measure for step in results.summary.steps]):
        rows = [_step(step) for step in results.summary.steps if step.measure == measure]
        sheets.append(Sheet(f"Steps: {label}", headings, rows, note))
    return sheets


def effects_tables(results: Results) -> list[Sheet]:
    """Return main effects and interactions of a factorial design, one table per measure."""
    note = "A factor's gain from its first to its last level, over all other factors; a pair: measured over expected."
    sheets = []
    effects = results.summary.effects
    for measure, label in _measures(results, [effect.measure for effect in effects]):
        rows = []
        for effect in effects:
            if effect.measure == measure:
                name = " x ".join(map(clean, effect.factors))
                rows.append((entry(name), *_gain(effect.gain, effect.low, effect.high)))
        sheets.append(Sheet(f"Effects: {label}", ("=factor", ">gain", ">95% interval"), rows, note))
    return sheets


def interactions_tables(results: Results) -> list[Sheet]:
    """Return what changes do together against the product of the single ones, one table per measure."""
    headings = ("=changes", ">together", ">product of the singles", ">ratio", ">95% interval")
    note = "Ratio: above 1 the changes help each other, below 1 they get in each other's way."
    sheets = []
    found = results.summary.interactions
    for measure, label in _measures(results, [one.measure for one in found]):
        rows = []
        for one in found:
            if one.measure == measure:
                product = entry(gain(one.product), one.product)
                cells = (entry(gain(one.gain), one.gain), product, *_gain(one.ratio, one.low, one.high))
                rows.append((entry(" + ".join(map(clean, one.changes))), *cells))
        sheets.append(Sheet(f"Interactions: {label}", headings, rows, note))
    return sheets


def claims_table(results: Results) -> Sheet | None:
    """Return the claims of others beside our figures, or None where none was checked."""
    claims = results.summary.claims
    if not claims:
        return None
    headings = ("=id", "=verdict", "claim", "theirs", "ours", "reason")
    return Sheet("Claims checked", headings, [_claim(claim) for claim in claims])


def aliases_lines(results: Results) -> list[str]:
    """Return the effects that a fractional design cannot tell apart, one line per group."""
    lines = []
    for group in results.experiment.aliases:
        lines.append(" = ".join(clean(" x ".join(effect)) for effect in group))
    return lines


def _claim(claim: Claim) -> tuple[Entry, ...]:
    ours = clean(claim.ours or "")
    if not ours and claim.gain is not None:
        ours = f"{gain(claim.gain)} (95% {interval(claim.gain_low, claim.gain_high)})"
    verdict = entry(clean(claim.verdict), tone=_CLAIM_TONES.get(claim.verdict, ""))
    texts = (claim.claim, claim.theirs or NOTHING, ours or NOTHING, claim.reason or "")
    return (entry(clean(str(claim.id))), verdict, *(entry(clean(text)) for text in texts))


def _step(step: Step) -> tuple[Entry, ...]:
    share = NOTHING if step.fraction is None else f"{step.fraction * 100:.0f}%"
    previous = _gain(step.gain_from_previous, step.gain_from_previous_low, step.gain_from_previous_high)
    return (
        entry(clean(step.change)),
        *previous,
        entry(gain(step.gain_from_base), step.gain_from_base),
        entry(share, step.fraction),
        entry(gain(step.alone), step.alone),
        entry(gain(step.without), step.without),
        entry(clean("; ".join(step.notes))),
    )


def _gain(value: float | None, low: float | None, high: float | None) -> tuple[Entry, Entry]:
    tone = ""
    if low is not None and high is not None:
        tone = "good" if low > 1 else "bad" if high < 1 else "faint"
    return entry(gain(value), value, tone), entry(interval(low, high), low)


def _measures(results: Results, used: list[str]) -> list[tuple[str, str]]:
    """Return name and label of the measures that are used, in the order of the results file."""
    return [(one.name, one.label) for one in results.measures if one.name in set(used)]
