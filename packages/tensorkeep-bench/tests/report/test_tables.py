"""The tables of the report: the published comparison's layout, verdicts, noise, designs, CSV, arms that did not run."""

import csv
import io
import statistics
from pathlib import Path
from typing import Any

import pytest

from documents import GIB
from report import documents
from report.documents import read
from tensorkeep.testing.cases import case
from tensorkeep_bench import wording
from tensorkeep_bench.report import tables
from tensorkeep_bench.report.html import samples_csv, summary_csv
from tensorkeep_bench.report.sentences import completeness, headlines, noise_lines
from tensorkeep_bench.results import printable


def exact(document: dict[str, Any], figures: dict[str, list[tuple[float, float, float]]]) -> dict[str, Any]:
    """Give arms the figures of a published table: (save s, load s, size in bytes) of each block."""
    for cell in document["cells"]:
        if cell["arm"] in figures:
            save, load, size = figures[cell["arm"]][cell["block"]]
            cell["figures"] = {"save": save, "load_cold": load, "stored": size}
    return document


def test_the_table_of_the_isolated_suite_exactly(tmp_path: Path) -> None:
    document = documents.document({"baseline": (1, 1, 1), "chunks_1mb": (1, 1, 1)}, runs=3, control=False)
    figures = {
        "baseline": [(131.78, 11.78, 2.57 * GIB), (134.23, 12.34, 2.58 * GIB), (136.68, 12.9, 2.59 * GIB)],
        "chunks_1mb": [(66.66, 14.89, 2.58 * GIB), (67.89, 15.67, 2.59 * GIB), (69.12, 16.45, 2.6 * GIB)],
    }
    assert tables.isolated_text(read(exact(document, figures), tmp_path)).splitlines() == [
        "test                      save (s)           cold load (s)      size (GiB)",
        "--------------------------------------------------------------------------------",
        "baseline                   134.23 ± 2.45      12.34 ± 0.56       2.58 ± 0.01",
        "chunks_1mb                  67.89 ± 1.23      15.67 ± 0.78       2.59 ± 0.01",
    ]


def test_the_six_way_table_and_its_improvements(tmp_path: Path) -> None:
    document = documents.document({"tensorstore": (1, 1, 1), "t5x": (1, 1, 1), "ts+chunks": (1, 1, 1)}, runs=1)
    figures = {"tensorstore": [(143.118, 17.53, 2.58 * GIB)], "t5x": [(66.45, 29.355, 2.59 * GIB)]}
    for cell in document["cells"]:
        if cell["arm"] == "ts+chunks":
            cell.update(status="timeout", reason="took too long", figures={})
    exact(document, figures)
    found = document["summary"]["arms"]
    found["t5x"]["save"]["change_percent"] = 53.57
    found["t5x"]["load_cold"]["change_percent"] = -67.45
    found["ts+chunks"] = {"save": {"n": 0}}
    assert tables.six_way_text(read(document, tmp_path)).splitlines() == [
        "method               save (ms)    cold load (ms) size (GiB)",
        "------------------------------------------------------------",
        "tensorstore          143118.0     17530.0        2.58",
        "t5x                  66450.0      29355.0        2.59",
        "ts+chunks            timed out    timed out      timed out",
        "",
        "method               save improvement    cold load improvement",
        "----------------------------------------------------------",
        "t5x                  +53.6%              -67.5%",
        "ts+chunks            -                   -",
    ]


def test_small_states_get_more_decimals_and_arms_on_a_smaller_state_are_compared_per_byte(tmp_path: Path) -> None:
    document = exact(documents.document({"a": (1, 1, 1)}, runs=1, control=False), {"a": [(0.0123, 0.004, 3e6)]})
    assert "  0.0123 " in tables.isolated_text(read(document, tmp_path))
    document = documents.document({"a": (10, 1, 1), "b": (10, 1, 1)}, noise=0.0, runs=2, slow=("b",), control=False)
    lines = tables.isolated_text(read(document, tmp_path)).splitlines()
    assert "save (s per GB of state)" in lines[0]
    assert "size (stored bytes per raw byte)" in lines[0]
    seconds = 10 / documents.AMOUNT * 1e9
    assert [line.split()[1] for line in lines[2:]] == [f"{seconds:.2f}"] * 2


def test_one_run_has_no_deviation_and_no_summary_no_verdict(tmp_path: Path) -> None:
    document = documents.document({"a": (10, 1, 1), "b": (20, 1, 1)}, runs=1, noise=0.0, control=False)
    found = read({**document, "summary": {}}, tmp_path)
    assert tables.isolated_text(found).splitlines()[2:] == [
        "a                           10.00              1.00              2.73",
        "b                           20.00              1.00              2.73",
    ]
    rows = tables.verdict_table(found, found.primary()[0]).texts()
    assert [(row[0], row[1], row[3]) for row in rows] == [("a", "no verdict", "10.00"), ("b", "no verdict", "20.00")]
    assert headlines(found)[0] == "Durable save: no arm is shown to be better than a."


def test_verdicts_gains_and_reasons(tmp_path: Path) -> None:
    document = documents.document(missing={"t5x_full": ("memory", "killed for memory")}, noise=0.01)
    found = read(document, tmp_path)
    cells = {row[0].text: row for row in tables.verdict_table(found, found.primary()[0]).rows}
    rows = {name: [cell.text for cell in row] for name, row in cells.items()}
    assert (next(iter(rows)), list(rows)[-1]) == ("baseline", "baseline (again)")
    assert [rows[name][1] for name in ("baseline", "chunks_1mb", "compression_gzip")] == ["baseline", "helps", "hurts"]
    assert rows["t5x_full"][1:3] == ["out of memory", "-"]
    low, _, high = rows["chunks_1mb"][5].split()
    assert float(low) < float(rows["chunks_1mb"][4].rstrip("x")) < float(high)
    summary = document["summary"]["arms"]["chunks_1mb"]["save"]
    assert [cell.order for cell in cells["chunks_1mb"][2:4]] == pytest.approx([summary["median"], summary["mean"]])
    assert tables.not_run_table(found).texts() == [("t5x_full", "out of memory", "5 of 5", "killed for memory")]


def test_an_arm_that_ran_in_part_has_a_reason_among_those_that_did_not_run(tmp_path: Path) -> None:
    document = documents.document(documents.THREE_WAY, runs=3)
    for cell in document["cells"]:
        if cell["arm"] == "t5x" and cell["block"] > 0:
            cell.update(status="planned", figures={})
    expected = [("t5x", "not reached", "2 of 3", "not reached: 2 of 3 runs")]
    assert tables.not_run_table(read(document, tmp_path)).texts() == expected


def test_the_headline_names_the_best_arm_that_helps_and_an_interrupted_run_is_reported(tmp_path: Path) -> None:
    document = documents.document(documents.PEERS)
    arms = document["summary"]["arms"]
    arms["orbax"]["save"].update(verdict="within noise", gain=99.0)
    helping = {name: arm["save"]["gain"] for name, arm in arms.items() if arm["save"]["verdict"] == "helps"}
    best, gain = max(helping.items(), key=lambda item: item[1])
    line = headlines(read(document, tmp_path))[0]
    assert line.startswith(f"Durable save: {best} is {wording.gain(gain)} faster than pytorch (95% ")
    for one in arms.values():
        one["save"]["verdict"] = "within noise"
    none = "Durable save: no arm is shown to be better than pytorch; of 11: 11 within noise."
    assert headlines(read(document, tmp_path))[0] == none
    document.update(complete=False, finished=None)
    document["cells"][-1].update(status="planned", figures={})
    cells = len(document["cells"])
    assert completeness(read(document, tmp_path)) == f"This run is not complete: 1 of {cells} cells were not reached."
    waiting = f"1 of {cells} cells were not reached"
    assert headlines(read(document, tmp_path))[0] == f"Durable save: not decided, {waiting}; of 11: 11 within noise."


def test_noise_and_gains_beyond_it_are_reported(tmp_path: Path) -> None:
    document = documents.document(documents.THREE_WAY, runs=2, control=False)
    assert noise_lines(read(document, tmp_path))[0] == "durable save: no noise floor, because no A/A control ran"
    document = documents.document(documents.THREE_WAY, runs=2)
    summary = document["summary"]
    saves = [summary["arms"][name]["save"] for name in ("tensorstore", "t5x")]

    def reported(low: float, high: float) -> tuple[str, str]:
        """Return the line of noise and the headline of a save whose A/A control has this interval."""
        summary["noise"]["save"] = {"low": low, "high": high, "floor": max(1 / low, high), "n": 2}
        for each in saves:
            each.update(verdict="within noise", gain=1.2, gain_low=low, gain_high=high)
        found = read(document, tmp_path)
        return noise_lines(found)[0], headlines(found)[0]

    none = "urable save: after 2 blocks no verdict is possible: the baseline against itself spans"
    wide, headline = reported(2.2e-4, 2.7e4)
    assert wide == f"d{none} <0.01 to >100 (95%)"
    assert headline == f"D{none} <0.01 to >100 (95%); of 2: 2 within noise."
    assert reported(1 / 10.5, 3.0)[0] == f"d{none} 0.0952 to 3.00 (95%)"
    below = "durable save: differences below {} are noise; the baseline against itself: {} (95%)"
    line, headline = reported(1 / 9.5, 3.0)
    assert line == below.format("a factor of 9.50", "0.105 to 3.00")
    assert headline.startswith("Durable save: no arm is shown to be better than pytorch")
    assert reported(0.97, 1.04)[0] == below.format("4%", "0.970 to 1.04")
    # A gain beyond large noise.
    assert reported(1 / 12, 12.0)[0].startswith(f"d{none}")
    saves[1].update(verdict="helps", gain=50.0, gain_low=30.0, gain_high=70.0)
    found = read(document, tmp_path)
    best = "Durable save: t5x is 50.0x faster than pytorch (95% 30.0 to 70.0); of 2: 1 better"
    assert headlines(found)[0].startswith(best)
    assert noise_lines(found)[0] == below.format("a factor of 12.0", "0.0833 to 12.0")


def test_tables_of_designs(tmp_path: Path) -> None:
    steps = tables.design_tables(read(documents.steps(), tmp_path / "a"))["steps"]
    assert [sheet.title for sheet in steps] == ["Steps: durable save", "Steps: cold load"]
    last = dict(zip((heading.lstrip(">=") for heading in steps[0].headings), steps[0].texts()[-1], strict=True))
    assert (last["change"], last["alone"]) == ("lossless", "-")
    assert last["notes"] == "needs the format, so it cannot be added alone"
    factorial = read(documents.factorial(), tmp_path / "b")
    found = tables.design_tables(factorial)
    effects = {("chunk", "4.10x", "3.69 to 4.51"), ("concurrency x compressor", "-", "-")}
    assert effects <= set(found["effects"][0].texts())
    assert tables.aliases_lines(factorial) == ["chunk = concurrency x compressor"]
    interaction = ("chunk + concurrency", "6.70x", "4.90x", "1.37x", "1.20 to 1.50")
    assert found["interactions"][0].texts() == [interaction]
    claims = tables.claims_table(read(documents.with_claims(), tmp_path / "c"))
    assert claims.texts()[0][:5] == ("2", "reproduced", "T5X saves 54% faster than basic TensorStore", "-54%", "-49%")
    assert claims.texts()[1][5] == "the arm without a compressor was compressed with Blosc"
    assert tables.claims_table(factorial) is None


def test_a_claim_with_figures_that_a_small_state_cannot_decide_is_not_called_not_run(tmp_path: Path) -> None:
    document = documents.with_claims()
    one, other = document["summary"]["claims"]
    short = "pytorch is too short to time with 43.8 MB: 256 MB are enough"
    one.update(verdict="not run", reason=short)
    other.update(verdict="not run", reason=f"{short}; t5x: took longer than 600 s")
    found = read(document, tmp_path)
    table = tables.claims_table(found)
    assert table is not None and [row[1] for row in table.texts()] == ["too small to decide", "not run"]
    counted = "1 is not run and 1 is left open because the state is too small"
    assert headlines(found) == [f"Of 2 published claims, {counted} on this machine."]


def test_csv_has_a_row_per_cell_and_measure(tmp_path: Path) -> None:
    document = documents.document(missing={"t5x_full": ("failed", 'it said: "no",\nand went')})
    found = read(document, tmp_path)
    rows = list(csv.DictReader(io.StringIO(samples_csv(found))))
    ok = [cell for cell in document["cells"] if cell["status"] == "ok"]
    assert len(rows) == sum(len(cell["figures"]) for cell in ok) + 5
    saves = [float(r["value"]) for r in rows if r["arm"] == "baseline" and r["measure"] == "save"]
    summary = {(r["arm"], r["measure"]): r for r in csv.DictReader(io.StringIO(summary_csv(found)))}
    assert statistics.fmean(saves) == pytest.approx(float(summary["baseline", "save"]["mean"]))
    assert summary["t5x_full", "save"]["verdict"] == "not run"
    failed = next(row for row in rows if row["status"] == "failed")
    assert (failed["measure"], failed["value"], failed["reason"]) == ("", "", 'it said: "no", and went')


def test_names_are_not_formulas_in_a_spreadsheet(tmp_path: Path) -> None:
    names = {"=HYPERLINK(1)", "+1", "-1", "@x"}
    found = read(documents.document({"base": (1, 1, 1), **dict.fromkeys(names, (1, 1, 1))}, runs=2), tmp_path)
    for text in (samples_csv(found), summary_csv(found)):
        written = {row[0] for row in csv.reader(io.StringIO(text))}
        assert written >= {f"'{name}" for name in names}
        assert not written & names


# Very wide intervals are clipped; a large gain with a narrow interval is given in full.
INTERVALS = {(2.2e-4, 2.7e4): "<0.01 to >100", (0.5, 2.7e4): "0.500 to >100", (1e-6, 0.9): "<0.01 to 0.900"}
INTERVALS |= {(0.012, 99.0): "0.0120 to 99.0", (120.0, 135.0): "120 to 135", (0.001, 0.002): "0.00100 to 0.00200"}
GAINS = {None: "-", 1.0: "1.00x", 0.0471: "0.0471x", 12.34: "12.3x", 250.2: "250x", 0.0001: "0.0001x"}
GAINS |= {0.000012: "1.2e-05x", 0.0: "0x", 0.9996: "1.00x", 99.96: "100x"}


def test_numbers_in_words() -> None:
    for words, expected in (
        (wording.interval, {**INTERVALS, (None, None): "-"}),
        (wording.gain, GAINS),
        (wording.number, {(0.0, 4): "0", (0.01234, 4): "0.01234", (1.23456, 4): "1.235", (1234.5, 4): "1,234"}),
        (wording.number, {(1e9, 4): "1e+09"}),
        (wording.spread, {(137.52, 7.449): "137.5 ± 7.4"}),
        (wording.percent, {-1919.2: "-1,919%", -0.01: "0.0%", 0.04: "0.0%", -0.06: "-0.1%"}),
        (wording.probability, {0.00004: "< 0.001"}),
        (wording.clipped, {("x" * 99, 5): "xxx…x"}),
        (printable, {"a\x1b[31m\nb": "a\\x1b[31m b"}),
    ):
        for given, text in expected.items():
            with case((words.__name__, given)):
                assert words(*(given if isinstance(given, tuple) else (given,))) == text
