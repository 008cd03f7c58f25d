"""The tables of a report: verdicts, observations, and why arms did not run."""

from collections.abc import Sequence

from tensorkeep.ext import counted, format_rate, number
from tensorkeep.ext.pages import ReportTable, TableEntry
from tensorkeep_bench.analysis.samples import RULES, threshold
from tensorkeep_bench.report.drawing import gain_colour
from tensorkeep_bench.report.measures import (
    GIB,
    FigureScale,
    amounts_differ,
    compared_arms,
    compared_measures,
    scale_of,
    subject_name,
)
from tensorkeep_bench.results import Arm, CellRecord, Claim, Effect, Interaction, Measure, Results, StackStep
from tensorkeep_bench.statistics import Description
from tensorkeep_bench.wording import (
    NOTHING,
    capitalised,
    claim_words,
    difference,
    gain,
    interval,
    interval_95,
    percent,
    probability,
    spread,
    verdict_words,
)

TONES: dict[str | None, str] = {
    "helps": "good",
    "hurts": "bad",
    "about the same": "faint",
    "within noise": "faint",
    "undecided": "faint",
    "wrong result": "bad",
    "not compared": "faint",
    "not run": "faint",
    "too few runs": "faint",
    "too small": "faint",
}
STATUS = {
    "ok": "ok",
    "planned": "not reached",
    "gate": "wrong result",
    "failed": "failed",
    "timeout": "timed out",
    "memory": "out of memory",
    "disk": "disk full",
    "not-run": "not run",
}


def entries(*texts: str) -> tuple[TableEntry, ...]:
    return tuple(map(TableEntry, texts))


def gain_entries(value: float | None, low: float | None, high: float | None) -> tuple[TableEntry, TableEntry]:
    tone = ""
    if low is not None and high is not None:
        # By the interval, not by the gain: the design tables have no verdicts.
        tone = "good" if low > 1 else "bad" if high < 1 else "faint"
    return TableEntry(gain(value), value, tone), TableEntry(interval(low, high), low)


def why_not_run(cells: Sequence[CellRecord]) -> tuple[str, str]:
    """Return why an arm has no figures, as (status in words, reason)."""
    bad = [cell for cell in cells if cell.status != "ok"]
    if not bad:
        return NOTHING, "no cell was planned"
    # A failure explains more than a cell that was never reached.
    worst = min(bad, key=lambda cell: (cell.status == "planned", cell.order))
    return STATUS[worst.status], worst.reason or ""


def verdict_table(results: Results, measure: Measure) -> ReportTable:
    scale = scale_of(results, measure)
    # Throughput and fraction of the bytes make sense only for a saved state.
    extra = _per_byte_headings(results).get(measure.unit, ())
    figures = (f">median ({scale.unit})", ">mean ± std", ">gain", ">95% interval", ">change")
    headings = ("=arm", "=verdict", *figures, *extra, ">p (Holm)", ">runs")
    note = f"{capitalised(measure.about).rstrip('.')}. " if measure.about else ""
    note += "Gain: how many times better than the baseline, above 1 is better. "
    note += " ".join(f"{capitalised(line)}." for line in verdict_rules(results, measure))
    rows = [_row(results, arm, scale) for arm in _all_arms(results)]
    return ReportTable(measure.label, headings, rows, note.rstrip())


def verdict_rules(results: Results, measure: Measure) -> list[str]:
    """Return a line for each verdict that an arm has in a measure: its name and its rule."""
    given = {results.statistics(arm.name, measure.name).verdict for arm in results.arms}
    least = difference(threshold(measure))
    return [f"{verdict}: {rule.format(least=least)}" for verdict, rule in RULES.items() if verdict in given]


def not_run_table(results: Results) -> ReportTable:
    rows = []
    for arm in _all_arms(results):
        cells = results.cells_by_arm[arm.name]
        bad = [cell for cell in cells if cell.status != "ok"]
        if bad or not cells:
            status, reason = why_not_run(bad)
            if cells and not reason and all(cell.status == "planned" for cell in bad):
                reason = f"not reached: {len(bad)} of {counted(len(cells), 'run')}"
            rows.append(entries(arm.name, status, f"{len(bad)} of {len(cells)}", reason))
    return ReportTable("Not run", ("=arm", "=status", ">cells", "reason"), rows)


def observed_table(results: Results) -> ReportTable:
    rows = []
    for arm in _all_arms(results):
        cell = next((cell for cell in results.cells_by_arm[arm.name] if cell.observed), None)
        for technique, text in cell.observed.items() if cell else ():
            rows.append(entries(arm.name, technique, text))
    return ReportTable("Techniques observed", ("=arm", "=technique", "observed in the first step"), rows)


def _all_arms(results: Results) -> list[Arm]:
    return [*compared_arms(results), *(arm for arm in results.arms if arm.role == "control")]


def _row(results: Results, arm: Arm, scale: FigureScale) -> tuple[TableEntry, ...]:
    found = results.statistics(arm.name, scale.measure.name)
    cells = results.cells_by_arm[arm.name]
    described = scale.describe(results, arm.name)
    verdict = verdict_words(found)
    if described is None:
        status = why_not_run(cells)[0]
        # One wrong result decides, whatever else happened. If all cells ran, only this measure is missing.
        if found.verdict != "wrong result":
            verdict = status if status != NOTHING or not cells else "not measured"
        figures = [TableEntry(verdict, tone="faint", about=found.reason or ""), *entries(NOTHING, NOTHING)]
    else:
        both = spread(described.mean, described.std)
        figures = [TableEntry(verdict, tone=TONES.get(found.verdict, ""), about=found.reason or "")]
        figures += [TableEntry(number(described.median, 4), described.median), TableEntry(both, described.mean)]
    figures += [
        TableEntry(gain(found.gain), found.gain, TONES.get(found.verdict, "")),
        TableEntry(interval(found.gain_low, found.gain_high), found.gain_low),
        TableEntry(percent(found.change_percent), found.change_percent),
    ]
    if scale.measure.unit in _per_byte_headings(results):
        # A median per raw byte gives raw bytes per second, or a fraction of the raw bytes.
        figures.append(_per_byte(found.per_byte, scale.measure.unit))
    runs = described.n if described else 0
    tested = TableEntry(probability(found.p_holm), found.p_holm)
    return TableEntry(arm.name), *figures, tested, TableEntry(str(runs), runs)


def _per_byte_headings(results: Results) -> dict[str, tuple[str]]:
    return {} if results.experiment.workload == "training" else {"s": (">throughput",), "B": (">of raw",)}


def _per_byte(middle: float | None, unit: str) -> TableEntry:
    if not middle:
        return TableEntry(NOTHING)
    if unit == "s":
        return TableEntry(format_rate(1, middle), 1 / middle)
    return TableEntry(f"{middle:.3f}", middle)


# The comparison of all arms, in the layout of the published comparison with two corrections: sizes in GiB are labelled
# as GiB, and headings name cold and warm loads.

_NO_BASELINE = "the experiment has no baseline to improve on"


def isolated_table(results: Results) -> ReportTable:
    columns = _columns(results, seconds=True)
    digits = _decimals(results, columns)

    def entry(arm: Arm, scale: FigureScale) -> TableEntry:
        if found := scale.describe(results, arm.name):
            return TableEntry(_mean_and_std(found, digits), found.mean)
        return TableEntry(_why(results, arm), tone="faint")

    rows = [
        (TableEntry(arm.name), *(entry(arm, scale) for scale in columns.values())) for arm in compared_arms(results)
    ]
    return ReportTable("Mean ± standard deviation", ("=test", *(f"={head}" for head in columns)), rows, _note(results))


def isolated_text(results: Results) -> str:
    """Return that table exactly as the isolated suite prints it; longer names widen the first column."""
    columns = _columns(results, seconds=True)
    digits = _decimals(results, columns)
    rows = [["test", *columns]]
    for arm in compared_arms(results):
        row = [arm.name]
        # The widths of the isolated suite, so that its users can compare line by line.
        for scale, width in zip(columns.values(), (7, 6, 5, 5), strict=False):
            found = scale.describe(results, arm.name)
            row.append(_mean_and_std(found, digits, width) if found else f"  {_why(results, arm)}")
        rows.append(row)
    wide = max(25, *(len(row[0]) for row in rows))
    return "\n".join(_aligned(rows, [wide, *(max(18, len(head)) for head in columns)], wide + 55))


def six_way_text(results: Results) -> str:
    """Return the comparison in the layout of the published six-way comparison."""
    columns = _columns(results, seconds=False)
    rows = [["method", *columns]]
    rows += [[arm.name, *(_mean(results, arm, one) for one in columns.values())] for arm in compared_arms(results)]
    first, *others = zip(*rows, strict=True)
    wide = max(20, *map(len, first))
    lines = _aligned(rows, [wide, *(max(12, *map(len, column)) for column in others)], wide + 40)
    return "\n".join([*lines, "", *_improvement_lines(results, wide)])


def improvements_table(results: Results) -> ReportTable:
    chosen = compared_measures(results).named()
    rows = [
        (TableEntry(arm.name), *(_improvement(results, arm, measure) for measure in chosen.values()))
        for arm in compared_arms(results)
        if arm.name != results.baseline
    ]
    note = f"The gain over {results.baseline} as a percentage; above 0 is better." if results.baseline else _NO_BASELINE
    headings = ("=method", *(f">{word}" for word in chosen))
    return ReportTable("Improvement over the baseline", headings, rows, note)


def _improvement_lines(results: Results, wide: int) -> list[str]:
    if results.baseline is None:
        return [_NO_BASELINE]
    chosen = compared_measures(results)
    words = [word for word, measure in chosen.named().items() if measure is not chosen.size]
    rows: list[Sequence[str]] = [["method", *(f"{word} improvement" for word in words)]]
    rows += [row[: len(words) + 1] for row in improvements_table(results).texts()]
    return _aligned(rows, [wide, *(max(19, len(head)) for head in rows[0][1:])], wide + 38)


def _improvement(results: Results, arm: Arm, measure: Measure) -> TableEntry:
    found = results.statistics(arm.name, measure.name)
    if found.change_percent is None:
        return TableEntry(NOTHING, tone="faint")
    tone = TONES[found.verdict] if found.verdict in ("helps", "hurts") else ""
    return TableEntry(percent(found.change_percent), found.change_percent, tone)


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int], rule: int) -> list[str]:
    lines = [" ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return [lines[0], "-" * rule, *lines[1:]]


def _columns(results: Results, *, seconds: bool) -> dict[str, FigureScale]:
    chosen = compared_measures(results).named()
    if results.experiment.workload == "training":
        # The speed excludes the first step, which compiles, so it has a column.
        first = [one for one in results.measures if one.name == "first_step"]
        scales = [scale_of(results, one) for one in (*chosen.values(), *first)]
        return {scale.label: scale for scale in scales}
    columns = {}
    for word, measure in chosen.items():
        if amounts_differ(results) or measure.unit not in ("s", "B"):
            scale = scale_of(results, measure)
        elif measure.unit == "B":
            scale = FigureScale(measure, "GiB", 1 / GIB)
        else:
            # The units of the published comparison, whatever the size of the figures.
            scale = FigureScale(measure, "s", 1.0) if seconds else FigureScale(measure, "ms", 1e3)
        columns[f"{word} ({scale.unit})"] = scale
    return columns


def _decimals(results: Results, columns: dict[str, FigureScale]) -> int | None:
    if results.experiment.workload == "training":
        return None
    found = [scale.describe(results, arm.name) for scale in columns.values() for arm in compared_arms(results)]
    # Two, as the published comparison has; a small state would show 0.00.
    return 4 if any(one and 0 < one.mean < 0.1 for one in found) else 2


def _mean(results: Results, arm: Arm, scale: FigureScale) -> str:
    found = scale.describe(results, arm.name)
    if found is None:
        return _why(results, arm)
    return f"{found.mean:.1f}" if scale.unit == "ms" else f"{found.mean:.{2 if found.mean >= 0.1 else 4}f}"


def _mean_and_std(found: Description, digits: int | None, width: int = 0) -> str:
    # Figures of training vary too much for a fixed number of decimals.
    if digits is None:
        return spread(found.mean, found.std)
    deviation = "" if found.std is None else f" ± {found.std:.{digits}f}"
    return f"{found.mean:{width}.{digits}f}{deviation}"


def _why(results: Results, arm: Arm) -> str:
    # An arm that ran may still lack one measure.
    return NOTHING if results.ran(arm.name) else why_not_run(results.cells_by_arm[arm.name])[0]


def _note(results: Results) -> str:
    if results.experiment.workload == "training":
        return "The speed excludes the first step, with everything that it loads and compiles."
    if amounts_differ(results):
        return "Arms worked on states of different sizes, so figures are per raw byte."
    chosen = compared_measures(results)
    loads = f"Loads are {chosen.load_words}s; " if chosen.load is not None and chosen.load_words != "load" else ""
    return f"{loads}1 GiB = 1.074 GB."


# Designs and published claims

_CLAIM_TONES = {"reproduced": "good", "not reproduced": "bad", "confounded": "bad"}
# Title, headings and note of the tables by kind.
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


def design_tables(results: Results) -> dict[str, list[ReportTable]]:
    tables: dict[str, list[ReportTable]] = {kind: [] for kind in _TABLES}
    for kind, (title, headings, note) in _TABLES.items():
        for measure in results.measures:
            rows = [_design_row(one) for one in getattr(results.summary, kind) if one.measure == measure.name]
            if rows:
                tables[kind].append(ReportTable(f"{title}: {measure.label}", headings, rows, note))
    return tables


def claims_table(results: Results) -> ReportTable | None:
    claims = results.summary.claims
    headings = ("=id", "=verdict", "claim", "published", "measured", "reason")
    return ReportTable("Claims checked", headings, [_claim(claim) for claim in claims]) if claims else None


def aliases_lines(results: Results) -> list[str]:
    return [" = ".join(" x ".join(effect) for effect in group) for group in results.experiment.aliases]


def _design_row(one: StackStep | Effect | Interaction) -> tuple[TableEntry, ...]:
    if isinstance(one, Effect):
        return TableEntry(" x ".join(one.factors)), *gain_entries(one.gain, one.low, one.high)
    if isinstance(one, Interaction):
        gains = (TableEntry(gain(value), value) for value in (one.gain, one.product))
        return TableEntry(" + ".join(one.changes)), *gains, *gain_entries(one.ratio, one.low, one.high)
    fraction = NOTHING if one.fraction is None else f"{one.fraction * 100:.0f}%"
    return (
        TableEntry(one.change),
        *gain_entries(one.gain_from_previous, one.gain_from_previous_low, one.gain_from_previous_high),
        TableEntry(gain(one.gain_from_base), one.gain_from_base),
        TableEntry(fraction, one.fraction),
        TableEntry(gain(one.alone), one.alone),
        TableEntry(gain(one.without), one.without),
        TableEntry("; ".join(one.notes)),
    )


def _claim(claim: Claim) -> tuple[TableEntry, ...]:
    measured = claim.ours
    if not measured and claim.gain is not None:
        measured = f"{gain(claim.gain)} (95% {interval(claim.gain_low, claim.gain_high)})"
    verdict = TableEntry(claim_words(claim), tone=_CLAIM_TONES.get(claim.verdict, "faint"))
    texts = entries(claim.claim, claim.theirs or NOTHING, measured or NOTHING, claim.reason)
    return TableEntry(claim.id), verdict, *texts


# The heat map of gains


def gain_map(results: Results) -> ReportTable:
    arms = [arm for arm in compared_arms(results) if arm.name != results.baseline]
    measures = results.primary()
    ran = [arm for arm in arms if any(results.statistics(arm.name, one.name).gain for one in measures)]
    rows = [(TableEntry(arm.name), *(_entry(results, arm, one) for one in measures)) for arm in ran]
    missing = len(arms) - len(ran)
    note = f" {counted(missing, 'arm')} without figures {'is' if missing == 1 else 'are'} not shown." if missing else ""
    return ReportTable(
        f"How many times better than {results.baseline or 'the baseline'}: {subject_name(results)}",
        ("=arm", *(f">{one.label}" for one in measures)),
        rows,
        f"Above 1x is better. Grey: neither helps nor hurts by the rules.{note}",
    )


def _entry(results: Results, arm: Arm, measure: Measure) -> TableEntry:
    found = results.statistics(arm.name, measure.name)
    # A hostile file may have any number here.
    if not found.gain or found.gain < 0:
        return TableEntry(NOTHING, tone="faint")
    shown = found.gain if found.verdict in ("helps", "hurts") else None
    about = interval_95(found.gain_low, found.gain_high)
    # A loss that is 0.4% lower is a result.
    text = f"{found.gain:.3f}x" if measure.unit == "nats" else gain(found.gain)
    return TableEntry(text, found.gain, f"field {gain_colour(shown)}", about=about)
