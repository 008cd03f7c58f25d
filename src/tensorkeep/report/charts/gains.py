"""The heat map of a report: how many times better than the baseline each arm is, in each primary measure."""

from tensorkeep.bench.analysis.wording import NOTHING, gain, interval_95
from tensorkeep.bench.results import Arm, Measure, Results
from tensorkeep.report.charts.scales import gain_colour
from tensorkeep.report.measures import compared_arms
from tensorkeep.report.subject import subject_name
from tensorkeep.report.tables import Entry, ReportTable
from tensorkeep.units import counted


def gain_map(results: Results) -> ReportTable:
    """Return the gain of each arm that ran, as a table whose entries have the tone of their colour."""
    arms = [arm for arm in compared_arms(results) if arm.name != results.baseline]
    measures = results.primary()
    ran = [arm for arm in arms if any(results.statistics(arm.name, one.name).gain for one in measures)]
    rows = [(Entry(arm.name), *(_entry(results, arm, one) for one in measures)) for arm in ran]
    missing = len(arms) - len(ran)
    note = f" {counted(missing, 'arm')} without figures {'is' if missing == 1 else 'are'} not shown." if missing else ""
    return ReportTable(
        f"How many times better than {results.baseline or 'the baseline'}: {subject_name(results)}",
        ("=arm", *(f">{one.label}" for one in measures)),
        rows,
        f"Above 1x is better. Grey: a difference from the baseline is not shown.{note}",
    )


def _entry(results: Results, arm: Arm, measure: Measure) -> Entry:
    found = results.statistics(arm.name, measure.name)
    if not found.gain or found.gain < 0:
        return Entry(NOTHING, tone="faint")
    shown = found.gain if found.verdict in ("helps", "hurts") else None
    about = interval_95(found.gain_low, found.gain_high)
    # A loss that is 0.4% lower is a result.
    text = f"{found.gain:.3f}x" if measure.unit == "nats" else gain(found.gain)
    return Entry(text, found.gain, f"field {gain_colour(shown)}", about=about)
