"""The figures: which ones a run gets, the names and numbers in them, and hostile names."""

import io
import itertools
import math
import random
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from report import documents
from report.documents import read
from tensorkeep.pages import canvas
from tensorkeep.pages.canvas import PALETTE, Box, Canvas, Line, Text, text_width
from tensorkeep_bench import wording
from tensorkeep_bench.report import plots
from tensorkeep_bench.report.drawing import (
    EVEN,
    Axis,
    amount_axis,
    gain_colour,
    log_ticks,
    overlap,
    place_labels,
    png_file,
    svg_file,
)
from tensorkeep_bench.report.html import report_page
from tensorkeep_bench.report.plots import Plot, draw_plots, shown_arms, wanted

HOSTILE = '<script>alert("$x^2$")</script> & \' -- ]]> 東京'
FORMULA = "$\\frac{1}{$"
FOUR = {"baseline": (134.2, 12.3, 2.0), HOSTILE: (98.4, 11.2, 2.0), FORMULA: (67.9, 15.7, 2.0), "off": (1.0, 1.0, 1.0)}
OFF = {"off": ("timeout", "took too long")}


def four(**options: Any) -> dict[str, Any]:
    """Return a document of four arms and three measures."""
    document = documents.document(FOUR, runs=2, **options)
    return {**document, "measures": [each for each in document["measures"] if each["name"] != "load_warm"]}


def figures(document: dict[str, Any], folder: Path) -> dict[str, Plot]:
    return {plot.name: plot for plot in draw_plots(read(document, folder))}


def drawn(folder: Path) -> dict[str, Plot]:
    """Return one figure of every kind."""
    found = figures(documents.document(documents.THREE_WAY, runs=2), folder) | figures(four(missing=OFF), folder)
    return found | figures(documents.steps(), folder) | figures(documents.factorial(), folder)


def words(canvas: Canvas) -> list[str]:
    """Return every text of a figure; parsing it also shows that it is well-formed."""
    root = ElementTree.fromstring(svg_file(canvas, "title"))
    found = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert found[1:] == [shape.text for shape in canvas.shapes if isinstance(shape, Text)]
    return found[1:]


def test_three_arms_get_three_panels(tmp_path: Path) -> None:
    results = read(documents.document(documents.THREE_WAY, runs=2), tmp_path)
    assert [name for name, *_ in wanted(results)] == ["three-way", "gains", "pareto"]
    assert [plot.name for plot in draw_plots(results, for_files=False)] == ["gains", "pareto"]
    shown = {"pytorch", "tensorstore", "t5x", "durable save", "cold load", "size"}
    # 6.7 to 134 s span more than 20 times, sizes do not.
    shown |= {"seconds, log scale", "GB"}
    assert shown <= set(words(draw_plots(results)[0].canvas))


def test_more_arms_get_four_and_six_panels_and_gains_show_intervals_and_noise(tmp_path: Path) -> None:
    found = figures(four(missing=OFF), tmp_path)
    assert list(found) == ["comparison", "impact", "gains", "pareto"]
    comparison, impact, gains, pareto = (set(words(plot.canvas)) for plot in found.values())
    assert "improvement" in comparison
    assert {"durable save: improvement", "cold load: improvement", "impact, % of the baseline"} <= impact
    gain = four(missing=OFF)["summary"]["arms"][FORMULA]["save"]["gain"]
    assert {wording.gain(gain), "noise: the baseline against itself"} <= gains
    assert "baseline" not in gains  # it has no gain over itself
    assert {"off", "not run (timed out)"} <= comparison & impact & gains
    assert "off" not in pareto


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
        [(0.11, 9.0), (2e-4, 2e4), (0.02, 3.0), (0.7, 5000.0)],
        [(0.2, 1.3), (0.02, 50.0), (0.5, 14.0), (0.9, 2.4)],
        [(0.6, 1.2), (1e-6, 1e6), (0.02, 3.0), (0.11, 9.0)],
    ],
    ids=str,
)
def test_the_ticks_of_gains_never_overlap(spans: list[tuple[float, float]], tmp_path: Path) -> None:
    canvas = plots.gains(read(spanning(*spans), tmp_path))
    ticks = [shape for shape in canvas.shapes if isinstance(shape, Text) and shape.colour == "faint"]
    ticks = [each for each in ticks if re.fullmatch(r"[\d.,e-]+x", each.text)]
    assert [each.text for each in ticks].count("1x") == 4
    ends = sorted((each.x - text_width(each.text, 11) / 2, each.x + text_width(each.text, 11) / 2) for each in ticks)
    assert len(ends) >= 8
    assert all(left[1] < right[0] for left, right in itertools.pairwise(ends))


def test_extreme_gains_are_clipped(tmp_path: Path) -> None:
    document = spanning(*[(1e-6, 1e6)] * 4)
    document["summary"]["arms"]["tensorstore"]["save"].update(gain=5e-4, gain_low=4e-4, gain_high=6e-4)
    document["summary"]["noise"]["save"] = {"low": 1e-5, "high": 1e5, "floor": 1e5, "n": 2}
    canvas = plots.gains(read(document, tmp_path))
    arrows = [shape for shape in canvas.shapes if isinstance(shape, Line) and shape.fill and len(shape.points) == 3]
    # Both ends of one interval in each panel, and a gain that lies outside itself.
    assert len(arrows) == 4 * 2 + 1
    assert all(0 <= x <= canvas.width for shape in canvas.shapes if isinstance(shape, Line) for x, _ in shape.points)
    assert "0.0005x" in words(canvas)
    assert any("Arrow: continues beyond the axis." in text for text in words(canvas))
    plain = plots.gains(read(four(missing=OFF), tmp_path))
    assert not any("Arrow" in text for text in words(plain))


def rectangle(text: Text) -> tuple[float, float, float, float]:
    width = text_width(text.text, text.size) * 0.9  # estimated for wide fonts
    left = text.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.anchor] * width
    return left, text.y - 0.72 * text.size, left + width, text.y + 0.12 * text.size


def generated(seed: int) -> dict[str, Any]:
    """Return results with a few or many arms, equal or very different figures, and runs that vary little or much."""
    random_ = random.Random(seed)
    spread = random_.choice([0.0, 0.002, 0.1, 1.0, 3.0])
    figures = {f"arm {i}": tuple(10 ** random_.uniform(0, spread) for _ in range(3)) for i in range(2 + seed * 2)}
    missing = {"arm 1": ("timeout", "took too long")} if seed % 3 == 1 else {}
    document = documents.document(figures, runs=1 + seed % 3, noise=random_.choice([0.0, 0.05, 0.9]), missing=missing)
    if seed % 4 == 3:  # no load was measured
        measures = [each for each in document["measures"] if not each["name"].startswith("load")]
        return {**document, "measures": measures}
    return document


@pytest.mark.parametrize("seed", range(10))
def test_texts_of_a_figure_lie_inside_it_without_overlaps_and_no_panel_is_empty(seed: int, tmp_path: Path) -> None:
    found = figures(generated(seed), tmp_path)
    assert {"gains", "pareto"} & found.keys() or seed % 3 == 1
    for plot in found.values():
        texts = [shape for shape in plot.canvas.shapes if isinstance(shape, Text) and shape.text]
        boxes = [rectangle(text) for text in texts]
        for (one, a), (other, b) in itertools.combinations(zip(texts, boxes, strict=True), 2):
            assert not overlap(a, b), (plot.name, one, other)
        assert all(box[0] >= 0 and box[2] <= plot.canvas.width for box in boxes), plot.name
        assert all(box[1] >= 0 and box[3] <= plot.canvas.height for box in boxes), plot.name
        # A panel without a title would be an empty one.
        assert all(shape.text for shape in plot.canvas.shapes if isinstance(shape, Text) and shape.bold), plot.name


@pytest.mark.parametrize("seed", range(12))
def test_labels_cover_nothing_and_lie_at_their_own_points(seed: int) -> None:
    random_, radius = random.Random(seed), 5.0
    middle = [(random_.uniform(20, 380), random_.uniform(20, 380)) for _ in range(4)]
    width = random_.choice([3.0, 30.0, 200.0])  # of the clusters
    points = [
        tuple(min(max(value + random_.uniform(-width, width), 10.0), 390.0) for value in random_.choice(middle))
        for _ in range(40)
    ]
    labels = [(", ".join(str(i + k) for k in range(random_.randint(1, 3))), point) for i, point in enumerate(points)]
    line = (0.0, 200.0, 400.0, 202.0)
    placed = list(place_labels(labels, radius, 10, (0, 0, 400, 400), [line]))
    assert [text.text for text, *_ in placed] == [text for text, _ in labels]
    boxes = [box for _, box, _ in placed]
    assert not any(overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    markers = [(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    assert not any(overlap(box, other) for box in boxes for other in [*markers, line])
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= 400 and box[3] <= 400 for box in boxes)
    for point, (_, box, lead) in zip(points, placed, strict=True):
        centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        if lead is None:
            assert min(math.dist(centre, other) for other in points) == math.dist(centre, point)
        else:
            assert lead.points[0] == point
            x, y = lead.points[1]
            assert box[0] <= x <= box[2] and box[1] <= y <= box[3]


@pytest.mark.parametrize("log", [False, True])
def test_an_interval_ends_in_a_cap_inside_the_axis_and_in_an_arrow_beyond_it(log: bool) -> None:
    random_ = random.Random(log)
    for _ in range(200):
        low, high = sorted((random_.uniform(-20, 130), random_.uniform(-20, 130)))
        panel = plots.Panel(Canvas(400, 100), "", 50, 0, 350, 1, 25)
        panel.axis = Axis(1, 100, 50, 350, log)
        panel.whisker(low, high, 30, "ink", 1)
        drawn = [shape for shape in panel.canvas.shapes if isinstance(shape, Line)]
        arrows = [shape for shape in drawn if len(shape.points) == 3]
        visible = high >= 1 and low <= 100
        assert len(arrows) == ((low < 1) + (high > 100)) * visible
        assert len(drawn) == 3 * visible  # the interval and its two ends
        assert panel.cut == bool(arrows)
        ends = sorted(x for shape in drawn if shape not in arrows for x, _ in shape.points)
        assert not ends or (ends[0], ends[-1]) == (panel.axis.at(low), panel.axis.at(high))


def test_the_axis_of_amounts_begins_at_zero_unless_the_values_are_close_or_far_apart() -> None:
    near, plain, far = (amount_axis(values, 0, 100) for values in ([2.5, 2.5], [1.0, 3.0], [1.0, 50.0]))
    assert (plain.low, plain.log) == (0, False)
    assert far.log and far.low < 1 and far.high > 50
    assert near.high - near.low == pytest.approx(2.5 * 0.024) and near.low < 2.5 < near.high
    assert [(axis.low, axis.high) for axis in (amount_axis([0.0], 0, 1), amount_axis([], 0, 1))] == [(0, 1), (0, 1.06)]
    for seed in range(50):
        random_ = random.Random(seed)
        values = [10 ** random_.uniform(0, random_.choice([0.01, 0.2, 4])) for _ in range(1 + seed % 5)]
        axis = amount_axis(values, 0, 100)
        assert not any(axis.cuts(value) for value in values) and axis.low < axis.high


def test_a_change_that_reads_one_has_no_colour(tmp_path: Path) -> None:
    document = documents.steps()
    for step in document["summary"]["steps"]:
        step |= {"gain_from_previous": 0.9996, "gain_from_base": 0.9996}
        step |= {"gain_from_previous_low": 0.9995, "gain_from_previous_high": 0.9997}
    canvas = plots.waterfall(read(document, tmp_path))
    assert "1.00x (1.00x)" in words(canvas)
    assert not {"good", "bad"} & {shape.fill for shape in canvas.shapes if isinstance(shape, Box)}
    assert gain_colour(0.9996) == gain_colour(1.004) == EVEN


def test_designs_get_their_own_figures_which_are_the_same_each_time(tmp_path: Path) -> None:
    last = [step for step in documents.steps()["summary"]["steps"] if step["measure"] == "save"][-1]
    both = f"{wording.gain(last['gain_from_base'])} ({wording.gain(last['gain_from_previous'])})"
    assert both in words(figures(documents.steps(), tmp_path)["steps"].canvas)
    found = figures(documents.factorial(), tmp_path)
    effects, interactions = found["effects"].canvas, found["interactions"].canvas
    assert "chunk x concurrency" in words(effects)
    assert words(effects).count("1.42x") == 3  # once in the list, twice in the symmetric heat map
    assert "1.37x" in words(interactions)
    assert figures(documents.factorial(), tmp_path)["effects"].canvas.page_svg("x") == effects.page_svg("x")


def test_hostile_names_are_text(tmp_path: Path) -> None:
    document = four(missing=OFF)
    found = list(figures(document, tmp_path).values())
    for plot in found:
        for name in (HOSTILE[:22], FORMULA):
            assert any(text.startswith(name) for text in words(plot.canvas)), plot.name
        assert "<script" not in svg_file(plot.canvas, HOSTILE) + plot.canvas.page_svg(HOSTILE)
    page = report_page(read(four(), tmp_path), found)
    assert page.count("<script") == 1
    assert "&lt;script&gt;alert" in page


def test_the_page_defines_the_colours_and_every_shape_lies_within_its_figure(tmp_path: Path) -> None:
    found = drawn(tmp_path)
    assert len(found) == 8
    for plot in found.values():
        svg = plot.canvas.page_svg(plot.title)
        assert "var(--plot-ink)" in svg and not re.search(r"#[0-9a-f]{6}", svg), plot.name
        texts = [shape for shape in plot.canvas.shapes if isinstance(shape, Text)]
        assert all(0 <= text.x <= plot.canvas.width and 0 < text.y <= plot.canvas.height for text in texts), plot.name
    css = (Path(canvas.__file__).parent / "page" / "base.css").read_text()
    assert all(f"--plot-{name}:" in css for name in PALETTE)


def test_a_file_has_a_title_and_a_white_ground(tmp_path: Path) -> None:
    """The page adds both."""
    plot = figures(documents.factorial(), tmp_path)["interactions"]
    svg = svg_file(plot.canvas, plot.title)
    assert plot.title in svg and "fill:#ffffff" in svg
    image = Image.open(io.BytesIO(png_file(plot.canvas, plot.title)))
    assert image.size == (2 * plot.canvas.width, 2 * (plot.canvas.height + 34))
    colours = {colour for _, colour in image.getcolors(1 << 20)}
    used = {PALETTE[name] for name in ("paper", "good", "ink")}
    assert used <= {"#{:02x}{:02x}{:02x}".format(*colour) for colour in colours}


def test_a_box_that_is_narrower_than_a_pixel_is_painted() -> None:
    narrow = canvas.Canvas(20, 20)
    narrow.add(canvas.Box(3, 3, 0.1, 5, "ink"), canvas.Box(8, 3, 5, 0.1, "ink"))
    assert png_file(narrow, "narrow").startswith(b"\x89PNG")


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
    found = words(figures(document, tmp_path)["comparison"].canvas)
    assert found.count("not compared") == len(FOUR)
    assert "not run" not in found
