"""The loss curves of a comparison of training runs, by step and by time."""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from tensorkeep.bench.analysis.wording import clipped
from tensorkeep.bench.results import Cell, Results
from tensorkeep.report.charts.curves import Chart, Curve, Point, chart
from tensorkeep.report.measures import compared_arms
from tensorkeep.report.plots.drawing import NAME_LENGTH
from tensorkeep.report.subject import subject_name

# Not imported from the workload, which needs torch.
_LOSS, _STEP = "loss", "step"
_COLOURS = ("base", "first", "second", "third", "fourth")


def loss_charts(results: Results) -> list[Chart]:
    """Return the training loss by step and by second of training; nothing if the results have no losses."""
    cells = {
        arm.name: [cell for cell in results.cells_by_arm[arm.name] if cell.status == "ok" and cell.losses]
        for arm in compared_arms(results)
    }
    arms = [name for name, own in cells.items() if own]
    # The baseline, then the arms whose loss differs most: curves of the same losses hide each other.
    arms.sort(key=lambda name: (name != results.baseline, -_distance(results, name)))
    # The colour of the baseline is only its own.
    colours = _COLOURS if results.baseline in arms else _COLOURS[1:]
    drawn = {name: cells[name] for name in arms[: len(colours)]}
    name = subject_name(results)
    found = [_chart(f"Training loss (nats) by step: {name}", "step", drawn, colours, lambda cell: 1.0)]
    if all(cell.figures.get(_STEP) for own in drawn.values() for cell in own):
        title = f"Training loss (nats) by second: {name}"
        found.append(_chart(title, "second", drawn, colours, lambda cell: cell.figures[_STEP] or 0.0))
    return [each for each in found if each is not None]


def losses_note(results: Results) -> str:
    """Return what the curves show, and which arms they omit."""
    count = sum(any(cell.losses for cell in results.cells_by_arm[arm.name]) for arm in compared_arms(results))
    text = "Mean of the blocks. Seconds: of training alone, at the median step."
    if count > len(_COLOURS):
        text += f" The baseline and the {len(_COLOURS) - 1} of {count - 1} arms whose validation loss differs most."
    return text


def _distance(results: Results, arm: str) -> float:
    gain = results.statistics(arm, _LOSS).gain
    return abs(math.log(gain)) if gain and gain > 0 else 0.0


def _chart(
    title: str, by: str, cells: dict[str, list[Cell]], colours: Sequence[str], scale: Callable[[Cell], float]
) -> Chart | None:
    curves = [
        Curve(clipped(name, NAME_LENGTH), colour, _mean(own, statistics.fmean(map(scale, own))))
        for (name, own), colour in zip(cells.items(), colours, strict=False)
    ]
    return chart(title, curves, by=by)


def _mean(cells: list[Cell], scale: float) -> list[Point]:
    """Return the mean loss of the cells at each step that all of them have."""
    found: dict[int, list[float]] = defaultdict(list)
    for cell in cells:
        for step, loss in cell.losses:
            found[step].append(loss)
    return [(step * scale, statistics.fmean(own)) for step, own in sorted(found.items()) if len(own) == len(cells)]
