"""Our tables: the verdict of every arm in every measure, and why an arm has none."""

from __future__ import annotations

from statistics import median

from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.bench.results import printable as clean
from tensorkeep.report.panels import compared
from tensorkeep.report.samples import Scale, scale_of
from tensorkeep.report.sheet import Entry, Sheet, entry
from tensorkeep.report.wording import (
    NOTHING,
    difference,
    gain,
    interval,
    no_verdict,
    not_run,
    number,
    percent,
    probability,
    sentence,
    spread,
)
from tensorkeep.units import format_rate

_TONES = {"helps": "good", "hurts": "bad", "within noise": "faint", "not run": "faint", "too few runs": "faint"}


def verdict_table(results: Results, measure: Measure) -> Sheet:
    """Return the verdict of every arm in one measure, the baseline first."""
    scale = scale_of(results, measure)
    extra = _per_byte_headings(results).get(measure.unit, ())
    figures = (f">median ({scale.unit})", ">mean ± std", ">gain", ">95% interval", ">change")
    headings = ("=arm", "=verdict", *figures, *extra, ">p (Holm)", ">runs")
    rows = [_row(results, arm, scale) for arm in _arms(results)]
    note = f"{sentence(measure.about).rstrip('.')}. " if measure.about else ""
    note += "Gain: how many times better than the baseline, above 1 is better."
    return Sheet(measure.label, headings, rows, clean(note))


def not_run_table(results: Results) -> Sheet:
    """Return the cells that gave no figures, and why."""
    rows = []
    for arm in _arms(results):
        bad = [cell for cell in results.cells_by_arm[arm.name] if cell.status != "ok"]
        if bad or not results.cells_by_arm[arm.name]:
            status, reason = not_run(bad)
            cells = len(results.cells_by_arm[arm.name])
            rows.append((entry(clean(arm.name)), entry(status), entry(f"{len(bad)} of {cells}"), entry(clean(reason))))
    return Sheet("Not run", ("=arm", "=status", ">cells", "reason"), rows)


def seen_table(results: Results) -> Sheet:
    """Return what was seen of each arm at work, as its first cell says."""
    rows = []
    for arm in _arms(results):
        cells = [cell for cell in results.cells_by_arm[arm.name] if cell.observed]
        for name, said in cells[0].observed.items() if cells else ():
            rows.append((entry(clean(arm.name)), entry(clean(name)), entry(clean(said))))
    return Sheet("Seen at work", ("=arm", "=what", "seen in the first step"), rows)


def noise_lines(results: Results) -> list[str]:
    """Return one line per primary measure: how large a difference this machine makes of nothing."""
    lines = []
    for measure in results.primary():
        label = measure.label
        noise = results.summary.noise.get(measure.name)
        if noise is None or noise.floor is None:
            few = any(arm.role == "control" for arm in results.arms)
            lines.append(f"{label}: no noise floor, because no A/A control ran{' in two blocks' if few else ''}")
            continue
        if noise.floor < 1.0005:
            lines.append(f"{label}: the same in every run, so that every difference counts")
            continue
        if said := no_verdict(results, measure):
            lines.append(f"{label}: {said}")
            continue
        band = f"; the baseline against itself: {interval(noise.low, noise.high)} (95%)" if noise.low else ""
        lines.append(f"{label}: differences below {difference(noise.floor)} are noise{band}")
    return lines


def _arms(results: Results) -> list[Arm]:
    """Return all arms: the baseline, the others, the A/A control."""
    return [*compared(results), *(arm for arm in results.arms if arm.role == "control")]


def _row(results: Results, arm: Arm, scale: Scale) -> tuple[Entry, ...]:
    found = results.statistics(arm.name, scale.measure.name)
    samples = scale.samples(results, arm.name)
    words: str = found.verdict or "no verdict"
    if samples is None:
        status = not_run(results.cells_by_arm[arm.name])[0]
        words = status if status != NOTHING or not results.cells_by_arm[arm.name] else "not measured"
    tone = "faint" if samples is None else _TONES.get(words, "")
    cells = [entry(clean(arm.name)), entry(clean(words), tone=tone)]
    if samples is None:
        cells += [entry(NOTHING)] * 2
    else:
        both = spread(samples.mean, samples.std)
        cells += [entry(number(samples.median), samples.median), entry(both, samples.mean)]
    if found is None or found.gain is None:
        cells += [entry(NOTHING)] * 3
    else:
        cells += [
            entry(gain(found.gain), found.gain, _TONES.get(found.verdict or "", "")),
            entry(interval(found.gain_low, found.gain_high), found.gain_low),
            entry(percent(found.change_percent), found.change_percent),
        ]
    if scale.measure.unit in _per_byte_headings(results):
        cells.append(_per_byte(results, arm, scale.measure))
    holm = found.p_holm if found else None
    count = len(samples.values) if samples else 0
    return (*cells, entry(probability(holm), holm), entry(str(count), count))


def _per_byte_headings(results: Results) -> dict[str, tuple[str]]:
    """Return the units whose figures say more by the byte of the state that was saved: where one was saved."""
    return {} if results.experiment.workload == "training" else {"s": (">throughput",), "B": (">of raw",)}


def _per_byte(results: Results, arm: Arm, measure: Measure) -> Entry:
    """Return raw bytes per second, or stored bytes as a part of the raw ones."""
    cells = [cell for cell in results.cells_by_arm[arm.name] if cell.status == "ok" and cell.amount]
    values = [value / (cell.amount or 1) for cell in cells if (value := cell.figures.get(measure.name)) is not None]
    middle = median(values) if values else 0.0
    if middle <= 0:
        return entry(NOTHING)
    if measure.unit == "s":
        return entry(format_rate(1, middle), 1 / middle)
    return entry(f"{middle:.3f}", middle)
