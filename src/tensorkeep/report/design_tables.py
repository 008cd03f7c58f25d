"""The tables of designs (steps, effects, interactions) and of published claims."""

from tensorkeep.bench.analysis.wording import NOTHING, gain, interval
from tensorkeep.bench.results import Claim, Effect, Interaction, Results, Step
from tensorkeep.report.tables import Entry, ReportTable, gain_entries

_CLAIM_TONES = {"reproduced": "good", "not reproduced": "bad", "confounded": "bad", "not run": "faint"}


_TABLES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "steps": (
        "Steps",
        ("=change", ">step", ">95% interval", ">from the base", ">fraction", ">alone", ">without it", "notes"),
        "Step: gain over the stack before it. Fraction: of the total gain, on a log scale. Alone: gain of this change "
        "added alone to the base. Without it: how many times worse the full stack is without this change.",
    ),
    "effects": (
        "Effects",
        ("=factor", ">gain", ">95% interval"),
        "A factor's gain from its first to its last level, over all other factors; a pair: measured over expected.",
    ),
    "interactions": (
        "Interactions",
        ("=changes", ">together", ">product of the singles", ">ratio", ">95% interval"),
        "Ratio: above 1 the changes strengthen each other, below 1 they weaken each other.",
    ),
}
"""Title, headings and note of the tables of each kind."""


def design_tables(results: Results) -> dict[str, list[ReportTable]]:
    """Return the tables of steps, effects and interactions: of each kind, one per measure that occurs."""
    tables: dict[str, list[ReportTable]] = {kind: [] for kind in _TABLES}
    for kind, (title, headings, note) in _TABLES.items():
        for measure in results.measures:
            rows = [_row(one) for one in getattr(results.summary, kind) if one.measure == measure.name]
            if rows:
                tables[kind].append(ReportTable(f"{title}: {measure.label}", headings, rows, note))
    return tables


def claims_table(results: Results) -> ReportTable | None:
    """Return the published claims beside our figures, or None where none was checked."""
    claims = results.summary.claims
    headings = ("=id", "=verdict", "claim", "published", "measured", "reason")
    return ReportTable("Claims checked", headings, [_claim(claim) for claim in claims]) if claims else None


def aliases_lines(results: Results) -> list[str]:
    """Return the effects that a fractional design cannot separate, one line per group."""
    return [" = ".join(" x ".join(effect) for effect in group) for group in results.experiment.aliases]


def _row(one: Step | Effect | Interaction) -> tuple[Entry, ...]:
    if isinstance(one, Effect):
        return Entry(" x ".join(one.factors)), *gain_entries(one.gain, one.low, one.high)
    if isinstance(one, Interaction):
        gains = (Entry(gain(value), value) for value in (one.gain, one.product))
        return Entry(" + ".join(one.changes)), *gains, *gain_entries(one.ratio, one.low, one.high)
    fraction = NOTHING if one.fraction is None else f"{one.fraction * 100:.0f}%"
    return (
        Entry(one.change),
        *gain_entries(one.gain_from_previous, one.gain_from_previous_low, one.gain_from_previous_high),
        Entry(gain(one.gain_from_base), one.gain_from_base),
        Entry(fraction, one.fraction),
        Entry(gain(one.alone), one.alone),
        Entry(gain(one.without), one.without),
        Entry("; ".join(one.notes)),
    )


def _claim(claim: Claim) -> tuple[Entry, ...]:
    measured = claim.ours
    if not measured and claim.gain is not None:
        measured = f"{gain(claim.gain)} (95% {interval(claim.gain_low, claim.gain_high)})"
    verdict = Entry(claim.verdict, tone=_CLAIM_TONES[claim.verdict])
    texts = (claim.claim, claim.theirs or NOTHING, measured or NOTHING, claim.reason)
    return Entry(claim.id), verdict, *map(Entry, texts)
