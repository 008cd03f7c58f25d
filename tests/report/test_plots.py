"""The figures: which ones a run gets, the names and numbers in them, and hostile names."""

import itertools
import re
import warnings
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from report import documents
from report.documents import read
from tensorkeep.bench.analysis import wording
from tensorkeep.report.html import report_page, themed
from tensorkeep.report.plots import forest, wanted
from tensorkeep.report.plots.drawing import PALETTE, Plot, drawn, log_ticks, shown_arms

pytestmark = pytest.mark.xdist_group("plots")

Drawings = dict[str, dict[str, Plot]]
HOSTILE = '<script>alert("$x^2$")</script> & \' -- ]]> 東京'
FORMULA = "$\\frac{1}{$"
FOUR = {"baseline": (134.2, 12.3, 2.0), HOSTILE: (98.4, 11.2, 2.0), FORMULA: (67.9, 15.7, 2.0), "off": (1.0, 1.0, 1.0)}


def four(**options: Any) -> dict[str, Any]:
    """Return a document of four arms and three measures."""
    document = documents.document(FOUR, runs=2, **options)
    return {**document, "measures": [each for each in document["measures"] if each["name"] != "load_warm"]}


def figures(document: dict[str, Any], folder: Path, *names: str) -> dict[str, Plot]:
    """Draw the figures of a document, all or those named; a name that is not text would be a warning."""
    results = read(document, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {name: drawn(name, *how, results) for name, *how in wanted(results) if not names or name in names}


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Drawings:
    """Every kind of figure, drawn once for all tests."""
    folder = tmp_path_factory.mktemp("plots")
    return {
        "three": figures(documents.document(documents.THREE_WAY, runs=2), folder, "three-way"),
        "four": figures(four(missing={"off": ("timeout", "took too long")}), folder),
        "steps": figures(documents.steps(), folder, "steps"),
        "factorial": figures(documents.factorial(), folder, "effects", "interactions"),
    }


def words(plot: Plot) -> list[str]:
    """Return every text of a figure; parsing it also shows that it is well-formed."""
    root = ElementTree.fromstring(plot.svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


def test_three_arms_get_three_panels(drawings: Drawings, tmp_path: Path) -> None:
    results = read(documents.document(documents.THREE_WAY, runs=2), tmp_path)
    assert [name for name, *_ in wanted(results)] == ["three-way", "gains", "pareto"]
    shown = {"pytorch", "tensorstore", "t5x", "durable save", "cold load", "size"}
    # 6.7 to 134 s span more than 20 times, sizes do not.
    shown |= {"seconds, log scale", "GB"}
    assert shown <= set(words(drawings["three"]["three-way"]))


def test_more_arms_get_four_and_six_panels_and_the_forest_plot_shows_gains_and_noise(drawings: Drawings) -> None:
    assert list(drawings["four"]) == ["comparison", "impact", "gains", "pareto"]
    comparison, impact, gains, pareto = (set(words(plot)) for plot in drawings["four"].values())
    assert "improvement" in comparison
    assert {"durable save: improvement", "cold load: improvement", "impact, % of the baseline"} <= impact
    gain = four(missing={"off": ("timeout", "took too long")})["summary"]["arms"][FORMULA]["save"]["gain"]
    assert {wording.gain(gain), "noise: the baseline against itself"} <= gains
    assert "baseline" not in gains  # it has no gain over itself
    assert {"off", "not run (timed out)"} <= comparison & impact & gains
    assert "off" not in pareto


def ticks(figure: Any) -> list[list[tuple[str, float, float]]]:
    """Return, for each panel, the labels of its x axis with where they begin and end, in pixels."""
    figure.draw_without_rendering()
    found = []
    for axes in figure.axes:
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


@pytest.mark.parametrize(
    "spans",
    [
        [(1e-6, 1e6), (0.4, 1.6), (0.98, 1.03), (0.3, 60.0)],
        pytest.param([(0.11, 9.0), (2e-4, 2e4), (0.02, 3.0), (0.7, 5000.0)], marks=pytest.mark.exhaustive),
        pytest.param([(0.2, 1.3), (0.02, 50.0), (0.5, 14.0), (0.9, 2.4)], marks=pytest.mark.exhaustive),
        pytest.param([(0.6, 1.2), (1e-6, 1e6), (0.02, 3.0), (0.11, 9.0)], marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_ticks_of_the_forest_plot_never_overlap(spans: list[tuple[float, float]], tmp_path: Path) -> None:
    panels = ticks(forest.gains(read(spanning(*spans), tmp_path)))
    assert len(panels) == 4
    for panel in panels:
        assert len(panel) >= 2 and "1x" in [text for text, _, _ in panel]
        assert all(left[2] + 4 < right[1] for left, right in itertools.pairwise(panel)), panel
    for left, right in itertools.pairwise(panels):
        assert left[-1][2] < right[0][1]


def test_the_forest_plot_clips_extreme_gains(drawings: Drawings, tmp_path: Path) -> None:
    document = spanning(*[(1e-6, 1e6)] * 4)
    document["summary"]["arms"]["tensorstore"]["save"].update(gain=5e-4, gain_low=4e-4, gain_high=6e-4)
    document["summary"]["noise"]["save"] = {"low": 1e-5, "high": 1e5, "floor": 1e5, "n": 2}
    figure = forest.gains(read(document, tmp_path))
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    assert 0.005 < low < 0.01 and 100 < high < 200
    arrows = {(str(line.get_marker()), line.get_ydata()[0]) for line in axes.lines if line.get_marker() in "<>"}
    # Both ends of one interval, and a gain that lies outside itself.
    assert arrows == {("<", 1), (">", 1), ("<", 0)}
    assert all(low <= x <= high for line in axes.lines for x in line.get_xdata())
    assert "0.0005x" in [text.get_text() for text in axes.texts]
    assert "beyond 0.01x or 100x" in figure.get_supxlabel()
    assert "beyond 0.01x or 100x" not in " ".join(words(drawings["four"]["gains"]))


def test_designs_get_their_own_figures_which_are_the_same_each_time(drawings: Drawings, tmp_path: Path) -> None:
    last = [step for step in documents.steps()["summary"]["steps"] if step["measure"] == "save"][-1]
    both = f"{wording.gain(last['gain_from_base'])} ({wording.gain(last['gain_from_previous'])})"
    assert both in words(drawings["steps"]["steps"])
    effects, interactions = drawings["factorial"].values()
    assert "chunk x concurrency" in words(effects)
    assert words(effects).count("1.42x") == 3  # once in the list, twice in the symmetric heat map
    assert "1.37x" in words(interactions)
    assert figures(documents.factorial(), tmp_path, "effects")["effects"].svg == effects.svg


def test_hostile_names_are_text(drawings: Drawings, tmp_path: Path) -> None:
    plots = list(drawings["four"].values())
    for plot in plots:
        for name in (HOSTILE[:22], FORMULA):
            assert any(text.startswith(name) for text in words(plot)), plot.name
        assert "<script" not in plot.svg + themed(plot)
    page = report_page(read(four(), tmp_path), plots)
    assert page.count("<script") == 1
    assert "&lt;script&gt;alert" in page


def test_the_page_defines_the_colours(drawings: Drawings) -> None:
    plots = {name: plot for each in drawings.values() for name, plot in each.items()}
    assert len(plots) == 8
    for plot in plots.values():
        used = set(re.findall(r"#[0-9a-f]{6}", themed(plot).split(">", 1)[1]))
        assert not used & set(PALETTE.values()), plot.name
        assert "var(--plot-ink)" in themed(plot)
        assert 'id="figure_1"' not in themed(plot)
        # Black is matplotlib's default: a figure that has it forgot to ask the palette.
        assert "#000000" not in plot.svg, plot.name
    # What the figures refer to by id must not be confused with another figure's.
    ids = [name for plot in plots.values() for name in re.findall(r'\sid="([^"]+)"', themed(plot))]
    assert len(ids) == len(set(ids))


def test_a_file_has_a_title_and_a_white_ground(drawings: Drawings) -> None:
    """The page adds both. A title is the head of the figure's legend, or of a figure without one."""
    for plot in (drawings["three"]["three-way"], drawings["factorial"]["interactions"]):
        assert (plot.title in plot.file_svg(), plot.title in plot.svg) == (True, False)
        assert "#ffffff" in plot.file_svg(), plot.title


def test_a_figure_shows_at_most_forty_arms(tmp_path: Path) -> None:
    document = documents.many(60, runs=1)
    arms = document["summary"]["arms"]
    best = max((name for name in arms if arms[name]["save"]["gain"]), key=lambda n: arms[n]["save"]["gain"])
    shown = [arm.name for arm in shown_arms(read(document, tmp_path))]
    assert (len(shown), shown[0]) == (40, "pytorch")
    assert best in shown


AXES = [(0.9, 1.12), (0.95, 1.05), (0.2, 6), (0.05, 40), (1e-4, 1e5), (0.5, 1.6), (5.1, 410.0), (0.999, 1.001)]


def test_ticks_of_a_log_axis_are_few_and_inside() -> None:
    for low, high in AXES:
        ticks = log_ticks(low, high)
        assert 2 <= len(ticks) <= 6 and ticks == sorted(set(ticks)), (low, high)
        assert low <= ticks[0] and ticks[-1] <= high, (low, high)


def test_arms_without_a_baseline_are_labelled_not_compared(tmp_path: Path) -> None:
    document = {**four(control=False), "summary": {}}
    document["experiment"]["baseline"] = None
    document["arms"][0]["role"] = "arm"
    found = words(figures(document, tmp_path, "comparison")["comparison"])
    assert found.count("not compared") == len(FOUR)
    assert "not run" not in found
