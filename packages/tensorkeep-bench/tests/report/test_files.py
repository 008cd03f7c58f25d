"""Writing a report, from Python and from the command line."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from report import documents
from report.documents import placed, read
from tensorkeep import errors
from tensorkeep.cli.output import Output
from tensorkeep.testing.cases import case
from tensorkeep_bench.cli import report as command
from tensorkeep_bench.report import html as module
from tensorkeep_bench.report.html import report_page, write_report
from tensorkeep_bench.report.plots import draw_plots
from tiers import exhaustive


def of_two_measures(**arms: tuple[float, float, float]) -> dict[str, Any]:
    """Return a document with one panel a figure for the seconds of a save, and one for the size."""
    figure_names = {"three-way": "3way_performance_comparison", "impact": "not_drawn"}
    arms = {"pytorch": (6.7, 3.3, 1.0), **arms}
    document = documents.document(arms, name="three-way", runs=2, figure_names=figure_names)
    return {**document, "measures": [each for each in document["measures"] if each["name"] in ("save", "stored")]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return documents.write(of_two_measures(t5x=(62.0, 26.0, 1.32)), tmp_path / "run")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A run without measures, and so without plots, which are slow."""
    return documents.write({**documents.document(runs=1), "measures": []}, tmp_path / "plain")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_report_is_written_beside_the_results(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.report(run)
    plots = [f"plots/{name}.{kind}" for name in ("gains", "pareto", "three-way") for kind in ("png", "svg")]
    known = "3way_performance_comparison.png"
    assert names(run) == [known, *plots, "report.html", "results.json", "samples.csv", "summary.csv"]
    assert (run / "plots" / "gains.png").read_bytes().startswith(b"\x89PNG")
    assert (run / known).read_bytes() == (run / "plots" / "three-way.png").read_bytes()
    printed = capsys.readouterr().out
    assert "method               save (ms)" in printed
    assert "Durable save: no arm is shown to be better than pytorch" in printed
    assert f"wrote {run / 'report.html'}" in printed
    # The page requests nothing, and has the experiment as JSON and the command of every cell.
    page = (run / "report.html").read_text()
    assert [fetching for fetching in ("src=", "<link", "@import", "url(http", "fetch(") if fetching in page] == []
    assert "default-src 'none'" in page and "&#34;runs&#34;: 2" in page
    for cell in json.loads((run / "results.json").read_text())["cells"]:
        if cell["arm"] != "pytorch (again)":
            assert f"tensorkeep bench cell --arm {cell['arm']} --block {cell['block']}" in page
    # A new run removes it, and nothing else.
    (run / "plots" / "own.png").touch()
    command.remove_report(run)
    assert names(run) == ["plots/own.png", "results.json"]
    (run / "plots" / "own.png").unlink()
    command.remove_report(run)
    assert sorted(run.iterdir()) == [run / "results.json"]
    (run / "report.html").write_text("mine")
    with pytest.raises(errors.DestinationExistsError):
        command.remove_report(run)


def test_the_command_of_an_arm_follows_its_recommendation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = documents.document({"torch": (6.0, 3.0, 1.0), "fast": (0.7, 0.4, 1.0)}, noise=0.001)
    for arm in content["arms"]:
        arm["use"] = f"use {arm['name']}"
    content["summary"] = documents.summarise(content)
    command.print_tables(read(content, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("Try first, in this order")
    assert lines[first + 1].startswith("  1. fast: durable save 8.58x")
    assert lines[first + 2] == "      use fast"
    saving = next(place for place, line in enumerate(lines) if "saving: fast" in line)
    assert lines[saving + 1] == "      use fast"
    page = report_page(read(content, tmp_path), [])
    assert page.count('<pre tabindex="0">use fast</pre>') == 4


def test_a_further_name_of_a_figure_cannot_leave_the_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "a.png", "", ".hidden"):
        content = documents.document(runs=1)
        placed("experiment", "figure_names", value={"impact": name})(content)
        with case(name), pytest.raises(errors.CorruptCheckpointError):
            read(content, tmp_path)


def test_with_out_only_requested_files_are_written(plain: Path, tmp_path: Path) -> None:
    command.report(plain / "results.json", out=tmp_path / "new" / "x.html", output=Output(quiet=True))
    assert names(tmp_path / "new") == ["x.html"]
    assert names(plain) == ["results.json"]
    command.report(plain, out=tmp_path / "new" / "x.html", csv=tmp_path / "c", output=Output(quiet=True))
    assert names(tmp_path / "c") == ["samples.csv", "summary.csv"]


def test_json_is_one_document_and_tables_only_print(run: Path, plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.report(plain, output=Output(json=True))
    document = json.loads(capsys.readouterr().out)
    assert document["written"][0] == str(plain / "report.html")
    assert names(plain) == ["report.html", "results.json", "samples.csv", "summary.csv"]
    command.report(run, tables_only=True)
    assert "t5x" in capsys.readouterr().out
    command.report(run, tables_only=True, output=Output(json=True))
    document = json.loads(capsys.readouterr().out)
    assert (document["written"], document["summary"]["arms"]["t5x"]["save"]["verdict"]) == ([], "hurts")
    assert document["headlines"][0].startswith("Durable save: no arm")
    assert names(run) == ["results.json"]


def test_only_a_report_is_replaced_and_a_failed_write_leaves_it(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = plain / "report.html"
    write_report(plain, page)
    first = page.read_bytes()
    page.write_bytes(first + b"old")
    write_report(plain, page)
    assert page.read_bytes() == first
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched, pytest.raises(errors.StoreError, match="No space left"):
        patched.setattr(os, "fsync", full)
        write_report(plain, page)
    assert page.read_bytes() == first
    assert names(plain) == ["report.html", "results.json"]
    page.write_text("<html>my own page")
    with pytest.raises(errors.DestinationExistsError, match="is not a report"):
        write_report(plain, page)
    assert page.read_text() == "<html>my own page"
    with pytest.raises(errors.UsageError, match="page of HTML"):
        write_report(plain, plain / "results.json")


def test_missing_packages_are_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, name in (("PIL", "Pillow"), ("jinja2", "jinja2")):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(errors.MissingExtraError, match=name) as caught:
                module.write_report(run, run / "report.html", plots=run / "plots")
            assert caught.value.remedy == "in a clone of Tensorkeep: pip install ./packages/tensorkeep-bench"


def test_claims_are_printed_one_below_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.print_tables(documents.read(documents.with_claims(), tmp_path))
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("  5  gzip alone costs 1.8%: confounded")
    reason = "    reason     the arm without a compressor was compressed with Blosc"
    assert lines[place + 1 : place + 4] == ["    published  +1.8%", "    measured   +41%", reason]
    # Other figures of the same comparison were measured once.
    document = documents.with_claims()
    document["summary"]["claims"].append({**document["summary"]["claims"][-1], "id": "5.2"})
    command.print_tables(documents.read(document, tmp_path))
    assert capsys.readouterr().out.splitlines()[place + 4 :][2] == "    measured   as above"


def test_texts_of_a_file_cannot_drive_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = documents.with_claims()
    escape = "\x1b]0;owned\x07\n"
    document["experiment"]["title"] = document["subject"]["description"] = escape
    document["measures"][0]["label"] = escape
    for claim in document["summary"]["claims"]:
        claim["reason"] = claim["claim"] = escape
    document["summary"]["warnings"] = [{"text": escape, "remedy": escape}]
    document["summary"]["recommendations"] = [{"for": escape, "text": escape}]
    document["arms"][1]["name"] += escape
    for cell in document["cells"]:
        if cell["arm"] == "tensorstore":
            cell["arm"] += escape
    command.report(documents.write(document, tmp_path), tables_only=True)
    printed = capsys.readouterr().out
    assert "owned" in printed
    assert not {"\x1b", "\x07"} & set(printed)


def _step(change: str, measure: str) -> dict[str, str]:
    return {"change": change, "arm": "t5x", "measure": measure}


@pytest.mark.parametrize(
    "changes",
    [
        [lambda document: [document.pop(key) for key in ("summary", "subject", "environment")]],
        *exhaustive([placed("summary", value={}), placed("cells", value=[]), placed("complete", value=False)]),
        [placed("measures", value=[])],
        *exhaustive([placed("experiment", "baseline", value=None), placed("arms", 0, "role", value="arm")]),
        [
            placed("summary", "noise", value={"save": None}),
            placed("summary", "recommendations", value=[{"for": "size", "text": "x"}]),
            placed("summary", "steps", value=[_step("x", "save"), _step("y", "unknown")]),
            placed("summary", "effects", value=[{"factors": ["x"], "measure": "save"}]),
            placed("summary", "interactions", value=[{"changes": ["x"], "arm": "t5x", "measure": "save"}]),
            placed("summary", "arms", "t5x", "save", value={"n": 2, "gain": 0.0, "verdict": "hurts"}),
            placed("environment", value={"memory": {"total_bytes": None}, "devices": [{"name": "x"}]}),
            placed("experiment", "something_new", value=[1]),
        ],
    ],
)
def test_a_report_of_incomplete_results(changes: list[Callable[[dict[str, Any]], None]], tmp_path: Path) -> None:
    document = of_two_measures(t5x=(62.0, 26.0, 1.32))
    for change in changes:
        change(document)
    found = read(document, tmp_path)
    page = report_page(found, draw_plots(found))
    assert "The three-way comparison" in page
    command.print_tables(found)
