"""Writing a report, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from report import documents
from tensorkeep import errors
from tensorkeep.cli import report as command
from tensorkeep.cli.output import Output
from tensorkeep.report import files as module
from tensorkeep.report.files import write_report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    document = documents.document(documents.THREE_WAY, name="three-way", runs=2)
    return documents.write(document, tmp_path / "run")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A run without measures, so without plots, which take time."""
    return documents.write({**documents.document(runs=1), "measures": []}, tmp_path / "plain")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_everything_beside_the_results(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.report(run) == 0
    plots = [f"plots/{name}.{kind}" for name in ("gains", "pareto", "three-way") for kind in ("png", "svg")]
    assert names(run) == [*plots, "report.html", "results.json", "samples.csv", "summary.csv"]
    printed = capsys.readouterr().out
    assert "method               save (ms)" in printed
    assert "Durable save: no arm is shown to be better than pytorch" in printed
    assert f"wrote {run / 'report.html'}" in printed


def test_only_what_is_asked_for(plain: Path, tmp_path: Path) -> None:
    command.report(plain / "results.json", out=tmp_path / "new" / "x.html", output=Output(quiet=True))
    assert names(tmp_path / "new") == ["x.html"]
    assert names(plain) == ["results.json"]
    command.report(plain, out=tmp_path / "new" / "x.html", csv=tmp_path / "c", output=Output(quiet=True))
    assert names(tmp_path / "c") == ["samples.csv", "summary.csv"]


def test_tables_only(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.report(run, tables_only=True)
    assert names(run) == ["results.json"]
    assert "tensorstore" in capsys.readouterr().out


def test_json_is_one_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.report(run, output=Output(json=True))
    document = json.loads(capsys.readouterr().out)
    assert document["written"][0] == str(run / "report.html")
    assert document["summary"]["arms"]["t5x"]["save"]["verdict"] == "hurts"
    assert document["headlines"][0].startswith("Durable save: no arm")


def test_delivering_writes_beside_the_page(plain: Path) -> None:
    command.deliver(plain / "results.json", plain / "report.html", Output(quiet=True))
    assert names(plain) == ["report.html", "results.json", "samples.csv", "summary.csv"]


def test_a_report_is_replaced_and_nothing_else(plain: Path) -> None:
    page = plain / "report.html"
    write_report(plain, page)
    first = page.read_bytes()
    page.write_bytes(first + b"old")
    write_report(plain, page)
    assert page.read_bytes() == first
    page.write_text("<html>my own page")
    with pytest.raises(errors.DestinationExistsError, match="is not a report"):
        write_report(plain, page)
    assert page.read_text() == "<html>my own page"
    with pytest.raises(errors.UsageError, match="page of HTML"):
        write_report(plain, plain / "results.json")


def test_a_failed_write_leaves_the_old_report(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = plain / "report.html"
    write_report(plain, page)
    first = page.read_bytes()

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(errors.StoreError, match="No space left"):
        write_report(plain, page)
    monkeypatch.undo()
    assert page.read_bytes() == first
    assert names(plain) == ["report.html", "results.json"]


def test_missing_packages_are_named(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, package, None)
            with pytest.raises(errors.MissingExtraError, match=package) as caught:
                module.write_report(plain, plain / "report.html")
            assert caught.value.remedy == "pip install 'tensorkeep[bench]'"


def test_the_page_asks_for_nothing_and_holds_every_command(run: Path) -> None:
    write_report(run, run / "report.html")
    page = (run / "report.html").read_text()
    for fetching in ("src=", "<link", "@import", "url(http", "fetch("):
        assert fetching not in page
    assert "default-src 'none'" in page
    assert "&#34;runs&#34;: 2" in page  # the experiment as JSON
    for cell in json.loads((run / "results.json").read_text())["cells"]:
        if cell["arm"] != "pytorch (again)":
            assert f"tensorkeep bench cell --arm {cell['arm']} --block {cell['block']}" in page


def test_claims_are_printed_one_below_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.report(documents.write(documents.with_claims(), tmp_path), tables_only=True)
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("  5  gzip alone costs 1.8%: confounded")
    assert lines[place + 1 : place + 4] == [
        "    theirs  +1.8%",
        "    ours    +41%",
        "    why     the arm without a compressor was compressed with Blosc",
    ]


def test_what_a_file_made_up_cannot_drive_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "\x1b" not in printed
    assert "\x07" not in printed
