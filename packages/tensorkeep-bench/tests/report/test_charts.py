"""What the page draws itself: bars of amounts, the map of gains, its scale of colour, and loss curves."""

from pathlib import Path
from typing import Any

import msgspec

from documents import summarise
from report import documents
from report.documents import read
from tensorkeep.pages.canvas import PALETTE
from tensorkeep_bench.report.drawing import EVEN, GAIN_LEGEND, gain_colour
from tensorkeep_bench.report.html import amount_bars, bars_note, loss_charts, losses_note, report_page
from tensorkeep_bench.report.tables import gain_map
from tensorkeep_bench.results import Results


def test_the_scale_of_gains_has_a_colour_and_a_word_for_each_step_and_losses_are_as_strong_as_gains() -> None:
    names = [name for name, _ in GAIN_LEGEND]
    assert [gain_colour(gain) for gain in (0.25, 0.5, 0.8, 0.81, 1.0, 1.24, 1.25, 2.0, 4.0)] == names
    assert gain_colour(None) == EVEN
    assert set(names) <= PALETTE.keys()
    for gain in (1.006, 1.2, 1.25, 1.9, 2.0, 3.99, 4.0, 1000.0):
        better, worse = gain_colour(gain), gain_colour(1 / gain)
        assert (better[:-1], worse[:-1], better[-1]) == ("better-", "worse-", worse[-1]), gain


def test_bars_show_medians_and_verdicts_the_best_first(tmp_path: Path) -> None:
    found = read(documents.document(documents.PEERS, noise=0.01), tmp_path)
    save, load, size = amount_bars(found)
    assert [chart.title for chart in (save, load, size)] == ["Durable save (s)", "Cold load (s)", "Size (GB)"]
    assert [bar.value for bar in save.bars] == sorted(bar.value for bar in save.bars)
    bars = {bar.label: bar for bar in save.bars}
    assert "pytorch (again)" not in bars
    assert [bars[name].tone for name in ("pytorch", "tensorkeep", "zipnn", "dcp-1")] == ["base", "good", "bad", ""]
    assert bars["tensorkeep"].text == f"{bars['tensorkeep'].value:.3f} s"
    assert all(bar.low <= bar.value <= bar.high <= save.full for bar in save.bars)
    # Of many arms, those are the best and the baseline.
    found = read(documents.many(60, runs=1), tmp_path)
    save = amount_bars(found)[0]
    assert len(save.bars) == 14
    assert "pytorch" in [bar.label for bar in save.bars]
    assert bars_note(found).endswith("The baseline and the best 13 of 60 arms.")


def test_the_map_of_gains_names_arms_and_colours_only_what_is_shown(tmp_path: Path) -> None:
    document = documents.document(missing={"t5x_full": ("timeout", "took too long")}, noise=0.01)
    arms = document["summary"]["arms"]
    arms["concurrency_128"]["save"]["verdict"] = "within noise"
    arms["chunks_1mb"]["save"]["gain"] = 1.98
    arms["compression_gzip"]["save"].update(gain=0.42, verdict="hurts")
    table = gain_map(read(document, tmp_path))
    assert table.title == "How many times better than baseline: OpenLLaMA-3B, first 100 parameters, float16"
    rows = {row[0].text: row for row in table.rows}
    assert rows.keys() == {"concurrency_128", "chunks_1mb", "compression_gzip", "concurrency_chunks"}
    assert (rows["chunks_1mb"][1].text, rows["chunks_1mb"][1].tone) == ("1.98x", "field better-2")
    assert (rows["compression_gzip"][1].tone, rows["concurrency_128"][1].tone) == ("field worse-3", "field even")
    assert "95%" in rows["concurrency_128"][1].about
    assert table.note.endswith("1 arm without figures is not shown.")


def training(curves: dict[str, list[list[tuple[int, float]]]], **figures: float) -> Results:
    """Return results of training with the loss curves of each block of each arm, the first of which is the baseline."""
    arms = [{"name": name, "role": "arm" if place else "baseline"} for place, name in enumerate(curves)]
    cells = [
        {"arm": name, "block": block, "status": "ok", "amount": 1, "losses": losses}
        | {"figures": {"loss": losses[-1][1], **figures}}
        for name, blocks in curves.items()
        for block, losses in enumerate(blocks)
    ]
    document: dict[str, Any] = {"arms": arms, "cells": cells, "subject": {"description": "tiny: 10 parameters"}}
    document["experiment"] = {"name": "x", "workload": "training", "baseline": next(iter(curves))}
    document["measures"] = [{"name": "loss", "label": "validation loss", "unit": "nats", "primary": True}]
    return msgspec.convert({**document, "summary": summarise(document)}, Results)


def test_loss_curves_are_means_of_the_blocks_by_step_and_by_time() -> None:
    plain, fast = [[(2, 4.0), (4, 3.0)], [(2, 5.0), (4, 2.0)]], [[(2, 3.0), (4, 1.0)]] * 2
    found = training({"plain": plain, "fast": fast}, step=0.5)
    by_step, by_time = loss_charts(found)
    assert by_step.title == "Training loss (nats) by step: tiny"
    means = [("plain", [(2, 4.5), (4, 2.5)]), ("fast", [(2, 3.0), (4, 1.0)])]
    assert [(curve.name, curve.points) for curve in by_step.curves] == means
    assert (by_time.curves[0].points, by_time.data["by"]) == ([(1.0, 4.5), (2.0, 2.5)], "second")
    page = report_page(found, [])
    assert page.count('class="chart"') == 2
    assert "Training loss (nats) by second: tiny" in page


def test_of_many_loss_curves_those_that_differ_most_are_drawn_and_only_the_baseline_has_its_colour() -> None:
    found = training({f"arm {i}": [[(1, 5.0), (2, 4.0 - i / 10)]] * 2 for i in range(8)})
    (drawn,) = loss_charts(found)
    assert [curve.name for curve in drawn.curves] == ["arm 0", "arm 7", "arm 6", "arm 5", "arm 4"]
    assert "The baseline and the 4 of 7 arms" in losses_note(found)
    document = msgspec.to_builtins(training({"plain": [[(1, 5.0)]], "fast": [[(1, 4.0)]]}))
    # Without the losses of the baseline, no curve has its colour; without any, there are no curves.
    for status, wanted in (("ok", [["base", "first"]]), ("planned", [["first"]])):
        document["cells"][0]["status"] = status
        charts = loss_charts(msgspec.convert(document, Results))
        assert [[curve.colour for curve in each.curves] for each in charts] == wanted
    document["cells"][1]["losses"] = []
    assert loss_charts(msgspec.convert(document, Results)) == []
