"""``tensorkeep bench checkpoint``: runs, reports, interrupts, resumes, and invalid arguments."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorkeep
from forked import ended, start
from tensorkeep.bench.run.scratch import NAME
from tensorkeep.cli.main import main
from tensorkeep.report import files as report_files

SMALL = "openllama-3b:scale=0.0005:layers=1"
ARMS = ["pytorch", "pytorch (again)", "safetensors", "tensorkeep"]
RUN = ["bench", "checkpoint", "--model", SMALL, "--arms", "safetensors", "--arms", "tensorkeep", "--no-progress"]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("cells_in_process")
def test_run_reports_and_its_results_give_the_same_report_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert main([*RUN, "--runs", "2", "--out", str(out)]) == 0
    output, err = capsys.readouterr()
    assert err == ""
    found = results(out)
    assert [arm["name"] for arm in found["arms"]] == ARMS
    assert [cell["status"] for cell in found["cells"]] == ["ok"] * 8
    assert {path.name for path in out.iterdir() if path.suffix} == {
        *("results.json", "report.html", "summary.csv", "samples.csv"),
    }
    assert not (out / NAME).exists()
    for text in ("durable save", "load, cold", "is too small to time", *ARMS, f"wrote {out / 'report.html'}"):
        assert text in output
    assert "Recommended" not in output
    page = (out / "report.html").read_text()
    assert all(arm in page for arm in ARMS)
    again.mkdir()
    (again / "results.json").write_bytes((out / "results.json").read_bytes())
    assert main(["report", str(again)]) == 0
    assert capsys.readouterr().out == output.replace(str(out), str(again))
    for name in ("report.html", "summary.csv", "samples.csv"):
        assert (again / name).read_bytes() == (out / name).read_bytes()
    plots = {path.name: path.read_bytes() for path in (out / "plots").iterdir()}
    assert plots == {path.name: path.read_bytes() for path in (again / "plots").iterdir()}


@pytest.mark.usefixtures("cells_in_process", "without_plots")
def test_own_checkpoint_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    own, out = tmp_path / "own", tmp_path / "out"
    tensorkeep.save({"model": {"w": torch.randn(300, 200)}, "step": 3}, own)
    arguments = ["bench", "checkpoint", "--from", str(own), "--arms", "tensorkeep", "--runs", "1", "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["experiment"] == "peers"
    assert document["summary"]["arms"]["tensorkeep"]["save"]["n"] == 1
    assert results(out)["subject"]["bytes"] == 300 * 200 * 4
    assert tensorkeep.verify(own).ok


@pytest.mark.slow
@pytest.mark.usefixtures("cells_in_process", "without_plots")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_run_keeps_its_results_and_resumes(number: int, tmp_path: Path) -> None:
    out, output = tmp_path / "out", tmp_path / "output"
    process = start(bench_without_plots, [*RUN, "--runs", "40", "--out", str(out)], output=output)
    while not (out / "results.json").exists() or measured_cells(out) < 2:
        assert process.is_alive(), output.read_text()
        time.sleep(0.1)
    assert process.pid is not None
    os.kill(process.pid, number)
    code, printed = ended(process), output.read_text()
    assert code == 130, printed
    for text in ("interrupted", "--resume", "wrote"):
        assert text in printed
    kept = measured_cells(out)
    assert 2 <= kept < 10
    assert not (out / NAME).exists()
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
    report_files.draw_plots = lambda results: []
    sys.exit(main(words))


def measured_cells(folder: Path) -> int:
    """Return the number of cells with a result."""
    return sum(cell["status"] == "ok" for cell in results(folder)["cells"])


@pytest.mark.usefixtures("cells_in_process", "without_plots")
def test_configuration_of_an_isolated_suite_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "phase4_config.json"
    file.write_text(
        """{
      "testing": {"num_runs": 1, "save_dir": "%s", "use_gpu": false},
      "test_configurations": [
        {"name": "baseline", "chunk_size_elements": 64, "concurrency_limit": 1, "compression": null},
        {"name": "my_custom_test", "chunk_size_elements": 16384, "concurrency_limit": 64, "compression": "gzip"}
      ],
      "custom_tests": {"enabled": true, "configurations": [
        {"name": "test_512kb_chunks", "chunk_size_elements": 131072, "concurrency_limit": 128, "compression": "gzip"}
      ]}
    }"""
        % (tmp_path / "there")
    )
    assert main(["bench", "checkpoint", "--experiment", str(file), "--model", SMALL]) == 0
    found = results(tmp_path / "there")
    assert [arm["name"] for arm in found["arms"]] == [
        *("baseline", "baseline (again)", "my_custom_test", "test_512kb_chunks"),
    ]
    assert {cell["status"] for cell in found["cells"]} == {"ok"}
    assert re.search(r"^baseline +\d+\.\d+( ± |  )", capsys.readouterr().out, re.MULTILINE)


def write_experiment(folder: Path, content: object) -> str:
    path = folder / "mine.json"
    path.write_text(json.dumps(content))
    return str(path)


def isolated_suite(**changes: object) -> dict[str, Any]:
    one = {"name": "baseline", "chunk_size_elements": 64, "concurrency_limit": 1, "compression": None}
    return {"testing": {"num_runs": 1}, "test_configurations": [{**one, **changes}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (isolated_suite(chunk_size=3), "has no field 'chunk_size'"),
        (isolated_suite(chunk_size_elements=-1), "chunk_size_elements: expected `int` >= 1"),
        (isolated_suite(compression="gzipp"), "gzipp"),
        ({"arms": [{"name": "a", "settings": {"tool": "tosch"}}]}, "arm 'a': the tool 'tosch' does not exist"),
        ({"arms": [{"name": "a", "settings": {"tool": "torch"}}], "run": 3}, "has no field 'run'"),
    ],
)
def test_invalid_file_is_one_clear_line(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "checkpoint", "--experiment", write_experiment(tmp_path, content)]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert message in lines[0]
    assert "mine.json" in lines[0]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--experiment", "sixway"], 2, "six-way"),
        (["--model", "openllama-4b"], 2, "is not a known model"),
        (["--model", "openllama-3b:scale=16"], 3, "the measurement needs"),
        (["--model", SMALL, "--from", "x"], 2, "exclude each other"),
        (["--from", "absent"], 5, "does not exist"),
        (["--arms", "nothing"], 2, "no arm 'nothing'"),
        (["--runs", "0"], 2, "--runs"),
        (["--with-optimizer", "sgd"], 2, "with_optimizer: invalid enum value 'sgd'"),
        (["--time-limit", "-1"], 2, "--time-limit"),
        (["--resume"], 5, "the results file does not exist"),
    ],
)
def test_invalid_arguments_are_refused_at_once(
    arguments: list[str], code: int, message: str, tmp_path: Path, check_refused: Callable[..., list[str]]
) -> None:
    check_refused(["bench", "checkpoint", "--out", "out", *arguments], code, message)
    assert not (tmp_path / "out" / NAME).exists()


@pytest.mark.usefixtures("cells_in_process", "without_plots")
def test_results_are_only_overwritten_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert main([*RUN, "--out", str(tmp_path)]) == 6
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "{}"
    assert main([*RUN, "--runs", "1", "--out", str(tmp_path), "--overwrite", "-q"]) == 0
    assert results(tmp_path)["complete"]


def test_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["experiments"]) == {
        *("three-way", "six-way", "isolated", "from-baseline-to-tensorkeep", "factorial", "peers", "claims"),
    }
