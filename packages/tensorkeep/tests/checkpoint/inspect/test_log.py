"""The log of a run: metrics, the best step, disk space with shared files counted once, damaged steps."""

import math
import shutil
from pathlib import Path

import pytest
import torch

import tensorkeep
from faults.injection import flip_bit
from tensorkeep.cli.main import main
from tensorkeep.errors import NotACheckpointError, NotFoundError, UsageError

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three incremental steps that share the file of a frozen tensor."""
    frozen = torch.arange(50_000.0)
    with tensorkeep.CheckpointManager(tmp_path / "run", incremental=True) as manager:
        for step, loss in LOSSES.items():
            state = {"model": {"frozen": frozen, "w": torch.full((100,), loss)}}
            manager.save(step, state, metrics={"val_loss": loss, "accuracy": 1 / loss})
    return tmp_path / "run"


def test_steps_are_listed_with_their_metrics_and_the_best_of_the_validation_loss_or_a_named_metric(run: Path) -> None:
    found = tensorkeep.log(run)
    assert [step.number for step in found.steps] == list(LOSSES)
    assert [(step.metrics or {})["val_loss"] for step in found.steps] == list(LOSSES.values())
    assert {step.state_bytes for step in found.steps} == {50_100 * 4}
    assert {step.compression for step in found.steps} == {"none"}
    assert not any(step.problem for step in found.steps)
    assert found.summary()["metrics"] == {
        "val_loss": {"first": 3.0, "last": 2.0, "min": 1.0, "max": 3.0},
        "accuracy": {"first": 1 / 3, "last": 0.5, "min": 1 / 3, "max": 1.0},
    }
    assert (found.metric, found.mode, found.best and found.best.number) == ("val_loss", "min", 20)
    assert [step.best for step in found.steps] == [False, True, False]
    document = found.as_dict(last=2)
    assert (document["count"], [step["number"] for step in document["steps"]]) == (3, [20, 30])
    found = tensorkeep.log(run, metric="val_loss", mode="max")
    assert found.best is not None and found.best.number == 10
    with pytest.raises(UsageError, match="no step has the metric 'lass'"):
        tensorkeep.log(run, metric="lass")


def test_new_bytes_count_shared_files_once(run: Path) -> None:
    found = tensorkeep.log(run)
    first, *others = found.steps
    assert first.new_bytes == first.nbytes > 200_000
    assert all(step.new_bytes < 10_000 < 200_000 < step.nbytes for step in others)
    files = {file.stat().st_ino: file.stat() for file in run.glob("step-*/*")}
    assert sum(step.new_bytes for step in found.steps) == sum(status.st_size for status in files.values())
    total = found.summary()
    assert total["occupied_bytes"] == sum(status.st_blocks * 512 for status in files.values())
    assert total["incremental_steps"] == 2
    assert total["median_incremental_bytes"] == sum(step.new_bytes for step in others) / 2
    # After the first step is gone, the second one is the first that has the shared file.
    tensorkeep.CheckpointManager(run).delete(10)
    assert tensorkeep.log(run).steps[0].new_bytes == tensorkeep.log(run).steps[0].nbytes


def test_damaged_and_incomplete_steps_are_named(run: Path) -> None:
    (run / "step-000010" / "manifest.json").unlink()
    manifest = run / "step-000020" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes() + b"x")
    (run / "step-000040").write_text("a file")
    shutil.copytree(run / "step-000030", run / "step-000050")
    (run / "step-000050" / "changes-model.tensorkeep").unlink()
    found = tensorkeep.log(run)
    assert {step.number: step.problem for step in found.steps if step.problem} == {
        10: "incomplete: holds no manifest, so it is not a checkpoint",
        20: "damaged: manifest.json: its checksum is wrong: the file is damaged",
        40: "incomplete: there is no such directory",
        50: "damaged: changes-model.tensorkeep: the manifest lists this file, but it is missing",
    }
    assert found.best is not None and found.best.number == 30
    assert found.steps[0].new_bytes > 200_000  # it still takes its space
    assert list(found.summary()["problems"]) == ["10", "20", "40", "50"]


def test_verify_finds_a_flipped_byte(run: Path) -> None:
    flip_bit(run / "step-000020" / "changes-model.tensorkeep", -100)
    assert not any(step.problem for step in tensorkeep.log(run).steps)
    found = tensorkeep.log(run, verify=True)
    (problem,) = [step.problem for step in found.steps if step.problem]
    assert problem.startswith("damaged: changes-model.tensorkeep: 'model.w': its checksum is")
    assert found.best is not None and found.best.number == 30


def test_an_unclear_metric_stars_no_step_and_what_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        manager.save(1, {}, metrics={"speed": 1.0, "gain": math.nan})
    found = tensorkeep.log(tmp_path)
    assert (found.metric, found.mode, found.best) == (None, None, None)
    with pytest.raises(NotFoundError):
        tensorkeep.log(tmp_path / "missing")
    with pytest.raises(NotACheckpointError, match="contains no steps"):
        tensorkeep.log(tmp_path / "step-000001")
    with pytest.raises(UsageError, match="is one step"):
        tensorkeep.log(f"{tmp_path}@1")


def test_the_curves_of_a_run_have_the_steps_that_were_deleted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep-last", "1", "--yes"]) == 0
    found = tensorkeep.log(run)
    assert [step.number for step in found.steps] == [30]
    assert found.curves()["val_loss"] == list(LOSSES.items())
    assert found.summary()["metrics"]["val_loss"] == {"first": 3.0, "last": 2.0, "min": 1.0, "max": 3.0}
    assert [step["number"] for step in found.as_dict()["pruned"]] == [10, 20]
    capsys.readouterr()
    for command in ("log", "info"):
        assert main([command, str(run)]) == 0
        assert "the metrics of 2 deleted steps (10 to 20) are in" in capsys.readouterr().out
