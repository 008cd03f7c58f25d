"""``tensorkeep bench checkpoint``: runs, reports, interrupts, resumes, and invalid arguments."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from command_line import Call, RunJson, results
from forked import ended, start
from forked_modules import forks
from tensorkeep.cli.errors import ONLY_CHECKPOINT
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case
from tensorkeep_bench.cli import measure
from tensorkeep_bench.report import html as report_files
from tensorkeep_bench.results import Results, write_results
from tensorkeep_bench.run.runner import SCRATCH

SMALL = "openllama-3b:scale=0.0005:layers=1"
ARMS = ["pytorch", "pytorch (again)", "safetensors", "tensorkeep"]
RUN = ["bench", "checkpoint", "--model", SMALL, "--arms", "safetensors", "--arms", "tensorkeep", "--no-progress"]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cells_in_process")
def test_run_reports_and_its_results_give_the_same_report_again(tmp_path: Path, call: Call) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    output, err = call(*RUN, "--runs", "2", "--out", out)
    assert err == ""
    found = results(out)
    assert [arm["name"] for arm in found["arms"]] == ARMS
    assert [cell["status"] for cell in found["cells"]] == ["ok"] * 8
    files = {"results.json", "report.html", "summary.csv", "samples.csv"}
    assert {path.name for path in out.iterdir() if path.suffix} == files
    assert not (out / SCRATCH).exists()
    for text in ("durable save", "load, cold", "is too small to time", *ARMS, f"wrote {out / 'report.html'}"):
        assert text in output
    assert "Recommended" not in output
    page = (out / "report.html").read_text()
    assert all(arm in page for arm in ARMS)
    again.mkdir()
    (again / "results.json").write_bytes((out / "results.json").read_bytes())
    assert call("report", again).out == output.replace(str(out), str(again))
    for name in ("report.html", "summary.csv", "samples.csv"):
        assert (again / name).read_bytes() == (out / name).read_bytes()
    plots = {path.name: path.read_bytes() for path in (out / "plots").iterdir()}
    assert plots == {path.name: path.read_bytes() for path in (again / "plots").iterdir()}


@forks
@pytest.mark.usefixtures("cells_in_process", "without_plots")
def test_own_checkpoint_is_measured_and_results_need_overwrite(tmp_path: Path, call: Call, run_json: RunJson) -> None:
    own, out = tmp_path / "own", tmp_path / "out"
    tensorkeep.save({"model": {"w": torch.randn(300, 200)}, "step": 3}, own)
    out.mkdir()
    (out / "results.json").write_text("{}")
    command = ["bench", "checkpoint", "--from", own, "--arms", "tensorkeep", "--runs", "1", "--out", out]
    assert "--overwrite" in call(*command, code=6).err
    assert (out / "results.json").read_text() == "{}"
    document = run_json(*command, "--overwrite")
    assert document["experiment"] == "peers"
    assert document["summary"]["arms"]["tensorkeep"]["save"]["n"] == 1
    assert (results(out)["complete"], results(out)["subject"]["bytes"]) == (True, 300 * 200 * 4)
    assert tensorkeep.verify(own).ok


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cells_in_process", "without_plots")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_keeps_its_results_and_resumes(number: int, tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    process = start(bench_without_plots, [*RUN, "--runs", "40", "--out", str(out)], output=output)
    while not (out / "results.json").exists() or measured_cells(out) < 2:
        assert process.is_alive(), output.read_text()
        time.sleep(0.1)
    os.kill(process.pid, number)
    code, printed = ended(process), output.read_text()
    assert code == 130, printed
    for text in ("interrupted", "--resume", "wrote"):
        assert text in printed
    kept = measured_cells(out)
    assert 2 <= kept < 10
    assert not (out / SCRATCH).exists()
    found = results(out)
    found["cells"] = found["cells"][: kept + 1]
    (out / "results.json").write_text(json.dumps(found))
    assert main(["bench", "checkpoint", "--resume", "--out", str(out), "--runs", "3"]) == 2
    assert main(["bench", "checkpoint", "--resume", "--out", str(out), "--dir", str(tmp_path)]) == 2
    assert main(["bench", "checkpoint", "--resume", "--out", str(out), "-q"]) == 0
    assert measured_cells(out) == kept + 1
    assert results(out)["complete"]


def bench_without_plots(words: list[str]) -> None:
    """Run a command in this process, whose report has no plots, which take seconds."""
    report_files.draw_plots = lambda results, **_: []
    sys.exit(main(words))


def measured_cells(folder: Path) -> int:
    """Return the number of cells with a result."""
    return sum(cell["status"] == "ok" for cell in results(folder)["cells"])


@pytest.mark.exhaustive
@forks
@pytest.mark.usefixtures("cells_in_process", "without_plots")
def test_configuration_of_an_isolated_suite_runs_unchanged(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "phase4_config.json"
    keys = ("name", "chunk_size_elements", "concurrency_limit", "compression")
    tests = [dict(zip(keys, row, strict=True)) for row in (("baseline", 64, 1, None), ("mine", 16384, 64, "gzip"))]
    content = {
        "testing": {"num_runs": 1, "save_dir": str(tmp_path / "there"), "use_gpu": False},
        "test_configurations": tests[:1],
        "custom_tests": {"enabled": True, "configurations": tests[1:]},
    }
    file.write_text(json.dumps(content))
    command = ("bench", "checkpoint", "--experiment", file, "--model", SMALL)
    call(*command, "--keep")
    kept = tmp_path / "there" / "bench-checkpoints"
    assert {path.name for path in kept.iterdir()} == {"baseline.arrays", "mine.arrays"}
    assert "model.embed_tokens.weight" in tensorkeep.load(kept / "mine.arrays")
    out = call(*command, "--overwrite").out
    assert not kept.exists()
    found = results(tmp_path / "there")
    assert [arm["name"] for arm in found["arms"]] == ["baseline", "baseline (again)", "mine"]
    assert {cell["status"] for cell in found["cells"]} == {"ok"}
    assert re.search(r"^baseline +\d+\.\d+( ± |  )", out, re.MULTILINE)


def test_a_run_removes_only_checkpoints_that_it_kept(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_cells(folder: Path, planned: Results, output: object) -> int:
        folder.mkdir(exist_ok=True)
        write_results(planned, folder / "results.json")
        return 0

    monkeypatch.setattr(measure, "_run_in", without_cells)
    disk, kept = tmp_path / "disk", tmp_path / "disk" / "bench-checkpoints"
    on_disk = (*RUN, "--dir", disk, "--out")
    call(*on_disk, tmp_path / "one", "--keep")
    kept.mkdir(parents=True)
    call(*on_disk, tmp_path / "other")
    call(*on_disk, tmp_path / "other", "--overwrite")
    for options in ((tmp_path / "third", "--keep"), (tmp_path / "other", "--keep", "--overwrite")):
        assert str(kept) in call(*on_disk, *options, code=6).err
    assert kept.exists()
    call(*on_disk, tmp_path / "one", "--keep", "--overwrite")
    assert not kept.exists()


def isolated_suite(**changes: object) -> dict[str, Any]:
    one = {"name": "baseline", "chunk_size_elements": 64, "concurrency_limit": 1, "compression": None}
    return {"testing": {"num_runs": 1}, "test_configurations": [{**one, **changes}]}


def test_invalid_file_is_one_clear_line(tmp_path: Path, check_refused: Callable[..., list[str]]) -> None:
    for content, message in (
        (isolated_suite(compression="gzipp"), "gzipp"),
        ({"arms": [{"name": "a", "settings": {"tool": "tosch"}}]}, "arm 'a': the tool 'tosch' does not exist"),
    ):
        with case(message):
            (tmp_path / "mine.json").write_text(json.dumps(content))
            lines = check_refused(["bench", "checkpoint", "--experiment", str(tmp_path / "mine.json")], 2, message)
            assert "mine.json" in lines[0] and len(lines) == 2


def test_claims_names_the_command_with_an_option_that_it_does_not_have(
    capsys: pytest.CaptureFixture[str], check_refused: Callable[..., list[str]]
) -> None:
    with suppress(SystemExit):
        main(["bench", "checkpoint", "--help"])
    shown = capsys.readouterr().out
    for option in ONLY_CHECKPOINT:
        with case(option):
            lines = check_refused(["bench", "claims", option, "60"], 2, f"unknown option: {option}")
            assert lines[1] == f"tensorkeep bench checkpoint --experiment claims {option} ..."
            assert f"{option} " in shown


def test_the_experiments_of_each_workload_are_listed(run_json: RunJson) -> None:
    for workload, names in (
        ("checkpoint", "three-way six-way isolated from-baseline-to-tensorkeep factorial peers claims"),
        ("training", "techniques combinations compile-modes best-stack training-claims training-claims-gpt2"),
    ):
        document = run_json("bench", workload, "--list")
        assert document["experiments"].keys() == set(names.split())
