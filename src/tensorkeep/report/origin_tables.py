"""The tables of the documents that Tensorkeep started from, in their form.

Two things are put right: what they called GB are GiB, and whether a load was cold or warm is said.
"""

from __future__ import annotations

from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.bench.results import printable as clean
from tensorkeep.report.panels import Trio, compared, trio
from tensorkeep.report.samples import Samples, Scale, amounts_differ, gibibytes, scale_of
from tensorkeep.report.sheet import Entry, Sheet, entry
from tensorkeep.report.wording import NOTHING, not_run, percent, spread

_NO_BASELINE = "there is no baseline to improve on"


def isolated_table(results: Results) -> Sheet:
    """Return mean and standard deviation of saving, loading and size: the table of the isolated suite."""
    chosen = trio(results)
    columns = _columns(results, chosen, seconds=True)
    digits = _decimals(results, columns)
    rows = []
    for arm in compared(results):
        rows.append((entry(clean(arm.name)), *(_mean_and_std(results, arm, scale, digits) for _, scale in columns)))
    headings = ("=test", *(f"={heading}" for heading, _ in columns))
    return Sheet("Mean ± standard deviation", headings, rows, _note(results, chosen))


def isolated_text(results: Results) -> str:
    """Return that table exactly as the isolated suite prints it; longer names widen the first column."""
    chosen = trio(results)
    columns = _columns(results, chosen, seconds=True)
    wide = max([25, *(len(clean(arm.name)) for arm in compared(results))])
    heads = [f"{'test':<{wide}}", *(f"{heading:<18}" for heading, _ in columns)]
    lines = [" ".join(heads).rstrip(), "-" * (wide + 55)]
    digits = _decimals(results, columns)
    for arm in compared(results):
        cells = [f"{clean(arm.name):<{wide}}"]
        for (heading, scale), width in zip(columns, (7, 6, 5, 5), strict=False):
            samples = scale.samples(results, arm.name)
            text = _both(samples, width, digits) if samples else f"  {_why(results, arm)}"
            cells.append(f"{text:<{max(18, len(heading))}}")
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def six_way_text(results: Results) -> str:
    """Return the six-way guide's table in milliseconds, and its improvements over the baseline."""
    chosen = trio(results)
    columns = _columns(results, chosen, seconds=False)
    arms = compared(results)
    wide = max([20, *(len(clean(arm.name)) for arm in arms)])
    rows = [["method", *(heading for heading, _ in columns)]]
    for arm in arms:
        rows.append([clean(arm.name), *(_mean(results, arm, scale) for _, scale in columns)])
    widths = [wide, *(max([12, *map(len, column)]) for column in list(zip(*rows, strict=True))[1:])]
    lines = _aligned(rows, widths, "-" * (wide + 40))
    return "\n".join([*lines, "", *_improvement_lines(results, chosen, wide)])


def _mean(results: Results, arm: Arm, scale: Scale) -> str:
    samples = scale.samples(results, arm.name)
    if samples is None:
        return _why(results, arm)
    return f"{samples.mean:.1f}" if scale.unit == "ms" else f"{samples.mean:.{2 if samples.mean >= 0.1 else 4}f}"


def _aligned(rows: list[list[str]], widths: list[int], rule: str) -> list[str]:
    """Return rows as lines, a rule below the first."""
    padded = [[f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [" ".join(row).rstrip() for row in padded]
    return [lines[0], rule, *lines[1:]]


def improvements_table(results: Results) -> Sheet:
    """Return the change against the baseline in percent, as the documents count it: above 0 is better."""
    chosen = trio(results)
    words = _words(chosen)
    rows = []
    for arm in compared(results):
        if arm.name != results.baseline:
            cells = [_improvement(results, arm, measure) for measure in chosen.all()]
            rows.append((entry(clean(arm.name)), *cells))
    baseline = clean(results.baseline or "")
    note = f"Of the means, against {baseline}; above 0 is better." if baseline else _NO_BASELINE
    return Sheet("Improvement over the baseline", ("=method", *(f">{word}" for word in words)), rows, note)


def _improvement_lines(results: Results, chosen: Trio, wide: int) -> list[str]:
    if results.baseline is None:
        return [_NO_BASELINE]
    measures = [measure for measure in (chosen.save, chosen.load) if measure is not None]
    rows = [["method", *(f"{word} improvement" for word in _words(chosen)[: len(measures)])]]
    for arm in compared(results):
        if arm.name != results.baseline:
            rows.append([clean(arm.name), *(_improvement(results, arm, measure).text for measure in measures)])
    return _aligned(rows, [wide, *(max(19, len(head)) for head in rows[0][1:])], "-" * (wide + 38))


def _improvement(results: Results, arm: Arm, measure: Measure) -> Entry:
    found = results.statistics(arm.name, measure.name)
    if found is None or found.change_percent is None:
        return entry(NOTHING, tone="faint")
    tone = {"helps": "good", "hurts": "bad"}.get(found.verdict or "", "")
    return entry(percent(found.change_percent), found.change_percent, tone)


def _words(chosen: Trio) -> list[str]:
    if chosen.save is not None and chosen.save.name == "save":
        named = {"save": chosen.save, chosen.load_words: chosen.load, "size": chosen.size}
        return [word for word, measure in named.items() if measure is not None]
    return [measure.label for measure in chosen.all()]


def _columns(results: Results, chosen: Trio, *, seconds: bool) -> list[tuple[str, Scale]]:
    """Return heading and scale of each measure: fixed units, as in the documents, unless amounts differ."""
    if results.experiment.workload == "training":
        # What the speed leaves out: the first step, which compiles.
        first = [one for one in results.measures if one.name == "first_step"]
        scales = [scale_of(results, one) for one in (*chosen.all(), *first)]
        return [(scale.label, scale) for scale in scales]
    columns = []
    for word, measure in zip(_words(chosen), chosen.all(), strict=True):
        if measure.unit == "B":
            scale = gibibytes(results, measure)
        elif measure.unit == "s" and not amounts_differ(results):
            scale = Scale(measure, "s", 1.0) if seconds else Scale(measure, "ms", 1e3)
        else:
            scale = scale_of(results, measure)
        columns.append((f"{word} ({scale.unit})", scale))
    return columns


def _decimals(results: Results, columns: list[tuple[str, Scale]]) -> int | None:
    """Return two, as in the documents, or four where the state is so small that two would say nothing.

    None for training, of which the documents have no table: each figure has the decimals that it deserves.
    """
    if results.experiment.workload == "training":
        return None
    found = [scale.samples(results, arm.name) for _, scale in columns for arm in compared(results)]
    return 4 if any(samples and 0 < samples.mean < 0.1 for samples in found) else 2


def _mean_and_std(results: Results, arm: Arm, scale: Scale, digits: int | None) -> Entry:
    samples = scale.samples(results, arm.name)
    if samples is None:
        return entry(_why(results, arm), tone="faint")
    return entry(_both(samples, 0, digits), samples.mean)


def _both(samples: Samples, width: int, digits: int | None) -> str:
    if digits is None:
        return spread(samples.mean, samples.std)
    deviation = "" if samples.std is None else f" ± {samples.std:.{digits}f}"
    return f"{samples.mean:{width}.{digits}f}{deviation}"


def _why(results: Results, arm: Arm) -> str:
    """Return why there is no figure; an arm that ran may still lack one measure."""
    cells = results.cells_by_arm[arm.name]
    return NOTHING if any(cell.status == "ok" for cell in cells) else not_run(cells)[0]


def _note(results: Results, chosen: Trio) -> str:
    if results.experiment.workload == "training":
        return "The first step, with all that it loads and compiles, is no part of the speed."
    loads = chosen.load is not None and chosen.load_words != "load"
    note = f"Loads are {chosen.load_words}s; 1 GiB = 1.074 GB." if loads else "1 GiB = 1.074 GB."
    if amounts_differ(results):
        note = "Arms worked on states of different sizes, so figures are per raw byte."
    return note
