"""The plots of a report: bars, gains with intervals, trade-offs, and the figures of designs.

The bars at the top of its page are in `html.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeVar

from tensorkeep.ext import number
from tensorkeep.ext.pages import Box, Canvas, Line, Point, Text, text_width
from tensorkeep_bench.report.drawing import (
    GAIN_LEGEND,
    Axis,
    Rectangle,
    amount_axis,
    gain_colour,
    is_even,
    place_labels,
)
from tensorkeep_bench.report.measures import compared_arms, compared_measures, scale_of, subject_and_machine
from tensorkeep_bench.report.tables import why_not_run
from tensorkeep_bench.results import Arm, Effect, Interaction, Measure, PlotName, Results, StackStep
from tensorkeep_bench.statistics import describe
from tensorkeep_bench.wording import FAR, NEAR, clipped, gain, percent

FILES_ONLY = ("three-way", "comparison", "impact")  # plots that only repeat figures of the page
WIDTH = 1060.0
MOST_ARMS = 40
NAME_LENGTH = 34
_LONG_NAME = 64  # of changes together
_FEW = 3  # the published three-way comparison has three panels; for more arms, a fourth shows the improvement
_MOST_PANELS = 4
_MOST_FACTORS = 15
_MARGIN, _GAP, _ROW, _TITLE, _AXIS, _LEGEND = 10.0, 26.0, 25.0, 24.0, 46.0, 30.0
_SMALL = 11.0

_T = TypeVar("_T", StackStep, Effect, Interaction)
Draw = Callable[[Results], Canvas]


class Plot(NamedTuple):
    name: str
    title: str
    canvas: Canvas


def draw_plots(results: Results, *, for_files: bool = True) -> list[Plot]:
    """Return every figure that the results call for; without ``for_files``, only the figures of the page."""
    subject = subject_and_machine(results)
    chosen = [each for each in wanted(results) if for_files or each[0] not in FILES_ONLY]
    return [Plot(name, f"{title}: {subject}", draw(results)) for name, title, draw in chosen]


def wanted(results: Results) -> Iterator[tuple[PlotName, str, Draw]]:
    chosen = compared_measures(results)
    few = len(compared_arms(results)) <= _FEW
    if chosen.named() and few:
        yield "three-way", chosen.title, three_panels
    if chosen.named() and not few:
        yield "comparison", f"{chosen.title}, and the gain", four_panels
        if results.baseline is not None:
            yield "impact", "What each arm changes", six_panels
    if arms_with_gains(results):
        baseline = results.baseline or "the baseline"
        yield "gains", f"Gain over {baseline}, with 95% intervals and the noise band", gains
    if chosen.save and (chosen.size or chosen.load) and len(drawn_arms(results)) > 1:
        yield "pareto", "Trade-offs, and the arms that no other arm beats", trade_offs
    if results.summary.steps:
        yield "steps", "The way from the base, one change at a time", waterfall
    if results.summary.effects:
        yield "effects", "The effects of the factors, and their interactions", effects
    if results.summary.interactions:
        yield "interactions", "Changes together, against the product of the single ones", interactions


# Panels


class Panel:
    def __init__(
        self, canvas: Canvas, title: str, left: float, top: float, right: float, rows: int, row: float
    ) -> None:
        self.canvas, self.left, self.right = canvas, left, right
        self.top, self.bottom, self.row = top + _TITLE, top + _TITLE + rows * row, row
        self.axis = Axis(0, 1, left, right)
        self.cut = False  # whether an arrow shows that a value lies beyond the axis
        canvas.add(Text(left, top + 14, title, bold=True))

    def y(self, row: float) -> float:
        return self.top + (row + 0.5) * self.row

    def set_axis(self, axis: Axis, *, suffix: str = "", label: str = "") -> None:
        self.axis = axis
        for tick, text in self.axis.ticks(suffix):
            x = self.axis.at(tick)
            self.canvas.add(Line([(x, self.top), (x, self.bottom)], "grid", 0.8))
            self.canvas.add(Text(x, self.bottom + 15, text, _SMALL, "faint", "middle"))
        self.canvas.add(Text((axis.start + axis.end) / 2, self.bottom + 32, label, _SMALL, "faint", "middle"))

    def rule(self, value: float) -> None:
        x = self.axis.at(value)
        self.canvas.add(Line([(x, self.top), (x, self.bottom)], "base", 1.2))

    def bar(self, low: float, high: float, y: float, height: float, colour: str) -> None:
        left, right = sorted((self.axis.at(low), self.axis.at(high)))
        self.canvas.add(Box(left, y - height / 2, right - left, height, colour))

    def point(self, kind: str, value: float, y: float, colour: str, fill: str = "", size: float = 4.0) -> None:
        """Draw a marker at a value. An arrow at the end of the axis replaces the marker of a value beyond it."""
        side = self.axis.cuts(value)
        self.cut |= bool(side)
        self.canvas.mark(side or kind, self.axis.at(value), y, colour, fill, size)

    def whisker(self, low: float, high: float, y: float, colour: str, width: float, fill: str = "") -> None:
        """Draw an interval. A cap shows an end; an arrow shows that the interval continues beyond the axis."""
        if self.axis.cuts(low) == "right" or self.axis.cuts(high) == "left":
            return  # its value has an arrow
        self.canvas.add(Line([(self.axis.at(low), y), (self.axis.at(high), y)], colour, width))
        for end in (low, high):
            x = self.axis.at(end)
            if self.axis.cuts(end):
                self.point("", end, y, colour, fill)
            else:
                self.canvas.add(Line([(x, y - 3), (x, y + 3)], colour, width))

    def write(self, text: str, value: float, y: float, *, faint: bool = False) -> None:
        """Write behind a value, on paper: the lines of the grid would cross the words."""
        x = self.axis.at(value) + 9
        ground = Box(x - 2, y - 6, text_width(text, _SMALL) + 3, 12, "paper")
        colour = "faint" if faint else "ink"
        self.canvas.add(ground, Text(x, y + 4, text, _SMALL, colour, italic=faint))

    def missing(self, text: str, row: float, value: float | None = None) -> None:
        self.write(text, self.axis.low if value is None else value, self.y(row), faint=True)

    def names(self, names: Sequence[str], bold: int | None = None, length: int = NAME_LENGTH) -> None:
        for row, name in enumerate(names):
            text = clipped(name, length)
            self.canvas.add(Text(self.left - 10, self.y(row) + 4, text, anchor="end", bold=row == bold))

    def field(self, column: int, columns: int, row: int, value: float | None, text: str) -> None:
        colour, width = gain_colour(value), (self.right - self.left) / columns
        x, y = self.left + column * width, self.top + row * self.row
        # The strongest colours are dark.
        ink = "paper" if colour[-1] == "4" else "ink"
        self.canvas.add(Box(x + 1, y + 1, width - 2, self.row - 2, colour))
        self.canvas.add(Text(x + width / 2, self.y(row) + 4, text, _SMALL, ink, "middle"))


def _name_width(names: Sequence[str], length: int = NAME_LENGTH) -> float:
    return _MARGIN + 10 + max((text_width(clipped(name, length)) for name in names), default=0.0)


def _label_width(labels: Iterable[str]) -> float:
    # On the right of an axis, for the label of the largest value.
    return 12 + max((text_width(label, _SMALL) for label in labels), default=0.0)


def _columns(left: float, count: int, right_space: float = 0.0) -> list[tuple[float, float]]:
    # Equally wide; ``right_space`` stays free in each.
    width = (WIDTH - _MARGIN - left + _GAP) / count
    return [(left + place * width, left + (place + 1) * width - _GAP - right_space) for place in range(count)]


def _legend(canvas: Canvas, entries: Sequence[tuple[str, str, str, str]], x: float = _MARGIN, y: float = 14) -> None:
    for kind, colour, fill, words in entries:
        if kind == "bar":
            canvas.add(Box(x, y - 6, 12, 12, colour))
        else:
            # An entry is a marker or ``bar``, its colour, its filling and its words.
            canvas.mark(kind, x + 6, y, colour, fill, 4.5)
        canvas.add(Text(x + 18, y + 4, words))
        x += 18 + text_width(words) + 16


def _scale_legend(canvas: Canvas) -> None:
    # The colours of a heat map, above the footnote.
    _legend(canvas, [("bar", colour, "", word) for colour, word in GAIN_LEGEND], y=canvas.height - 34)


def _footnote(canvas: Canvas, *sentences: str) -> None:
    for place, sentence in enumerate(sentences):
        y = canvas.height - 8 - 16 * (len(sentences) - 1 - place)
        canvas.add(Text(_MARGIN, y, sentence, _SMALL, "faint"))


def shown_arms(results: Results) -> list[Arm]:
    """Return the arms that a figure shows, the baseline first; of too many, those with the largest gains."""
    arms = compared_arms(results)
    if len(arms) <= MOST_ARMS:
        return arms

    def best(arm: Arm) -> float:
        found = results.summary.arms.get(arm.name, {}).values()
        return max((one.gain or 0.0 for one in found), default=0.0)

    # In the order of the design, although they are chosen by their gain.
    kept = {arm.name for arm in sorted(arms[1:], key=best, reverse=True)[: MOST_ARMS - 1]}
    return [arm for arm in arms if arm.name in kept or arm is arms[0]]


def _left_out(results: Results) -> str:
    count = len(compared_arms(results))
    return "" if count <= MOST_ARMS else f" {MOST_ARMS} of {count} arms are shown; the tables have all."


def _why_missing(results: Results, arm: str) -> str:
    # It has figures, but no baseline to compare with.
    if results.ran(arm):
        return "not compared"
    status = why_not_run(results.cells_by_arm[arm])[0]
    return "not run" if status in ("not run", "-") else f"not run ({status})"


# Saving, loading and size, the improvement, and a heat map of the impact

_COLOURS = {"helps": "good", "hurts": "bad"}
_NO_VERDICT = "not decided, or about the same"
_ARROW = " Arrow: continues beyond the axis."
DrawPanel = Callable[[Panel, Results, list[Arm]], None]


def three_panels(results: Results) -> Canvas:
    return _arm_figure(results, [[_amounts(measure) for measure in compared_measures(results).named().values()]])


def four_panels(results: Results) -> Canvas:
    first, *others = map(_amounts, compared_measures(results).named().values())
    return _arm_figure(results, [[first, *others[:1]], [*others[1:], _improvements(results)]], 30)


def six_panels(results: Results) -> Canvas:
    chosen = compared_measures(results)
    below = [(f"{one.label}: improvement", [one]) for one in (chosen.save, chosen.load) if one]
    drawn = [(title, partial(_draw_improvements, measures=measures)) for title, measures in below]
    above = [_amounts(measure) for measure in (chosen.save, chosen.load, chosen.size) if measure]
    return _arm_figure(results, [above, [*drawn, ("impact, % of the baseline", _draw_impact)]])


def _arm_figure(results: Results, rows: Sequence[Sequence[tuple[str, DrawPanel]]], row_height: float = _ROW) -> Canvas:
    arms = shown_arms(results)
    names, height = [arm.name for arm in arms], len(arms) * row_height + _TITLE + _AXIS
    with_heat_map = any(draw is _draw_impact for panels in rows for _, draw in panels)
    canvas = Canvas(WIDTH, _LEGEND + len(rows) * height + 24 + 24 * with_heat_map)
    # All rows leave the same space for the names, so that panels stand below each other.
    left, cut = _name_width(names), False
    for line, panels in enumerate(rows):
        for place, ((title, draw), (start, end)) in enumerate(zip(panels, _columns(left, len(panels)), strict=True)):
            panel = Panel(canvas, title, start, _LEGEND + line * height, end, len(arms), row_height)
            if place == 0:
                panel.names(names, bold=None if results.baseline is None else 0)
            draw(panel, results, arms)
            cut |= panel.cut
    words = {"base": "baseline", "good": "better", "bad": "worse", "neutral": _NO_VERDICT}
    _legend(canvas, [("bar", colour, "", word) for colour, word in words.items()])
    if with_heat_map:
        _scale_legend(canvas)
    note = "Dot: mean; whisker: \u00b1 1 standard deviation; circle: one run."
    _footnote(canvas, note + _ARROW * cut + _left_out(results))
    return canvas


def _amounts(measure: Measure) -> tuple[str, DrawPanel]:
    return measure.label, partial(_draw_amounts, measure=measure)


def _improvements(results: Results) -> tuple[str, DrawPanel]:
    chosen = compared_measures(results)
    return "improvement", partial(_draw_improvements, measures=[one for one in (chosen.save, chosen.load) if one])


def _draw_amounts(panel: Panel, results: Results, arms: list[Arm], measure: Measure) -> None:
    """Draw dots, not bars: the length of a bar means something only on a linear axis from 0."""
    scale = scale_of(results, measure)
    found = {arm.name: values for arm in arms if (values := scale.values(results, arm.name))}
    label_width = _label_width(number(describe(runs).mean) for runs in found.values())
    every = [end for runs in found.values() for end in (*runs, *_deviation(runs))]
    axis = amount_axis(_kept(measure, every), panel.left, panel.right - label_width)
    words = {"s": "seconds", "ms": "milliseconds"}.get(scale.unit, scale.unit)
    panel.set_axis(axis, label=words + ", log scale" * axis.log)
    for row, arm in enumerate(arms):
        if arm.name in found:
            _draw_amount(panel, panel.y(row), found[arm.name], _colour(results, arm, measure))
        else:
            panel.missing("not measured" if results.ran(arm.name) else _why_missing(results, arm.name), row)


def _kept(measure: Measure, values: list[float]) -> list[float]:
    """Return the values that the axis of a measure shows: a range test ends with a loss far above all others."""
    lowest = min(values, default=0.0)
    return [value for value in values if value <= lowest * _HIGHEST_LOSS] if measure.unit == "nats" else values


def _deviation(runs: list[float]) -> tuple[float, float]:
    found = describe(runs)
    low, high = (found.mean + sign * (found.std or 0.0) for sign in (-1, 1))
    # A deviation may reach 0 or less, where no amount is; the axis ends near the runs.
    return max(low, found.low / 2), high


def _draw_amount(panel: Panel, y: float, runs: list[float], colour: str) -> None:
    found = describe(runs)
    std = found.std or 0.0
    if found.high > found.low:
        # The runs lie below the mean, so that they do not hide it.
        for run in runs:
            panel.point("circle", run, y + 7, "ink", "paper", 1.9)
        y -= 3
        panel.whisker(found.mean - std, found.mean + std, y, "ink", 1.2)
    panel.point("circle", found.mean, y, colour, size=5)
    panel.write(number(found.mean), max(found.mean + std, found.high), y)


def _draw_improvements(panel: Panel, results: Results, arms: list[Arm], measures: Sequence[Measure]) -> None:
    """Draw the gain of each arm as a bar from 1x, and write its percentage behind the bar.

    Percentages of a baseline end at +100% and go down without an end. On the axis of gains, twice as good and half as
    good have the same length.
    """
    found = [[results.statistics(arm.name, measure.name) for measure in measures] for arm in arms]
    gains = [one.gain for row in found for one in row if one.gain and one.gain > 0]
    label_width = _label_width(percent(one.change_percent) for row in found for one in row)
    panel.set_axis(_gain_axis(gains, panel.left, panel.right - label_width), suffix="x", label="gain, log scale")
    panel.rule(1)
    several = len(measures) > 1
    height = panel.row * (0.84 / len(measures) if several else 0.64)
    for row, (arm, ones) in enumerate(zip(arms, found, strict=True)):
        if not any(one.gain for one in ones):
            panel.missing("baseline" if arm.name == results.baseline else _why_missing(results, arm.name), row, 1)
        for i, (measure, one) in enumerate(zip(measures, ones, strict=True)):
            if one.gain and one.gain > 0:
                y = panel.y(row) + (i - (len(measures) - 1) / 2) * height
                colour = ("first", "second")[i] if several else _colour(results, arm, measure)
                panel.bar(1, one.gain, y, height * 0.92, colour)
                if panel.axis.cuts(one.gain):
                    panel.point("", one.gain, y, colour)
                panel.write(percent(one.change_percent), max(one.gain, 1), y)
    if several:
        entries = [("bar", ("first", "second")[i], "", measure.label) for i, measure in enumerate(measures)]
        _legend(panel.canvas, entries, panel.left + 110, panel.top - _TITLE + 10)


def _draw_impact(panel: Panel, results: Results, arms: list[Arm]) -> None:
    measures = results.primary()
    width = (panel.right - panel.left) / max(1, len(measures))
    for row, arm in enumerate(arms):
        for column, measure in enumerate(measures):
            found = results.statistics(arm.name, measure.name)
            if found.gain is None or found.change_percent is None:
                text = "baseline" if arm.name == results.baseline else "-" if results.ran(arm.name) else "not run"
                x = panel.left + (column + 0.5) * width
                panel.canvas.add(Text(x, panel.y(row) + 4, text, 10, "faint", "middle", italic=True))
                continue
            # Without a verdict the field stays grey, whatever its number.
            settled = found.gain if found.verdict in ("helps", "hurts") else None
            panel.field(column, len(measures), row, settled, percent(found.change_percent))
    for column, measure in enumerate(measures):
        # One word below the other: fields are narrow.
        for line, word in enumerate(measure.label.split()[:3]):
            x = panel.left + (column + 0.5) * width
            panel.canvas.add(Text(x, panel.bottom + 14 + 13 * line, clipped(word, 11), _SMALL, "ink", "middle"))


def _colour(results: Results, arm: Arm, measure: Measure) -> str:
    if arm.name == results.baseline:
        return "base"
    return _COLOURS.get(results.statistics(arm.name, measure.name).verdict or "", "neutral")


# Gains with their intervals (a forest plot)

_MARKS = {"helps": ("circle", "good", "good"), "hurts": ("square", "bad", "bad")}
# Shape, colour and filling of a marker; shape and filling carry the same meaning as the colour.
_UNSETTLED = ("diamond", "neutral", "paper")
_GAIN_SPACE = 48.0


class _IntervalRow(NamedTuple):
    name: str
    value: float | None  # a gain, or None if it is not known
    low: float | None
    high: float | None
    mark: tuple[str, str, str]
    missing: str = "unknown"  # what the row shows without a value


def arms_with_gains(results: Results) -> list[Arm]:
    arms = [arm for arm in shown_arms(results) if arm.name != results.baseline]
    measures = results.primary()
    return arms if any(results.statistics(arm.name, one.name).gain for arm in arms for one in measures) else []


def gains(results: Results) -> Canvas:
    arms, measures = arms_with_gains(results), results.primary()[:_MOST_PANELS]
    names = [arm.name for arm in arms]
    canvas = Canvas(WIDTH, _LEGEND + _TITLE + len(arms) * _ROW + _AXIS + 12)
    cut = False
    for place, (measure, (left, right)) in enumerate(
        zip(measures, _columns(_name_width(names), len(measures), _GAIN_SPACE), strict=True)
    ):
        panel = Panel(canvas, measure.label, left, _LEGEND, right, len(arms), _ROW)
        if place == 0:
            panel.names(names)
        noise = results.summary.noise.get(measure.name)
        rows = [_arm_row(results, arm.name, measure) for arm in arms]
        _draw_intervals(panel, rows, noise.floor if noise and noise.floor > 1 else 1.0)
        cut |= panel.cut
    words = {"better": _MARKS["helps"], "worse": _MARKS["hurts"], _NO_VERDICT: _UNSETTLED}
    entries = [(*mark, word) for word, mark in words.items()]
    _legend(canvas, [*entries, ("bar", "band", "", "noise: the baseline against itself")])
    baseline = clipped(results.baseline or "", NAME_LENGTH)
    text = f"Gain over {baseline}: right of 1x is better. Log scale; line: 95% interval."
    _footnote(canvas, text + _ARROW * cut + _left_out(results))
    return canvas


def _arm_row(results: Results, arm: str, measure: Measure) -> _IntervalRow:
    one = results.statistics(arm, measure.name)
    mark = _MARKS.get(one.verdict or "", _UNSETTLED)
    return _IntervalRow(arm, one.gain, one.gain_low, one.gain_high, mark, _why_missing(results, arm))


def _design_row(name: str, value: float | None, low: float | None, high: float | None) -> _IntervalRow:
    settled = value is not None and not is_even(value) and _settled(low, high)
    mark = _MARKS["helps" if value and value > 1 else "hurts"] if settled else _UNSETTLED
    return _IntervalRow(name, value, low, high, mark)


def _settled(low: float | None, high: float | None) -> bool | None:
    return None if low is None or high is None else not low <= 1 <= high


def _ends(rows: Sequence[_IntervalRow]) -> list[float]:
    return [end for row in rows for end in (row.value, row.low, row.high) if end and end > 0]


def _within(value: float) -> float:
    return min(max(value, NEAR), FAR)


def _gain_axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = _within(min([*values, 0.9])), _within(max([*values, 1.12]))
    margin = (high / low) ** 0.05
    return Axis(low / margin, high * margin, start, end, log=True)


def _draw_intervals(panel: Panel, rows: Sequence[_IntervalRow], floor: float = 1.0) -> None:
    """Draw gains on a log axis, above the band of noise, which lies between 1 / ``floor`` and ``floor``."""
    axis = _gain_axis([*_ends(rows), 1 / floor, floor], panel.left, panel.right)
    if floor > 1:
        # Before the axis, because the band must lie under its grid.
        left, right = axis.at(1 / floor), axis.at(floor)
        panel.canvas.add(Box(left, panel.top, right - left, panel.bottom - panel.top, "band"))
    panel.set_axis(axis, suffix="x")
    panel.rule(1)
    for place, row in enumerate(rows):
        y, (shape, colour, fill) = panel.y(place), row.mark
        # A gain of 0 has no place on a log axis.
        if row.value is None or row.value <= 0:
            panel.missing(row.missing, place)
            continue
        if row.low is not None and row.high is not None and 0 < row.low <= row.high:
            panel.whisker(row.low, row.high, y, colour, 2, fill)
        panel.point(shape, row.value, y, colour, fill)
        panel.canvas.add(Text(panel.right + 6, y + 4, gain(row.value), _SMALL))


# Designs


def waterfall(results: Results) -> Canvas:
    steps = results.summary.steps
    panels = _by_measure(results, steps)
    changes = list(dict.fromkeys(step.change for step in steps))[:MOST_ARMS]
    # Three panels stand in one row: a second row with one panel would be half empty.
    columns = len(panels) if len(panels) <= 3 else 2
    row = 29.0
    height = _TITLE + len(changes) * row + _AXIS
    canvas = Canvas(WIDTH, -(-len(panels) // columns) * height + 20)
    places = _columns(_name_width(changes), columns)
    for place, (measure, rows) in enumerate(panels):
        left, right = places[place % columns]
        panel = Panel(canvas, measure.label, left, place // columns * height, right, len(changes), row)
        if place % columns == 0:
            panel.names(changes)
        _draw_waterfall(panel, changes, {step.change: step for step in rows})
    _footnote(canvas, "Total gain over the base after each change, log scale; in brackets: the change's own gain.")
    return canvas


def _draw_waterfall(panel: Panel, changes: list[str], steps: Mapping[str, StackStep]) -> None:
    known = [step for step in steps.values() if step.gain_from_base and step.gain_from_base > 0]
    labels = {one.change: f"{gain(one.gain_from_base)} ({gain(one.gain_from_previous)})" for one in known}
    totals = [step.gain_from_base or 1.0 for step in known]
    panel.set_axis(_gain_axis(totals, panel.left, panel.right - _label_width(labels.values())), suffix="x")
    panel.rule(1)
    before = 1.0
    for row, change in enumerate(changes):
        if change not in labels:
            panel.missing("not run", row)
            continue
        step, y = steps[change], panel.y(row)
        after = step.gain_from_base or before
        settled = _settled(step.gain_from_previous_low, step.gain_from_previous_high)
        # Without an interval (None), the sign alone gives the colour.
        even = settled is False or is_even(step.gain_from_previous or after / before)
        colour = "neutral" if even else "good" if after > before else "bad"
        x, half = panel.axis.at(after), panel.row * 0.3
        if row + 1 < len(changes):
            panel.canvas.add(Line([(x, y), (x, y + panel.row)], "faint", 0.8))
        panel.bar(before, after, y, 2 * half, colour)
        # The end of the bar is also a line, so that a change without effect remains visible.
        panel.canvas.add(Line([(x, y - half), (x, y + half)], colour, 2))
        if panel.axis.cuts(after):
            panel.point("", after, y, colour)
        panel.write(labels[change], max(after, before), y)
        before = after


def effects(results: Results) -> Canvas:
    found = results.summary.effects
    factors = list(dict.fromkeys(name for effect in found for name in effect.factors))[:_MOST_FACTORS]
    middle = WIDTH * 0.56

    def draw(canvas: Canvas, top: float, measure: Measure, effects: list[Effect]) -> None:
        rows = [_design_row(" x ".join(one.factors), one.gain, one.low, one.high) for one in effects]
        names = [row.name for row in rows]
        end = middle - _GAIN_SPACE
        left = Panel(canvas, f"{measure.label}: effects", _name_width(names), top, end, len(rows), _ROW)
        left.names(names)
        _draw_intervals(left, rows)
        title, start = f"{measure.label}: factor with factor", middle + _name_width(factors)
        _draw_factor_map(Panel(canvas, title, start, top, WIDTH - _MARGIN, len(factors), 30), effects, factors)

    text = (
        "Gain from a factor's first level to its last; pairs: measured over the product of the two. Line: 95% interval."
    )
    canvas = _stacked(results, found, lambda rows: max(len(rows) * _ROW, len(factors) * 30.0), draw, "", text)
    _scale_legend(canvas)
    return canvas


def _draw_factor_map(panel: Panel, rows: list[Effect], factors: list[str]) -> None:
    for effect in rows:
        if effect.gain is None or not set(effect.factors) <= set(factors):
            continue
        one, other = [factors.index(name) for name in (*effect.factors, *effect.factors)[:2]]
        # A set, because a main effect has one field, on the diagonal.
        for column, line in {(one, other), (other, one)}:
            shown = effect.gain if _settled(effect.low, effect.high) else None
            panel.field(column, len(factors), line, shown, gain(effect.gain))
    width = (panel.right - panel.left) / max(1, len(factors))
    # Columns that are too narrow for the names have the numbers of the rows.
    numbered = any(text_width(name, _SMALL) > width - 6 for name in factors)
    panel.names([f"{place}. {name}" if numbered else name for place, name in enumerate(factors, 1)])
    for place, name in enumerate(factors):
        label = str(place + 1) if numbered else name
        panel.canvas.add(Text(panel.left + (place + 0.5) * width, panel.bottom + 15, label, _SMALL, "ink", "middle"))


def interactions(results: Results) -> Canvas:
    def draw(canvas: Canvas, top: float, measure: Measure, found: list[Interaction]) -> None:
        rows = [_design_row(" + ".join(one.changes), one.ratio, one.low, one.high) for one in found]
        names = [row.name for row in rows]
        left = _name_width(names, _LONG_NAME)
        panel = Panel(canvas, measure.label, left, top, WIDTH - _MARGIN - _GAIN_SPACE, len(rows), 28)
        panel.names(names, length=_LONG_NAME)
        _draw_intervals(panel, rows)

    text = "Right of 1x: the changes strengthen each other. Left: they weaken each other. Line: 95% interval."
    return _stacked(results, results.summary.interactions, lambda rows: max(len(rows), 2) * 28, draw, text)


def _stacked(
    results: Results,
    found: Sequence[_T],
    height_of: Callable[[list[_T]], float],
    draw: Callable[[Canvas, float, Measure, list[_T]], None],
    *notes: str,
) -> Canvas:
    panels = _by_measure(results, found)
    heights = [height_of(rows) + _TITLE + _AXIS for _, rows in panels]
    canvas = Canvas(WIDTH, sum(heights) + 4 + 17 * len(notes))
    for place, (measure, rows) in enumerate(panels):
        draw(canvas, sum(heights[:place]), measure, rows)
    _footnote(canvas, *notes)
    return canvas


def _by_measure(results: Results, found: Sequence[_T]) -> list[tuple[Measure, list[_T]]]:
    rows = [(one, [each for each in found if each.measure == one.name][:MOST_ARMS]) for one in results.measures]
    # Only the first measures: more panels would be too small.
    return [(measure, each) for measure, each in rows if each][:_MOST_PANELS]


# Trade-offs: a number at each point, and a list that gives the names

_NEGLIGIBLE = 0.01
# Higher losses than so many times the lowest are drawn there: a range test ends far above all others.
_HIGHEST_LOSS = 1.1
_RADIUS = 4.5


class TradeOff(NamedTuple):
    name: str
    x: float
    y: float
    best: bool = False
    beyond: bool = False


def trade_offs(results: Results) -> Canvas:
    chosen, arms = compared_measures(results), drawn_arms(results)
    save, others = chosen.save, [measure for measure in (chosen.size, chosen.load) if measure is not None]
    assert save is not None  # `wanted` asks for this figure only then
    # The list of names may be longer than the panels.
    height = max(420.0, len(arms) * 17 + 40)
    canvas = Canvas(WIDTH, height + 62)
    names = {arm.name: clipped(arm.name, NAME_LENGTH) for arm in arms}
    key = 60 + max((text_width(name, _SMALL) for name in names.values()), default=0.0)
    numbers = {name: str(place) for place, name in enumerate(names, 1)}
    width = (WIDTH - key) / max(1, len(others))
    beyond = False
    for place, measure in enumerate(others):
        points = trade_off_points(results, save, measure)
        beyond |= any(point.beyond for point in points)
        axes = trade_off_axes(points, (place * width + 70, place * width + width - 20), (height, 46))
        _draw_trade_off(canvas, results, points, numbers, axes, (save, measure))
    canvas.add(Text(WIDTH - key + 20, 14, "arms", bold=True))
    for place, (name, shown) in enumerate(names.items()):
        y = 36 + 17 * place
        canvas.add(Text(WIDTH - key + 36, y, numbers[name], _SMALL, "faint", "end"))
        canvas.add(Text(WIDTH - key + 44, y, shown, _SMALL))
    better = ""
    if {one.better for one in others} == {"lower"}:
        better = f" Better: down and {'left' if save.better == 'lower' else 'right'}."
    note = "Medians; the square is the baseline. Blue: no other arm is better, by 1% or more."
    above = f" Triangle: a loss above {_HIGHEST_LOSS:g} times the lowest." if beyond else ""
    _footnote(canvas, note + better + above + _left_out(results))
    return canvas


def drawn_arms(results: Results) -> list[Arm]:
    return [arm for arm in shown_arms(results) if results.ran(arm.name)]


def trade_off_points(results: Results, across: Measure, up: Measure) -> list[TradeOff]:
    """Return the medians of all arms that have both figures, the best first."""
    found = []
    for arm in drawn_arms(results):
        # An arm without one of the figures has no point.
        x, y = (scale_of(results, measure).describe(results, arm.name) for measure in (across, up))
        if x and y:
            found.append(TradeOff(arm.name, x.median, y.median))

    def beats(one: TradeOff, other: TradeOff) -> bool:
        pairs = ((one.x, other.x, across.better), (one.y, other.y, up.better))
        return any(_better(a, b, way) for a, b, way in pairs) and not any(_better(b, a, way) for a, b, way in pairs)

    highest = min((one.y for one in found), default=0.0) * _HIGHEST_LOSS if up.unit == "nats" else math.inf
    points = [
        TradeOff(one.name, one.x, min(one.y, highest), not any(beats(other, one) for other in found), one.y > highest)
        for one in found
    ]
    return sorted(points, key=lambda point: not point.best)


def _better(one: float, other: float, direction: str) -> bool:
    # By more than 1%: sizes differ by a few bytes of headers.
    lower = one < other if direction == "lower" else one > other
    return lower and abs(one - other) > _NEGLIGIBLE * max(abs(one), abs(other))


def trade_off_axes(points: Sequence[TradeOff], across: Point, down: Point) -> tuple[Axis, Axis]:
    return amount_axis([point.x for point in points], *across), amount_axis([point.y for point in points], *down)


def _draw_trade_off(
    canvas: Canvas,
    results: Results,
    points: Sequence[TradeOff],
    numbers: Mapping[str, str],
    axes: tuple[Axis, Axis],
    measures: tuple[Measure, Measure],
) -> None:
    x, y = axes
    for tick, text in x.ticks():
        canvas.add(Line([(x.at(tick), y.end), (x.at(tick), y.start)], "grid", 0.8))
        canvas.add(Text(x.at(tick), y.start + 16, text, _SMALL, "faint", "middle"))
    for tick, text in y.ticks():
        canvas.add(Line([(x.start, y.at(tick)), (x.end, y.at(tick))], "grid", 0.8))
        canvas.add(Text(x.start - 7, y.at(tick) + 4, text, _SMALL, "faint", "end"))
    across, up = (
        scale_of(results, measure).label + ", log scale" * axis.log
        for axis, measure in zip(axes, measures, strict=True)
    )
    canvas.add(Text(x.start, 14, f"{measures[0].label} and {measures[1].label}", bold=True))
    canvas.add(Text((x.start + x.end) / 2, y.start + 33, across, _SMALL, "faint", "middle"))
    canvas.add(Text(x.start - 7, y.end - 12, up, _SMALL, "faint"))
    best = sorted((x.at(point.x), y.at(point.y)) for point in points if point.best)
    # Steps, because no arm lies between two of the best: a slope would promise one.
    for one, other in pairwise(best):
        canvas.add(Line([one, (other[0], one[1]), other], "good", 1.4))
    for point in reversed(points):  # the best above the others
        baseline = point.name == results.baseline
        colour = "good" if point.best else "base" if baseline else "neutral"
        shape = "square" if baseline else "up" if point.beyond else "circle"
        fill = colour if point.best or baseline else "paper"
        canvas.mark(shape, x.at(point.x), y.at(point.y), colour, fill, _RADIUS)
    labels: dict[Point, list[str]] = {}
    for point in points:
        place = x.at(point.x), y.at(point.y)
        # Points that hide each other share a label.
        place = next((other for other in labels if math.dist(place, other) < _RADIUS), place)
        labels.setdefault(place, []).append(numbers[point.name])
    texts = [(", ".join(sorted(names, key=int)), place) for place, names in labels.items()]
    area = (x.start, y.end, x.end, y.start)
    for label, box, line in place_labels(texts, _RADIUS + 1, 10, area, _corridors(best)):
        if line is not None:
            canvas.add(line)
        canvas.add(Box(box[0], box[1], box[2] - box[0], box[3] - box[1], "paper"), label)


def _corridors(best: Sequence[Point]) -> list[Rectangle]:
    # The line of the best arms, which no label covers.
    steps = [(one, (other[0], one[1]), other) for one, other in pairwise(best)]
    lines = [line for step in steps for line in pairwise(step)]
    return [(min(a[0], b[0]), min(a[1], b[1]) - 1, max(a[0], b[0]) + 1, max(a[1], b[1])) for a, b in lines]
