"""The steps of a run are uploaded to an object store behind the training."""

import shutil
from pathlib import Path

import pytest

import tensorkeep
from chatgot.run.folder import RunFolder
from store_servers import Proxy
from tensorkeep import CheckpointManager
from tensorkeep.cli.main import main
from tensorkeep.testing.equality import difference
from tiny_training import CONFIG, Trained, last_state, lines, run

pytest.importorskip("obstore")
pytestmark = pytest.mark.integration

BUCKET = "s3://training"


@pytest.fixture
def url(bucket: Proxy, tmp_path: Path) -> str:
    """Return the URL of a run that does not exist yet."""
    return f"{BUCKET}/{tmp_path.name}"


def test_an_uploaded_run_resumes_without_checkpoints(tmp_path: Path, data: Path, trained: Trained, url: str) -> None:
    config = CONFIG.changed({"checkpoint.every": 4, "checkpoint.store": url})
    trained(CONFIG, tmp_path / "whole")
    run(config, tmp_path / "run", data, stop_at=8)
    steps = [step.number for step in CheckpointManager(url).steps()]
    assert steps == [step.number for step in CheckpointManager(tmp_path / "run" / "checkpoints").steps()] == [4, 8]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    run(config, tmp_path / "run", data, resume=True)
    assert difference(last_state(tmp_path / "run"), last_state(tmp_path / "whole")) is None
    assert [step.number for step in CheckpointManager(url).steps()] == [8, 12]


def test_a_schedule_of_a_leg_begins_after_the_last_step_of_the_store(tmp_path: Path, data: Path, url: str) -> None:
    config = CONFIG.changed({"checkpoint.every": 4, "checkpoint.store": url})
    run(config, tmp_path / "run", data, stop_at=8)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    words = ["--schedule.name", "linear", "--schedule.final", "0", "--loop.steps", "13"]
    assert main(["train", "--out", str(tmp_path / "run"), "--resume", *words]) == 0
    (leg,) = RunFolder(tmp_path / "run").record().segments
    assert (leg.step, leg.config.schedule.start) == (8, 8)
    rates = [line["learning_rate"] for line in lines(tmp_path / "run", "train")][8:]
    assert rates == pytest.approx([1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3])


def test_a_new_run_does_not_replace_the_steps_of_another_one(tmp_path: Path, data: Path, url: str) -> None:
    with CheckpointManager(url) as other:
        other.save(3, {"step": 3})
    with pytest.raises(tensorkeep.DestinationExistsError, match="holds the steps of a run already, up to step 3"):
        run(CONFIG.changed({"checkpoint.store": url}), tmp_path / "run", data)
    assert not (tmp_path / "run" / "run.json").exists()
