"""Addresses of steps: ``RUN``, ``RUN/checkpoints``, ``RUN@latest``, ``RUN@best``, ``RUN@best:METRIC``, ``RUN@200``."""

from pathlib import Path

import pytest
import torch

import tensorkeep
import tensorkeep.torch
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, NotFoundError, UsageError
from tensorkeep.runs.address import find_checkpoint, run_root
from tensorkeep.testing.cases import case


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 100, 200 and 300 below ``run/checkpoints``; the loss is smallest at 200, the accuracy largest at 300."""
    losses = {100: 3.0, 200: 1.0, 300: 2.0}
    with tensorkeep.CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        for step, loss in losses.items():
            manager.save(step, {"w": torch.full((4,), step)}, metrics={"eval/loss": loss, "accuracy": step / 1000})
    return tmp_path / "run"


def test_an_address_names_a_step(run: Path) -> None:
    addresses = {
        **dict.fromkeys(("run", "run/", "run/checkpoints", "run@latest", "run/checkpoints@latest"), 300),
        **dict.fromkeys(("run@200", "run@000200", "run@best:eval/loss", "run@best"), 200),
        "run@best:accuracy": 300,
        "run/checkpoints/step-000100": 100,
    }
    for address, step in addresses.items():
        path = f"{run.parent}/{address}"
        with case(address), tensorkeep.open(path) as checkpoint:
            assert checkpoint["w"][0] == tensorkeep.load(path)["w"][0] == step
            assert tensorkeep.info(path).path.endswith(f"step-{step:06d}")


def test_diff_and_convert_take_addresses_and_verify_of_a_run_verifies_every_step(run: Path, tmp_path: Path) -> None:
    assert not tensorkeep.diff(f"{run}@100", f"{run}@200").equal
    tensorkeep.convert(f"{run}@100", tmp_path / "one.pt", to="torch")
    assert tensorkeep.diff(f"{run}@100", tmp_path / "one.pt").equal
    report = tensorkeep.verify(run)
    assert (report.ok, report.tensors, report.path) == (True, 3, str(run))
    file = run / "checkpoints/step-000100/model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    (run / "checkpoints/step-000200/manifest.json").unlink()
    report = tensorkeep.verify(run)
    assert not report.ok
    assert [problem.file for problem in report.problems] == ["step-000100/model.safetensors", "step-000200"]
    assert tensorkeep.verify(f"{run}@latest").ok


def test_an_existing_path_is_taken_literally_and_a_checkpoint_with_steps_is_itself(tmp_path: Path, run: Path) -> None:
    for name in ("run@latest", "x@200", "one"):
        tensorkeep.save({"w": 7}, tmp_path / name)
        assert tensorkeep.load(tmp_path / name) == {"w": 7}
    with tensorkeep.CheckpointManager(tmp_path / "one") as manager:
        manager.save(1, {"w": 8})
    assert tensorkeep.load(tmp_path / "one") == {"w": 7}
    assert tensorkeep.load(f"{tmp_path / 'one'}@latest") == {"w": 8}


def test_the_latest_step_is_the_last_complete_one(run: Path) -> None:
    manifest = run / "checkpoints/step-000300/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    found = find_checkpoint(run)
    assert (found.step, found.reason, list(found.skipped)) == (200, "the latest", [300])
    for load in (tensorkeep.load, tensorkeep.torch.load):
        with pytest.warns(UserWarning, match="step 300 is skipped") as caught:
            assert load(run)["w"][0] == 200
        assert caught[0].filename == __file__, "it does not name the line that loads"
    # A step that is asked for by its number is never replaced by another one.
    with pytest.raises(CorruptCheckpointError):
        tensorkeep.load(f"{run}@300")
    # The error is of the last one if all are damaged.
    for step in (100, 200):
        (run / f"checkpoints/step-000{step}/manifest.json").write_bytes(b"{}")
    with pytest.raises(CorruptCheckpointError, match="step-000300"):
        tensorkeep.load(run)


def test_wrong_addresses(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert tensorkeep.load(".")["w"][0] == 300
    for call in (tensorkeep.load, tensorkeep.verify, tensorkeep.log):
        with pytest.raises(UsageError, match="the path is empty"):
            call("")
    for wrong in ("lates", "best:", "-1", "1e3", "", "1" * 5000):
        with pytest.raises(UsageError, match="is not a step"):
            tensorkeep.load(f"{run}@{wrong}")
    with pytest.raises(UsageError, match="no step has the metric 'lass'"):
        tensorkeep.load(f"{run}@best:lass")
    with pytest.raises(NotFoundError, match="nothing: does not exist"):
        tensorkeep.load(tmp_path / "nothing@latest")
    with pytest.raises(NotACheckpointError, match="contains no steps"):
        tensorkeep.load(f"{tmp_path}@latest")
    with pytest.raises(UsageError, match="is one step, not a run"):
        run_root(f"{run}@100")
    with tensorkeep.CheckpointManager(tmp_path / "long") as manager:
        for step in range(0, 1000, 100):
            manager.save(step, {"w": 8})
    with pytest.raises(NotFoundError, match="has no step with a metric"):
        tensorkeep.load(f"{tmp_path}/long@best")
    with pytest.raises(NotFoundError, match="has no step 460\nthe nearest steps are 300, 400, 500, 600"):
        tensorkeep.load(f"{tmp_path}/long@460")
