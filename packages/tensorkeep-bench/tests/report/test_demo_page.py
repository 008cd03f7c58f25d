"""The page of the demo: its bars, tables, curves and sentences."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from report.demo_results import NAME, demo_results
from tensorkeep.errors import DestinationExistsError
from tensorkeep_bench.demo.training import ComparedRuns
from tensorkeep_bench.report.demo import demo_page, facts, speed_bars, write_demo_page


def test_bars_of_a_smaller_run_are_scaled_marked_and_cut_off() -> None:
    results = demo_results()
    save, _, stored = speed_bars(results.rounds, results.t5x, results.state_bytes)
    labels = ["torch", "safetensors", "tensorkeep", "tensorkeep-lossless", "tensorstore", "t5x"]
    assert [bar.label for bar in save.bars] == labels
    assert (save.bars[-1].value, save.bars[-1].text, save.full) == (40.0, "40.0 s *", 5.0)
    assert stored.bars[-1].text == "833 MB *"
    assert [bar.tone for bar in save.bars] == ["", "", "good", "good", "", ""]


def test_page_shows_all_parts_and_escapes_names() -> None:
    page = demo_page(demo_results())
    text = re.sub(r"\s+", " ", page)
    assert NAME not in page
    assert "&lt;b&gt;layers.0&lt;/b&gt;.weight" in page
    for words in (
        *("40.0 s *", "one run on 100 MB, scaled", "loads 3e+36 instead of 0.0100", "raises: no such tensor"),
        *("broken: failed finding central directory", "500 MB of 1.00 GB", "4 of 4 losses are the same", "pytorch"),
    ):
        assert words in text, words
    one, other = re.findall(r'<path class="curve" d="(M[^"]+)"', page)
    assert one == other and one.count("L") == 3


def test_five_facts_state_what_was_measured_and_a_promise_that_was_not_kept_is_not_ok() -> None:
    results = demo_results()
    lines = facts(results)
    assert len(lines) == 5
    assert "torch loaded 3e+36 for 0.0100, without a word" in lines[2]
    assert "safetensors loaded" not in lines[2]
    assert lines[3].endswith("tensorkeep was whole, bit for bit, and the checkpoint of torch.save was broken.")
    assert results.ok
    torch_kill, own_kill = results.kills
    for broken in (
        {"training": ComparedRuns([1.0, 2.0], [1.0], 1, 1)},
        {"kills": [torch_kill, replace(own_kill, error="broken")]},
        {"intact": replace(results.intact, ok=False)},
        {"damage": replace(results.damage, report=results.intact)},
    ):
        assert not replace(results, **broken).ok, broken


def test_page_replaces_only_a_report(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_demo_page(demo_results(), page)
    write_demo_page(demo_results(), page)
    page.write_text("mine")
    with pytest.raises(DestinationExistsError):
        write_demo_page(demo_results(), page)
    assert page.read_text() == "mine"
