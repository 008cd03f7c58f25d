"""The comparison table of all arms: means, sizes and improvements.

The layout is that of the published comparison, with two corrections: sizes are in GiB, which it labels as GB, and
headings name cold and warm loads.
"""

from collections.abc import Sequence

from tensorkeep.bench.analysis.statistics import Description
from tensorkeep.bench.analysis.wording import NOTHING, percent, spread
from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.measures import GIB, Scale, amounts_differ, compared_arms, compared_measures, scale_of
from tensorkeep.report.tables import TONES, Entry, ReportTable, why_not_run

_NO_BASELINE = "the experiment has no baseline to improve on"


def isolated_table(results: Results) -> ReportTable:
    """Return mean and standard deviation of saving, loading and size: the table of the isolated suite."""
    columns = _columns(results, seconds=True)
    digits = _decimals(results, columns)

    def entry(arm: Arm, scale: Scale) -> Entry:
        if found := scale.describe(results, arm.name):
            return Entry(_mean_and_std(found, digits), found.mean)
        return Entry(_why(results, arm), tone="faint")

    rows = [(Entry(arm.name), *(entry(arm, scale) for scale in columns.values())) for arm in compared_arms(results)]
    return ReportTable("Mean ± standard deviation", ("=test", *(f"={head}" for head in columns)), rows, _note(results))


def isolated_text(results: Results) -> str:
    """Return that table exactly as the isolated suite prints it; longer names widen the first column."""
    columns = _columns(results, seconds=True)
    digits = _decimals(results, columns)
    rows = [["test", *columns]]
    for arm in compared_arms(results):
        row = [arm.name]
        for scale, width in zip(columns.values(), (7, 6, 5, 5), strict=False):
            found = scale.describe(results, arm.name)
            row.append(_mean_and_std(found, digits, width) if found else f"  {_why(results, arm)}")
        rows.append(row)
    wide = max(25, *(len(row[0]) for row in rows))
    return "\n".join(_aligned(rows, [wide, *(max(18, len(head)) for head in columns)], wide + 55))


def six_way_text(results: Results) -> str:
    """Return the table of the published six-way comparison in milliseconds, and its improvements over the baseline."""
    columns = _columns(results, seconds=False)
    arms = compared_arms(results)
    rows = [
        ["method", *columns],
        *([arm.name, *(_mean(results, arm, one) for one in columns.values())] for arm in arms),
    ]
    first, *others = zip(*rows, strict=True)
    wide = max(20, *map(len, first))
    lines = _aligned(rows, [wide, *(max(12, *map(len, column)) for column in others)], wide + 40)
    return "\n".join([*lines, "", *_improvement_lines(results, wide)])


def improvements_table(results: Results) -> ReportTable:
    """Return the change against the baseline in percent of the means; above 0 is better."""
    chosen = compared_measures(results).named()
    rows = [
        (Entry(arm.name), *(_improvement(results, arm, measure) for measure in chosen.values()))
        for arm in compared_arms(results)
        if arm.name != results.baseline
    ]
    note = f"Of the means, against {results.baseline}; above 0 is better." if results.baseline else _NO_BASELINE
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


def _improvement(results: Results, arm: Arm, measure: Measure) -> Entry:
    found = results.statistics(arm.name, measure.name)
    if found.change_percent is None:
        return Entry(NOTHING, tone="faint")
    tone = TONES[found.verdict] if found.verdict in ("helps", "hurts") else ""
    return Entry(percent(found.change_percent), found.change_percent, tone)


def _aligned(rows: Sequence[Sequence[str]], widths: Sequence[int], rule: int) -> list[str]:
    """Return rows as lines of left-aligned columns, with a rule below the first."""
    lines = [" ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return [lines[0], "-" * rule, *lines[1:]]


def _columns(results: Results, *, seconds: bool) -> dict[str, Scale]:
    """Return heading and scale of each measure: the units of the published comparison, unless amounts differ."""
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
            scale = Scale(measure, "GiB", 1 / GIB)
        else:
            scale = Scale(measure, "s", 1.0) if seconds else Scale(measure, "ms", 1e3)
        columns[f"{word} ({scale.unit})"] = scale
    return columns


def _decimals(results: Results, columns: dict[str, Scale]) -> int | None:
    """Return two, as the published comparison has, or four for small states; None for training, where figures vary."""
    if results.experiment.workload == "training":
        return None
    found = [scale.describe(results, arm.name) for scale in columns.values() for arm in compared_arms(results)]
    return 4 if any(one and 0 < one.mean < 0.1 for one in found) else 2


def _mean(results: Results, arm: Arm, scale: Scale) -> str:
    found = scale.describe(results, arm.name)
    if found is None:
        return _why(results, arm)
    return f"{found.mean:.1f}" if scale.unit == "ms" else f"{found.mean:.{2 if found.mean >= 0.1 else 4}f}"


def _mean_and_std(found: Description, digits: int | None, width: int = 0) -> str:
    if digits is None:
        return spread(found.mean, found.std)
    deviation = "" if found.std is None else f" ± {found.std:.{digits}f}"
    return f"{found.mean:{width}.{digits}f}{deviation}"


def _why(results: Results, arm: Arm) -> str:
    """Return why a figure is missing; an arm that ran may still lack one measure."""
    return NOTHING if results.ran(arm.name) else why_not_run(results.cells_by_arm[arm.name])[0]


def _note(results: Results) -> str:
    if results.experiment.workload == "training":
        return "The speed excludes the first step, with everything that it loads and compiles."
    if amounts_differ(results):
        return "Arms worked on states of different sizes, so figures are per raw byte."
    chosen = compared_measures(results)
    loads = f"Loads are {chosen.load_words}s; " if chosen.load is not None and chosen.load_words != "load" else ""
    return f"{loads}1 GiB = 1.074 GB."
