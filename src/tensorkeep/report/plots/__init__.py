"""The figures of a report: which a run calls for, and each as SVG and PNG."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensorkeep.bench.results import Results
from tensorkeep.errors import MissingExtraError
from tensorkeep.report.panels import compared, trio
from tensorkeep.report.plots.drawing import Plot, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The three-way documents showed three panels; more arms get the six-way guide's fourth, the improvement.
_FEW = 3


def draw_plots(results: Results) -> list[Plot]:
    """Return every figure that the results call for, drawn.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'tensorkeep[bench]'"
        raise MissingExtraError("plots need matplotlib, which is not installed", remedy=remedy) from error
    return [drawn(name, title, draw, results) for name, title, draw in wanted(results)]


def wanted(results: Results) -> Iterator[tuple[str, str, Callable[[Results], Figure]]]:
    """Yield name, title and drawer of every figure that the results call for."""
    from tensorkeep.report.plots import bars, effects, forest, pareto, steps

    chosen = trio(results)
    few = len(compared(results)) <= _FEW
    if chosen.all():
        words = chosen.words
        yield (
            ("three-way", words, bars.three_way) if few else ("comparison", f"{words}, and the gain", bars.four_panels)
        )
    if chosen.all() and not few and results.baseline is not None:
        yield "impact", "What each arm changes", bars.six_panels
    if forest.rows(results):
        yield "gains", "Gain over the baseline, with 95% intervals and the noise band", forest.gains
    if chosen.save and (chosen.size or chosen.load):
        yield "pareto", "What is paid for what: the best compromises", pareto.compromises
    if results.summary.steps:
        yield "steps", "The way from the baseline, one change at a time", steps.waterfall
    if results.summary.effects:
        yield "effects", "What each factor does, and which work together", effects.effects
    if results.summary.interactions:
        yield "interactions", "Changes together, against the product of the single ones", effects.interactions
