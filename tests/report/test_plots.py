"""The figures: which ones a run gets, the names and numbers in them, and hostile names."""

import itertools
import json
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from report import documents
from tensorkeep.bench.analysis import wording
from tensorkeep.bench.results import Results
from tensorkeep.bench.results_file import read_results
from tensorkeep.report.html import report_page, themed
from tensorkeep.report.plots import wanted
from tensorkeep.report.plots.drawing import PALETTE, Plot, drawn, log_ticks, shown_arms

HOSTILE = '<script>alert("$x^2$")</script> & \' -- ]]> 東京'


Draw = Callable[..., dict[str, Plot]]


@pytest.fixture(scope="module")
def draw(tmp_path_factory: pytest.TempPathFactory) -> Draw:
    """Draw the figures of a document, all or those named; each is drawn once for all tests."""
    folder = tmp_path_factory.mktemp("plots")
    found: dict[str, Results] = {}
    drawings: dict[tuple[str, str], Plot] = {}

    def call(document: dict[str, Any], *names: str) -> dict[str, Plot]:
        key = json.dumps(document, sort_keys=True)
        if key not in found:
            found[key] = read_results(documents.write(document, folder))
        chosen = [one for one in wanted(found[key]) if not names or one[0] in names]
        for name, title, drawer in chosen:
            if (key, name) not in drawings:
                drawings[key, name] = drawn(name, title, drawer, found[key])
        return {name: drawings[key, name] for name, _, _ in chosen}

    return call


def words(plot: Plot) -> list[str]:
    """Return every text of a figure; parsing it also shows that it is well-formed."""
    root = ElementTree.fromstring(plot.svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_three_arms_get_three_panels(draw: Draw) -> None:
    plots = draw(documents.document(documents.THREE_WAY))
    assert list(plots) == ["three-way", "gains", "pareto"]
    found = words(plots["three-way"])
    assert {"pytorch", "tensorstore", "t5x", "durable save", "cold load", "size"} <= set(found)
    # 6.7 to 134 s span more than 20 times, sizes do not.
    assert "seconds, log scale" in found
    assert "GB" in found
    assert plots["gains"].png().startswith(b"\x89PNG")


def test_six_arms_get_four_and_six_panels(draw: Draw) -> None:
    missing = {"t5x_full": ("timeout", "took too long")}
    plots = draw(documents.document(missing=missing, runs=2))
    assert list(plots) == ["comparison", "impact", "gains", "pareto"]
    assert "improvement" in words(plots["comparison"])
    impact = words(plots["impact"])
    assert {"durable save: improvement", "cold load: improvement", "impact, % of the baseline"} <= set(impact)
    for name in ("comparison", "impact", "gains"):
        assert "not run (timed out)" in words(plots[name])
    assert "t5x_full" not in words(plots["pareto"])
    assert "chunks_1mb" in words(plots["pareto"])


def test_the_forest_plot_shows_gains_and_noise(draw: Draw) -> None:
    document = documents.document(documents.PEERS)
    gain = document["summary"]["arms"]["tensorkeep"]["save"]["gain"]
    found = words(draw(document, "gains")["gains"])
    assert wording.gain(gain) in found
    assert "noise: the baseline against itself" in found
    assert "pytorch" not in found  # the baseline has no gain over itself


def ticks(plot: Plot) -> list[list[tuple[str, float, float]]]:
    """Return, for each panel, the labels of its x axis with where they begin and end, in pixels."""
    plot.figure.draw_without_rendering()
    found = []
    for axes in plot.figure.axes:
        low, high = axes.get_xlim()
        labels = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
        boxes = [(label.get_text(), label.get_window_extent()) for at, label in labels if low <= at <= high]
        found.append(sorted(((text, box.x0, box.x1) for text, box in boxes), key=lambda entry: entry[1]))
    return found


def spanning(*spans: tuple[float, float]) -> dict[str, Any]:
    """Return a document in which one arm's gain has these intervals, the first one in the first primary measure."""
    document = documents.document(documents.THREE_WAY, runs=2)
    primary = [measure["name"] for measure in documents.MEASURES if measure["primary"]]
    for measure, (low, high) in zip(primary, spans, strict=True):
        changed = {"verdict": "within noise", "gain": (low * high) ** 0.5, "gain_low": low, "gain_high": high}
        document["summary"]["arms"]["t5x"][measure].update(changed)
    return document


SPANS = [
    *((1e-6, 1e6), (2e-4, 2e4), (0.02, 3.0), (0.3, 60.0), (0.11, 9.0), (0.4, 1.6), (0.98, 1.03), (0.7, 5000.0)),
    *((0.2, 1.3), (0.02, 50.0), (0.5, 14.0), (0.9, 2.4), (0.6, 1.2), (1e-6, 1e6), (0.02, 3.0), (0.11, 9.0)),
]


@pytest.mark.parametrize("first", range(0, len(SPANS), 4))
def test_the_ticks_of_the_forest_plot_never_overlap(first: int, draw: Draw) -> None:
    panels = ticks(draw(spanning(*SPANS[first : first + 4]), "gains")["gains"])
    assert len(panels) == 4
    for panel in panels:
        assert "1x" in [text for text, _, _ in panel]
        assert len(panel) >= 2
        assert all(left[2] + 4 < right[1] for left, right in itertools.pairwise(panel)), panel
    for left, right in itertools.pairwise(panels):
        assert left[-1][2] < right[0][1]


def test_the_forest_plot_clips_extreme_gains(draw: Draw) -> None:
    document = spanning(*[(1e-6, 1e6)] * 4)
    document["summary"]["arms"]["tensorstore"]["save"].update(gain=5e-4, gain_low=4e-4, gain_high=6e-4)
    document["summary"]["noise"]["save"] = {"low": 1e-5, "high": 1e5, "floor": 1e5, "n": 2}
    plot = draw(document, "gains")["gains"]
    axes = plot.figure.axes[0]
    low, high = axes.get_xlim()
    assert 0.005 < low < 0.01
    assert 100 < high < 200
    arrows = {(str(line.get_marker()), line.get_ydata()[0]) for line in axes.lines if line.get_marker() in "<>"}
    # Both ends of one interval, and a gain that lies outside itself.
    assert arrows == {("<", 1), (">", 1), ("<", 0)}
    for line in axes.lines:
        assert all(low <= x <= high for x in line.get_xdata())
    assert "0.0005x" in words(plot)
    assert "beyond 0.01x or 100x" in " ".join(words(plot))
    calm = draw(documents.document(documents.PEERS), "gains")["gains"]
    assert "beyond 0.01x or 100x" not in " ".join(words(calm))


def test_designs_get_their_own_figures(draw: Draw) -> None:
    document = documents.steps()
    last = [step for step in document["summary"]["steps"] if step["measure"] == "save"][-1]
    assert f"{wording.gain(last['gain_from_base'])} ({wording.gain(last['gain_from_previous'])})" in words(
        draw(document, "steps")["steps"]
    )
    plots = draw(documents.factorial(), "effects", "interactions")
    assert "chunk x concurrency" in words(plots["effects"])
    assert words(plots["effects"]).count("1.42x") == 3  # once in the list, twice in the symmetric heat map
    assert "1.37x" in words(plots["interactions"])


def test_hostile_names_are_text(draw: Draw, tmp_path: Path) -> None:
    document = documents.document({"base": (3, 2, 1), HOSTILE: (1, 1, 1), "$\\frac{1}{$": (1, 2, 1)}, runs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots = draw(document)
    shown = HOSTILE[:22]
    for plot in plots.values():
        assert any(text.startswith(shown) for text in words(plot)), plot.name
        assert "<script" not in plot.svg
        assert "<script" not in themed(plot)
    page = report_page(read_results(documents.write(document, tmp_path)), list(plots.values()))
    assert page.count("<script") == 1
    assert "&lt;script&gt;alert" in page


def test_figures_are_the_same_each_time(draw: Draw, tmp_path: Path) -> None:
    document = documents.document(documents.THREE_WAY)
    found = read_results(documents.write(document, tmp_path))
    name, title, drawer = next(wanted(found))
    assert drawn(name, title, drawer, found).svg == draw(document, name)[name].svg


def test_the_page_defines_the_colours(draw: Draw) -> None:
    plots = draw(documents.factorial(), "impact", "gains", "effects")
    for plot in plots.values():
        used = set(re.findall(r"#[0-9a-f]{6}", themed(plot).split(">", 1)[1]))
        assert not used & set(PALETTE.values()), plot.name
        assert f"var(--plot-{'ink'})" in themed(plot)
        assert 'id="figure_1"' not in themed(plot)
        # A file has its title and a white ground, which the page adds to the others.
        assert (plot.title in plot.file_svg(), plot.title in plot.svg) == (True, False)
        assert "#ffffff" in plot.file_svg()
    # What the figures refer to by id must not be confused with another figure's.
    ids = [name for plot in plots.values() for name in re.findall(r'\sid="([^"]+)"', themed(plot))]
    assert len(ids) == len(set(ids))
    # Black is matplotlib's default: a figure that has it forgot to ask the palette.
    for name, plot in plots.items():
        assert "#000000" not in plot.svg, name


def test_a_figure_shows_at_most_forty_arms(draw: Draw, tmp_path: Path) -> None:
    document = documents.many(60, runs=1)
    arms = document["summary"]["arms"]
    best = max((name for name in arms if arms[name]["save"]["gain"]), key=lambda n: arms[n]["save"]["gain"])
    found = read_results(documents.write(document, tmp_path))
    shown = [arm.name for arm in shown_arms(found)]
    assert (len(shown), shown[0]) == (40, "pytorch")
    assert best in shown


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.9, 1.12), (0.95, 1.05), (0.2, 6), (0.05, 40), (1e-4, 1e5), (0.5, 1.6), (5.1, 410.0), (0.999, 1.001)],
)
def test_ticks_of_a_log_axis_are_few_and_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 6
    assert ticks == sorted(set(ticks))
    assert all(low <= tick <= high for tick in ticks)


def test_arms_without_a_baseline_are_labelled_not_compared(draw: Draw) -> None:
    document = documents.document(runs=1, control=False)
    document["summary"] = {}
    document["experiment"]["baseline"] = None
    document["arms"][0]["role"] = "arm"
    found = words(draw(document, "comparison")["comparison"])
    assert found.count("not compared") == 6
    assert "not run" not in found
