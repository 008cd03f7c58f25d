"""Results of training: verdicts, their order, the plots, and the page of techniques."""

import importlib
import math
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from documents import summarise
from tensorkeep.pages.canvas import Canvas, Text
from tensorkeep_bench.report import plots
from tensorkeep_bench.report.drawing import Axis
from tensorkeep_bench.report.measures import compared_arms
from tensorkeep_bench.report.plots import TradeOff
from tensorkeep_bench.report.sentences import noise_lines
from tensorkeep_bench.results import Results
from tensorkeep_bench.training import cell as cell
from tensorkeep_bench.training.workload import WORKLOAD


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that writes the page of techniques."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("techniques_page")


def test_a_failed_gate_of_training_is_described_and_the_faster_arm_recommended() -> None:
    results = document({"plain": [100.0, 101.0, 99.0], "off": [200.0], "fast": [150.0, 151.0, 149.0]})
    next(one for one in results["cells"] if one["arm"] == "off").update(status="gate", reason="the loss", figures={})
    summary = summarise(results)
    reason = "the technique was not active, or changed what is computed"
    assert summary["arms"]["off"][cell.SPEED]["reason"] == f"{reason}, in 1 of 1 blocks: the loss"
    assert any(one["text"].startswith(f"off: {reason}") for one in summary["warnings"])
    speed = next(one for one in summary["recommendations"] if one["for"] == "speed")
    assert speed["arm"] == "fast"
    assert "1.50x plain" in speed["text"]


def document(speeds: dict[str, list[float]], *others: str) -> dict[str, Any]:
    """Return results with these tokens per second by arm, of which the first is the baseline, and other measures."""
    arms = [{"name": name, "role": "arm" if place else "baseline"} for place, name in enumerate(speeds)]
    cells = [
        {"arm": name, "block": block, "status": "ok", "amount": 100, "figures": {cell.SPEED: value}}
        for name, values in speeds.items()
        for block, value in enumerate(values)
    ]
    measures = [msgspec.to_builtins(one) for one in WORKLOAD.measures if one.name in (cell.SPEED, *others)]
    experiment = {"name": "techniques", "workload": "training"}
    return {"experiment": experiment, "measures": measures, "arms": arms, "cells": cells}


def test_turns_with_the_baseline_are_compared_instead_of_whole_runs() -> None:
    """The machine was twice as slow while the arm was measured; a tenth of the turns was disturbed."""
    results = document({"plain": [100.0] * 3, "fast": [60.0, 61.0, 59.0]})
    for one in results["cells"]:
        if one["arm"] == "fast":
            one["turns"] = {cell.SPEED: [(60.0 + one["block"] / 10, 50.0)] * 9 + [(6.0, 50.0)]}
    entry = summarise(results)["arms"]["fast"][cell.SPEED]
    # The median is that of the baseline's cell, times the ratio of the turns: whole runs would show the opposite.
    assert (entry["verdict"], entry["median"]) == ("helps", pytest.approx(120.2))
    assert entry["gain"] == pytest.approx(1.202, rel=1e-3)
    assert entry["change_percent"] == pytest.approx(20.2, rel=1e-2)
    assert entry["gain_high"] / entry["gain_low"] < 1.02
    # A block without turns is compared with the baseline of the same block.
    results["cells"][-1].pop("turns")
    gain = summarise(results)["arms"]["fast"][cell.SPEED]["gain"]
    assert gain == pytest.approx((1.2 * 1.202 * 0.59) ** (1 / 3), rel=1e-3)


def test_arms_that_took_turns_share_what_they_show_of_the_noise() -> None:
    """Three blocks each: alone, an arm's interval would be twice as wide, and 8% would not be seen among 12 arms."""
    random = Random(1)
    speeds = {"plain": 100.0, "fast": 108.0} | {f"same {number}": 100.0 for number in range(11)}
    results = document({name: [speed] * 3 for name, speed in speeds.items()})
    found = {}
    for kind in ("whole runs", "turns"):
        for one in results["cells"]:
            speed = speeds[one["arm"]] * math.exp(random.gauss(0, 0.015))
            if one["arm"] != "plain":
                turns = {"turns": {cell.SPEED: [(speed, 100.0)]}}
                one.update({"figures": {cell.SPEED: speed}} if kind == "whole runs" else turns)
        found[kind] = {name: each[cell.SPEED] for name, each in summarise(results)["arms"].items()}
    assert [found[kind]["fast"]["verdict"] for kind in ("whole runs", "turns")] == ["undecided", "helps"]
    assert {each["verdict"] for name, each in found["turns"].items() if name.startswith("same")} == {"about the same"}
    assert found["turns"]["fast"]["detectable"] == pytest.approx(1.05)
    assert found["whole runs"]["fast"]["detectable"] > 1.1
    # An arm that took no turns in a block is judged by its own blocks, and says nothing of the others.
    alone = next(one for one in results["cells"] if one["arm"] == "fast")
    alone["turns"] = {}
    found["but one"] = {name: each[cell.SPEED] for name, each in summarise(results)["arms"].items()}
    width = {kind: found[kind]["fast"]["gain_high"] / found[kind]["fast"]["gain_low"] for kind in ("turns", "but one")}
    assert math.log(width["but one"]) > 1.5 * math.log(width["turns"])


def reported(results: dict[str, Any], design: str = "one-at-a-time") -> Results:
    results["experiment"] |= {"baseline": "plain", "design": design}
    return msgspec.convert({**results, "summary": summarise(results)}, Results)


def test_single_changes_are_sorted_by_their_gain_and_a_control_that_ran_once_gives_no_noise_floor() -> None:
    results = document({"plain": [100.0], "slow": [50.0], "off": [1.0], "fast": [150.0]})
    next(one for one in results["cells"] if one["arm"] == "off").update(status="not-run", reason="no", figures={})
    by_gain = ["plain", "fast", "slow", "off"]
    for design, names in {"one-at-a-time": by_gain, "arms": by_gain, "steps": ["plain", "slow", "off", "fast"]}.items():
        assert [arm.name for arm in compared_arms(reported(results, design))] == names, design
    results = document({"plain": [100.0], "plain (again)": [101.0]})
    results["arms"][1]["role"] = "control"
    assert noise_lines(reported(results)) == ["speed: no noise floor, because no A/A control ran in two blocks"]


def trade_offs(results: dict[str, Any], losses: dict[str, float]) -> tuple[Canvas, list[TradeOff], tuple[Axis, Axis]]:
    """Return the figure of trade-offs, drawn with these losses of the arms, and its points and axes of the loss."""
    for one in results["cells"]:
        one["figures"] |= {cell.LOSS: losses[one["arm"]]} if one["figures"] else {}
    found = reported(results)
    speed, loss = found.measure(cell.SPEED), found.measure(cell.LOSS)
    assert speed and loss
    points = plots.trade_off_points(found, speed, loss)
    return plots.trade_offs(found), points, plots.trade_off_axes(points, (0, 400), (400, 0))


def test_trade_offs_omit_arms_that_did_not_run_and_losses_start_above_zero() -> None:
    results = document({"plain": [100.0, 101.0], "fast": [150.0, 151.0], "off": [1.0, 1.0]}, cell.MEMORY, cell.LOSS)
    for one in results["cells"]:
        one["figures"] |= {cell.MEMORY: 1e6}
        if one["arm"] == "off":
            one.update(status="not-run", reason="no", figures={})
    _, points, (across, down) = trade_offs(results, {"plain": 2.0, "fast": 2.01})
    labels = [label for _, label in down.ticks()]
    assert labels and all(label.replace(".", "").isdigit() for label in labels)
    assert down.low > 1.5 and across.low == 0
    assert sorted(point.name for point in points) == ["fast", "plain"]


def test_the_axis_of_nearly_equal_losses_has_plain_numbers_and_does_not_magnify() -> None:
    """Losses of 4.54101 and 4.54102 differ by nothing that matters."""
    results = document({"plain": [100e6, 101e6], "fast": [150e6, 151e6]}, cell.LOSS)
    _, _, (across, down) = trade_offs(results, {"plain": 4.54101, "fast": 4.54102})
    assert [label for _, label in down.ticks()] == ["4.5", "4.55"]
    assert "100,000,000" in [label for _, label in across.ticks()]
    assert down.high / down.low == pytest.approx(1.024, abs=1e-3)


def test_a_loss_far_above_the_others_is_drawn_at_the_edge() -> None:
    results = document({"plain": [100.0] * 2, "fast": [150.0] * 2, "range test": [120.0] * 2}, cell.LOSS)
    canvas, points, (_, down) = trade_offs(results, {"plain": 2.5, "fast": 2.6, "range test": 15.0})
    assert {point.name: (point.y, point.beyond) for point in points} == {
        "plain": (2.5, False),
        "fast": (2.6, False),
        "range test": (2.5 * 1.1, True),
    }
    assert down.high < 2.8
    texts = [shape.text for shape in canvas.shapes if isinstance(shape, Text)]
    assert any("Triangle: a loss above 1.1 times the lowest." in text for text in texts)


def test_the_page_of_techniques_is_up_to_date_and_shows_effects_and_reasons(page: Any) -> None:
    assert page.PAGE.read_text() == page.page()
    results = document({"plain": [100.0, 101.0, 99.0, 100.0], "on": [150.0, 151.0, 149.0, 150.0], "off": [1.0]})
    results["arms"][1]["settings"] = {"techniques.compile.mode": "default"}
    results["arms"][2]["settings"] = {"techniques.tf32": "on"}
    results["cells"][-1] |= {"status": "not-run", "reason": "tf32 needs a CUDA device", "figures": {}}
    found = reported(results)
    table = page.measured_table(found)
    assert "| [compile](#compile): mode default | 1.50x (1.49 to 1.51) | faster | - | - | - | - |" in table
    assert "| [tf32](#tf32) | - | not run here: tf32 needs a CUDA device | - | - | - | - |" in table
    speed = found.statistics("on", "tokens_per_second")
    shown = {(1.02, 1.08): "a little faster", (0.93, 0.99): "a little slower", (0.98, 1.04): "no difference within 4%"}
    for (low, high), words in shown.items():
        same = {"verdict": "about the same", "gain_low": low, "gain_high": high}
        assert page.verdict(msgspec.structs.replace(speed, **same)) == words


def test_the_page_of_techniques_shows_memory_beside_its_prediction_and_the_loss_of_algorithmic_ones(page: Any) -> None:
    speeds = {"plain": [100.0, 100.1, 99.9], "on": [101.0, 101.2, 100.8], "ddp": [80.0, 150.0, 110.0]}
    results = document(speeds, cell.MEMORY, cell.PREDICTED, cell.LOSS)
    results["arms"][1]["settings"] = {"techniques.activation-function.activation": "relu2"}
    results["arms"][2]["settings"] = {"techniques.ddp": "on", "ranks": 2}
    for one in results["cells"]:
        halved = 0.5 if one["arm"] == "ddp" else 1.0
        one["figures"] |= {cell.MEMORY: 4e6 * halved, cell.LOSS: 2.0 if one["arm"] == "on" else 2.2}
        if one["arm"] != "ddp":
            one["figures"] |= {cell.PREDICTED: 3e6}
    table = page.measured_table(reported(results))
    relu2 = "| no difference within 1.2% | 4.00 MB (1.00x) | 3.00 MB (1.00x) | 1.10x (1.10 to 1.10) | - |"
    assert relu2 in table
    ddp = "| [ddp](#ddp): 2 ranks | 1.10x (0.503 to 2.39) | undecided within a factor of 2.39 | 2.00 MB (0.500x) |"
    assert ddp in table


def test_the_table_of_a_roadmap_has_every_experiment_in_both_numberings(page: Any) -> None:
    tracked = dict.fromkeys(row[0] for row in page._ROADMAP if row[0])
    assert list(tracked) == [f"{number:02}" for number in range(1, 13)]
    assert sorted(row[1] for row in page._ROADMAP if row[1]) == [f"{number:02}" for number in range(1, 11)]
    text = (page.PAGE).read_text()
    for row in page._ROADMAP:
        assert f"| {row[0] or '-'} | {row[1] or '-'} | {row[2]} | " in text
