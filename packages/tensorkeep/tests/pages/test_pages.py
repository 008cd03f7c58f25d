"""The pages without a browser: bounded, escaped, and with what was found."""

import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from pages.shown_runs import HOSTILE, save_model, save_run
from tensorkeep.pages import checkpoint as checkpoint_module
from tensorkeep.pages.canvas import Line, Point, Text
from tensorkeep.pages.checkpoint import read_contents
from tensorkeep.pages.curves import Chart, Curve, chart
from tensorkeep.pages.difference import Difference
from tensorkeep.pages.page import Column, data_json, drawn_table, heat_map, title_of
from tensorkeep.pages.run import RunComparison, read_figures, read_run
from tensorkeep.pages.statistics import Histogram
from tensorkeep.testing.cases import case


def data_of(page: str) -> Any:
    [found] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(found)


def check_escaped(page: str) -> None:
    """Nothing of the hostile name is HTML, and the page requests nothing."""
    assert "<img" not in page
    assert page.count("</script>") == 2
    for fetching in ("src=", "<link", "@import", "url(http", "fetch("):
        assert fetching not in page.replace("img src=x", "")
    assert "default-src 'none'" in page


def test_the_page_of_a_checkpoint_has_every_tensor(tmp_path: Path) -> None:
    contents = read_contents(save_model(tmp_path / "model"))
    page = contents.page()
    check_escaped(page)
    table = data_of(page)["tensors"]
    names = [row[0] for row in table["rows"]]
    assert sorted(names) == sorted(entry.name for entry in contents.info.entries)
    assert names[0] == "others.broken"
    assert any(HOSTILE in name for name in names)
    titles = [column["title"] for column in table["columns"]]
    row = dict(zip(titles, table["rows"][0], strict=True))
    assert (row["NaN"], row["Inf"], row["shape"], row["raw"], len(row["values"][4])) == (1, 1, "500", 2000, 48)
    alias = dict(zip(titles, next(row for row in table["rows"] if row[0] == "model.head"), strict=True))
    assert (alias["view of"], alias["stored"], alias["mean"]) == ("model.embedding", 0, None)
    texts = [text for _, text in contents.findings()]
    assert texts[1] == "1 tensor holds values that are not finite: others.broken (1 NaN, 1 infinite)."
    assert "6 tensors of zeros only: model.blocks.0.mlp.b" in texts[2]


@pytest.mark.parametrize("steps", [1, 6])
def test_the_page_of_a_run(tmp_path: Path, steps: int) -> None:
    page = read_run(save_run(tmp_path / "run", steps=steps), sample=10**9).page()
    # The bars of few steps are not wider than their numbers.
    assert re.findall(r'<rect class="new" x="[\d.]+" width="([\d.]+)"', page) == ["54.00"] * steps
    check_escaped(page)
    assert page.count('<figure class="chart"') == 4
    assert "NaN" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert data_of(page)["tensors"]["rows"][0][0] == f"{steps * 100} (best)"
    text = re.sub(r"\s+", " ", page)
    assert f"Best step: {steps * 100}, validation_loss {3 / steps:g}" in text
    for words in ("1 layer did not move", "Which steps share which bytes"):
        assert steps == 1 or words in text, words


def test_a_step_shows_when_it_was_saved_and_whose_files_it_shares_and_its_run_losses_of_nan(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", steps=2)
    page = read_contents(run / "checkpoints" / "step-000200").page()
    facts = dict(re.findall(r"<dt>(.*?)</dt>\s*<dd[^>]*>(.*?)</dd>", page))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", facts["step: saved at"])
    assert facts["step: number"] == "200"
    assert re.fullmatch(r"[\d.]+ k?B", facts["history: linked bytes: step-000100"])
    line = '{"step": 205, "kind": "train", "loss": null}\n'
    (run / "log.jsonl").write_text(f"{(run / 'log.jsonl').read_text()}\n{line}{line.replace('205', '206')}")
    contents = read_run(run, sample=10**9)
    texts = [text for tone, text in contents.findings() if tone == "bad"]
    assert texts == ["The loss was not finite at 2 logged steps, first at step 205."]
    check_escaped(contents.page())


def test_a_step_is_titled_with_its_run() -> None:
    titles = {"models/x.safetensors": "x.safetensors", "s3://bucket/run/checkpoints": "run", "run/": "run", "/": "/"}
    titles |= dict.fromkeys(("run/checkpoints/step-000100", "run/step-000100"), "run: step-000100")
    assert {path: title_of(path) for path in titles} == titles


def test_the_page_of_a_run_without_a_log_has_its_metrics(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)}, metrics={"eval/loss": 1 / step, HOSTILE: 1.0})
    page = read_run(tmp_path / "run", sample=10**9).page()
    assert page.count('<figure class="chart"') == 2
    check_escaped(page)


def test_the_page_of_a_run_has_the_metrics_of_deleted_steps_and_names_a_better_one(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run", keep_last=2) as manager:
        for step, loss in enumerate((3.0, 1.0, 2.0, 1.5), 1):
            manager.save(step, {"w": torch.ones(3)}, metrics={"loss": loss})
    contents = read_run(tmp_path / "run", sample=10**9)
    [drawn] = contents.charts()
    assert drawn.data["curves"] == [["metric of the step", [[1, 3], [2, 1], [3, 2], [4, 1.5]]]]
    texts = [text for _, text in contents.findings()]
    assert "Best step: 4, loss 1.5." in texts
    assert "The metrics of 2 deleted steps are in the figures as well." in texts
    assert "The best loss of all was 1, at step 2, which was deleted." in texts


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ((3.0, 2.0), "b has the better loss: 1 at step 2, against 2 at step 2."),
        ((3.0, 1.0), "Both runs have the same best loss: 1 at step 2, and 1 at step 2."),
        ((0.5, 2.0), "a has the better loss: 0.5 at step 1, against 1 at step 2."),
    ],
)
def test_the_page_of_two_runs_has_both_curves_in_each_chart(tmp_path: Path, losses: Any, text: str) -> None:
    for name, values, others in (("a", losses, {}), ("b", (3.0, 1.0), {HOSTILE: 1.0})):
        with tensorkeep.CheckpointManager(tmp_path / name, keep_last=1) as manager:
            for step, loss in enumerate(values, 1):
                manager.save(step, {"w": torch.ones(3)}, metrics={"loss": loss, **others})
    runs = RunComparison((read_figures(tmp_path / "a"), read_figures(tmp_path / "b")))
    drawn, other = runs.charts()
    assert drawn.data["curves"] == [["a", [[1, losses[0]], [2, losses[1]]]], ["b", [[1, 3], [2, 1]]]]
    assert (drawn.title, other.title) == ("loss", f"{HOSTILE} (b only)")
    assert [found for _, found in runs.findings()] == [
        *(f"{name}: 2 saved steps, 1 to 2, 1 of them deleted." for name in "ab"),
        text,
    ]
    assert runs.summary().texts()[1] == ("loss", "b", "3", "1", "1", "3")
    page = runs.page()
    check_escaped(page)
    assert page.count('<figure class="chart"') == 2


def test_two_runs_of_the_trainer_are_compared_figure_by_figure(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        save_run(tmp_path / folder / "run", steps=2)
    runs = RunComparison((read_figures(tmp_path / "x" / "run"), read_figures(tmp_path / "y" / "run")))
    assert [chart.title for chart in runs.charts()] == [
        *("Loss: training", "Loss: validation", "Learning rate", "Tokens per second", "Gradient norm")
    ]
    # Both are called "run", so their folders are the names.
    assert runs.names == tuple(str(tmp_path / folder / "run" / "checkpoints") for folder in ("x", "y"))


def test_the_page_of_two_checkpoints_has_the_largest_changes_first(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 1.5)):
        model = {HOSTILE: torch.ones(9) * factor, "x.0.w": torch.ones(4), "x.1.w": torch.ones(4) + factor / 10}
        model["from zero"] = torch.ones(9) * (name == "b")
        values = {"lr": factor, "name": HOSTILE * round(factor)}
        tensorkeep.save({"model": {**model, name: torch.zeros(2)}, **values}, tmp_path / name)
    page = Difference(tensorkeep.diff(tmp_path / "a", tmp_path / "b")).page()
    check_escaped(page)
    rows = data_of(page)["tensors"]["rows"]
    assert [row[0] for row in rows] == ["model.from zero", f"model.{HOSTILE}", "model.x.1.w"]
    assert (rows[0][1], rows[1][1]) == ("inf", 0.5)
    assert "Only in the second checkpoint" in page
    same = Difference(tensorkeep.diff(tmp_path / "a", tmp_path / "a")).page()
    assert "The same: 5 tensors" in same
    assert 'data-table="tensors"' not in same


def test_the_changes_of_the_model_come_before_those_of_the_optimizer(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        state = {"adam": {"m": torch.ones(4) * factor**3}, "model": {"x": torch.ones(4), "y": torch.ones(4) * factor}}
        tensorkeep.save({**state, "rng": torch.tensor([int(factor)])}, tmp_path / name)
    report = tensorkeep.diff(tmp_path / "a", tmp_path / "b")
    assert [text for _, text in Difference(report).findings()] == [
        "Tensors: 3 changed, 1 identical.",
        "model: 4 of 4 elements differ, relative L2 2, most in model.y (2).",
        "adam: 4 of 4 elements differ, relative L2 26, most in adam.m (26).",
        "rng: 1 of 1 elements differ.",
    ]
    page = Difference(report).page()
    assert page.index("each layer: model") < page.index("each layer: adam")


def test_a_table_of_100_000_rows_is_bounded_and_says_so() -> None:
    columns = (Column("tensor", "name"), Column("dtype", "word"), Column("raw", "bytes"))
    rows = ((f"model.layers.{number}.experts.weight", "bfloat16", number) for number in range(100_000))
    table = drawn_table(columns, rows, noun="tensor", limit=1_000_000)
    kept = table.json["rows"]
    assert len(kept) + table.left_out == 100_000
    assert kept[3] == ["model.layers.3.experts.weight", 0, 3]
    assert table.json["columns"][1]["words"] == ["bfloat16"]
    assert 990_000 < len(data_json({"t": table.json})) < 1_001_000
    assert table.json["left_out"] == table.left_out
    assert table.left_out_text("the largest", 5_000_000) == (
        f"Listed here: {len(kept):,} of 100,000 tensors, the largest. "
        f"The other {table.left_out:,}, 5.00 MB together, are left out to keep the page small; --json has all."
    )
    assert drawn_table(columns, [], noun="tensor").left_out_text("the largest") == ""


def test_a_page_that_leaves_tensors_out_sums_them_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layers.{number}.w": torch.ones(number) for number in range(1, 101)}
    tensorkeep.save({"model": {**state, "bad": torch.tensor(math.nan)}}, tmp_path / "c")
    monkeypatch.setattr(checkpoint_module, "drawn_table", partial(drawn_table, limit=2000))
    page = read_contents(tmp_path / "c").page()
    rows = data_of(page)["tensors"]["rows"]
    # What is not finite is listed first, then the largest.
    assert [row[0] for row in rows[:2]] == ["model.bad", "model.layers.100.w"]
    listed = f"Listed here: {len(rows)} of 101 tensors, those that are not finite, then the largest."
    places = [page.index(text) for text in (listed, 'data-table="tensors"', "Tensors that are not listed, by module")]
    assert places == sorted(places)


def test_values_of_a_table_are_short_and_json() -> None:
    columns = [Column(kind, kind) for kind in ("number", "number", "number", "number", "histogram")]
    histogram = Histogram(-1.0, 2.0, [0, 1, 100], beyond=3)
    row = (1.23456789, math.inf, math.nan, None, histogram)
    table = drawn_table(columns, [row], noun="row")
    assert json.loads(data_json({"t": table.json}))["t"]["rows"] == [[1.2346, "inf", None, None, [-1, 2, 0, 3, "01z"]]]


def test_curves_that_hide_each_other_take_turns() -> None:
    points = [(step, 4.0 / (step + 1)) for step in range(20)]
    other = [(step, 5.0 / (step + 1)) for step in range(20)]
    curves = [Curve(name, "good", own) for name, own in zip("abcd", (points, other, points, points), strict=True)]
    lines = [
        shape for shape in chart("loss", curves).canvas.shapes if isinstance(shape, Line) and shape.name == "curve"
    ]
    assert [line.dashes for line in lines] == [(7, 14, 0), None, (7, 14, 7), (7, 14, 14)]
    assert "stroke-dasharray:7 14;stroke-dashoffset:-7" in chart("loss", curves).svg


def drawn_chart(*points: tuple[float, float]) -> Any:
    return chart("loss", [Curve("train", "good", [*points])])


def labels_of(found: Chart) -> tuple[list[str], list[str]]:
    """Return the labels of the values and of the steps."""
    texts = [shape for shape in found.canvas.shapes if isinstance(shape, Text)]
    values = [shape.text for shape in texts if shape.anchor == "end"]
    return values, [shape.text for shape in texts if shape.anchor == "middle"]


def curve_of(found: Chart) -> Sequence[Point]:
    [curve] = [shape.points for shape in found.canvas.shapes if isinstance(shape, Line) and shape.name == "curve"]
    return curve


def test_charts_have_round_ticks_leave_out_what_is_not_finite_and_keep_peaks() -> None:
    found = drawn_chart((0, 4.0), (50, math.nan), (100, 1.0))
    assert labels_of(found) == (["1", "2", "3", "4"], ["0", "20", "40", "60", "80", "100"])
    assert len(curve_of(found)) == 2
    assert chart("nothing", [Curve("train", "good", [(0, math.nan)])]) is None
    assert sum(isinstance(shape, Line) and bool(shape.fill) for shape in drawn_chart((5, 2.0)).canvas.shapes) == 1
    long = curve_of(drawn_chart(*((step, 9.0 if step == 54_321 else 1.0) for step in range(100_000))))
    assert len(long) < 1000
    assert min(y for _, y in long) < 30 < 150


def test_neighbouring_ticks_have_different_labels_where_values_hardly_differ() -> None:
    for values, steps, labels in (
        ((2.30101, 2.30108), (0, 10), ["2.30102", "2.30104", "2.30106", "2.30108"]),
        ((100.3, 100.7), (0, 10), ["100.3", "100.4", "100.5", "100.6", "100.7"]),
        ((26412.0, 26412.4), (0, 10), ["26,412", "26,412.1", "26,412.2", "26,412.3", "26,412.4"]),
        ((1.20001e-5, 1.20004e-5), (0, 10), ["1.20001e-5", "1.20002e-5", "1.20003e-5", "1.20004e-5"]),
        ((0.0, 1.0), (2_000_100, 2_000_130), ["0", "0.5", "1"]),
    ):
        found = drawn_chart(*zip(steps, values, strict=True))
        with case(values):
            down, across = labels_of(found)
            assert down == labels
            assert len(set(across)) == len(across) > 1
            # No label is wider than its space.
            assert found.box[0] >= 6 * max(map(len, labels))
            assert max(shape.x + 3 * len(shape.text) for shape in found.canvas.shapes if isinstance(shape, Text)) <= 440
            assert found.data["box"] == [side / 440 for side in found.box]


def test_larger_values_are_darker() -> None:
    for log in (False, True):
        found = heat_map(["a", "b"], ["1", "2"], [[0.1, None], [0.0, 10.0]], lambda i, j, value: f"{value}", log=log)
        assert [cell[3] for cell in found.cells] == ["0.1", "0.0", "10.0"]
        faint, none, dark = (cell[2] for cell in found.cells)
        assert none == 0 < faint < dark == 1, log
