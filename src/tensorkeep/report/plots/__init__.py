"""The plots of a report: which ones the results call for, each as SVG and PNG."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tensorkeep.bench.results import Results
from tensorkeep.errors import MissingExtraError, installation_of
from tensorkeep.report.measures import compared_arms, compared_measures
from tensorkeep.report.plots.drawing import Plot, drawn
from tensorkeep.report.subject import subject_and_machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES_ONLY = ("three-way", "comparison", "impact")
"""Plots whose figures the page shows itself."""
# The published three-way comparison has three panels; for more arms the six-way one adds a fourth, the improvement.
_FEW = 3


def draw_plots(results: Results, *, for_files: bool = True) -> list[Plot]:
    """Return every figure that the results call for, drawn; its title names the model or recipe, and the machine.

    Without ``for_files``, only those are drawn that the page needs: drawing one takes about a second.

    Raises MissingExtraError if matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        remedy = installation_of("bench")
        raise MissingExtraError("plots need matplotlib, which is not installed", remedy=remedy) from error
    subject = subject_and_machine(results)
    chosen = [each for each in wanted(results) if for_files or each[0] not in FILES_ONLY]
    return [drawn(name, f"{title}: {subject}", draw, results) for name, title, draw in chosen]


def wanted(results: Results) -> "Iterator[tuple[str, str, Callable[[Results], Figure]]]":
    """Yield name, title and drawing function of every figure that the results call for."""
    from tensorkeep.report.plots import bars, designs, forest, pareto

    chosen = compared_measures(results)
    few = len(compared_arms(results)) <= _FEW
    if chosen.named() and few:
        yield "three-way", chosen.title, bars.three_way
    if chosen.named() and not few:
        yield "comparison", f"{chosen.title}, and the gain", bars.four_panels
        if results.baseline is not None:
            yield "impact", "What each arm changes", bars.six_panels
    if forest.arms_with_gains(results):
        yield (
            "gains",
            f"Gain over {results.baseline or 'the baseline'}, with 95% intervals and the noise band",
            forest.gains,
        )
    if chosen.save and (chosen.size or chosen.load):
        yield "pareto", "Trade-offs, and the arms that no other arm beats", pareto.trade_offs
    if results.summary.steps:
        yield "steps", "The way from the base, one change at a time", designs.waterfall
    if results.summary.effects:
        yield "effects", "The effect of each factor, and the interactions", designs.effects
    if results.summary.interactions:
        yield "interactions", "Changes together, against the product of the single ones", designs.interactions
