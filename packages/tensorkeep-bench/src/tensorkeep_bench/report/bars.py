"""Bars, which the page draws and the terminal prints: saving, loading and size by arm."""

from tensorkeep.ext import number
from tensorkeep.ext.pages import Bars, ChartBar
from tensorkeep_bench.report.measures import compared_arms, compared_measures, scale_of
from tensorkeep_bench.results import Measure, Results
from tensorkeep_bench.wording import capitalised

_MOST_BARS = 14
_TONES = {"helps": "good", "hurts": "bad"}

# Tones of bars, and their meaning.
BAR_LEGEND = (("base", "baseline"), ("good", "better"), ("bad", "worse"), ("", "no difference shown"))


def amount_bars(results: Results) -> list[Bars]:
    return [_bars(results, measure) for measure in compared_measures(results).named().values()]


def bars_note(results: Results) -> str:
    count = sum(results.ran(arm.name) for arm in compared_arms(results))
    left_out = f" The baseline and the best {_MOST_BARS - 1} of {count} arms." if count > _MOST_BARS else ""
    return f"Medians, the best first: shorter is better. Line: range of the runs.{left_out}"


def _bars(results: Results, measure: Measure) -> Bars:
    scale, bars = scale_of(results, measure), []
    for arm in compared_arms(results):
        found = scale.describe(results, arm.name)
        if found is not None:
            verdict = results.statistics(arm.name, measure.name).verdict
            tone = "base" if arm.name == results.baseline else _TONES.get(verdict or "", "")
            text = number(found.median) if scale.per_byte else f"{number(found.median)} {scale.unit}"
            bars.append(ChartBar(arm.name, found.median, text, tone=tone, low=found.low, high=found.high))
    bars.sort(key=lambda bar: bar.value)
    # The baseline is always kept; the sort is stable, so the best of the others follow.
    kept = sorted(bars, key=lambda bar: bar.tone != "base")[:_MOST_BARS]
    return Bars(capitalised(scale.label), [bar for bar in bars if bar in kept])
