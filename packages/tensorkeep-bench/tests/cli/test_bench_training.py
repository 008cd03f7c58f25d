"""``tensorkeep bench training``: runs, reports, resumes, and invalid arguments."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Call, results
from tensorkeep.cli.main import main
from tensorkeep_bench.report import html as report_files

SMALL = {"model.n_layers": 1, "model.d_model": 16, "model.n_heads": 2, "model.context_length": 16}
SMALL |= {"loop.batch_size": 2, "loop.threads": 1, "loop.device": "cpu"}
ARMS = ["plain", "plain (again)", "checkpointing", "swapping"]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """Return the file of an experiment with an arm that can run and one that cannot."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    value = {
        "name": "small",
        "workload": "training",
        "design": "one-at-a-time",
        "runs": 1,
        "settings": {"data": str(tmp_path / "text.txt"), "steps": 6, "warmup": 1, "gate_steps": 3, "evaluated": 2},
        "base": {"name": "plain", "settings": SMALL},
        "changes": [
            {"name": "checkpointing", "set": {"techniques.activation-checkpointing": "on"}},
            {"name": "swapping", "set": {"techniques.activation-swapping": "on"}},
        ],
    }
    (tmp_path / "small.json").write_text(json.dumps(value))
    return tmp_path / "small.json"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("cells_in_process")
def test_run_reports_resumes_and_its_results_give_the_same_report_again(
    experiment: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    command = ["bench", "training", "--experiment", str(experiment), "--no-progress"]
    output, err = call(*command, "--out", out)
    assert err == ""
    found = results(out)
    assert found["complete"]
    cells = {one["arm"]: one for one in found["cells"]}
    statuses = {name.removeprefix("only "): one["status"] for name, one in cells.items()}
    assert statuses == dict(zip(ARMS, ("ok", "ok", "ok", "not-run"), strict=True))
    assert "needs a CUDA device" in cells["only swapping"]["reason"]
    assert "recomputed" in cells["only checkpointing"]["observed"]["activation-checkpointing"]
    # Bit for bit the plain loop's, and so is the A/A control's.
    losses = {one["figures"]["loss"] for one in cells.values() if one["status"] == "ok"}
    assert len(losses) == 1
    assert not list(out.glob(".*"))
    shown = ("speed", "tokens/s", "peak memory", "validation loss", "Techniques observed", "recomputed", "needs a CUDA")
    for text in shown:
        assert text in output
    page = (out / "report.html").read_text()
    assert "Techniques observed" in page and "tokens/s" in page
    assert "throughput" not in output and "Saving" not in page
    assert "GiB" not in output and "first step (" in output
    assert "per raw byte" not in page and "had to be observed as active" in page
    again.mkdir()
    (again / "results.json").write_bytes((out / "results.json").read_bytes())
    assert call("report", again).out == output.replace(str(out), str(again))
    assert (again / "report.html").read_bytes() == (out / "report.html").read_bytes()
    monkeypatch.setattr(report_files, "draw_plots", lambda results, **_: [])
    _resumes(out)


def _resumes(out: Path) -> None:
    """Resume a run whose last cell was not reached, which only its own command does."""
    found = results(out)
    last = max(found["cells"], key=lambda one: one["order"])
    last.update(status="planned", reason=None, figures={}, clocks={}, seconds=None)
    found["complete"] = False
    (out / "results.json").write_text(json.dumps(found))
    assert main(["bench", "checkpoint", "--resume", "--out", str(out), "-q"]) == 2
    assert main(["bench", "training", "--resume", "--steps", "9", "--out", str(out), "-q"]) == 2
    assert main(["bench", "training", "--resume", "--out", str(out), "-q"]) == 0
    assert results(out)["complete"]


def test_missing_data_keeps_an_empty_folder(tmp_path: Path, check_refused: Callable[..., list[str]]) -> None:
    (tmp_path / "out").mkdir()
    check_refused(["bench", "training", "--data", "nowhere", "--out", "out"], 5, "nowhere")
    assert (tmp_path / "out").is_dir()
