"""A branch, or a run from initial weights, that is killed before it has its record, is started again."""

import signal
from pathlib import Path

import pytest

import chatgot.run.setup
import forked
from chatgot.data.dataset import Dataset
from chatgot.loop import train
from chatgot.run.folder import RunFolder
from chatgot.run.resume import branch_point
from chatgot.run.setup import open_run
from chatgot.run.weights import read_initial
from faults import injection as faults
from forked import ended
from tensorkeep import CheckpointManager
from tensorkeep.errors import DestinationExistsError
from tensorkeep.storage.commit import SUFFIX
from tensorkeep.testing.equality import difference
from tiers import exhaustive
from tiny_training import CONFIG, Witness, last_state, prepared, run

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

START = CONFIG.changed({"checkpoint.every": 4, "checkpoint.keep_last": 9})
DEATHS = {"before the record": faults.die, "after the record": faults.die_after}


def live(kind: str, source: Path, folder: Path, data: Path, death: str | None, step: int = 8) -> None:
    """Start a run from another one, and train it to its end unless the process is killed."""
    chatgot.run.setup.measured_peak = lambda *args, **kwargs: 1e9
    real = RunFolder._write_record
    if death is not None:
        RunFolder._write_record = lambda *args: DEATHS[death]("write", real, args, {})
    address = f"{source}@{step}"
    if kind == "branch":
        opened = open_run(START, RunFolder(folder), Dataset.open(data), branch=branch_point(address))
    else:
        initial = read_initial(address)
        config = START.changed(initial.model_settings(START))
        opened = open_run(config, RunFolder(folder), Dataset.open(data), initial=initial)
    with opened as started:
        train(started, Witness())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of prepared data, beside the run ``source``."""
    found = prepared(tmp_path_factory.mktemp("data"))
    run(START, found.with_name("source"), found)
    return found


def start(kind: str, folder: Path, data: Path, death: str | None = None, step: int = 8) -> int:
    output = folder.with_name("output")
    code = ended(forked.start(live, kind, data.with_name("source"), folder, data, death, step, output=output))
    print(output.read_text())  # pytest shows it if the test fails
    return code


@pytest.mark.parametrize("kind", ["branch", *exhaustive("initial weights")])
def test_killed_before_its_record_the_same_command_starts_it(tmp_path: Path, data: Path, kind: str) -> None:
    assert start(kind, tmp_path / "whole", data) == 0
    # From another step before: its checkpoint must not stay.
    assert start(kind, tmp_path / "killed", data, "before the record", step=4) == -signal.SIGKILL
    assert not RunFolder(tmp_path / "killed").exists()
    assert start(kind, tmp_path / "killed", data) == 0
    whole, killed = (CheckpointManager(tmp_path / name / "checkpoints").steps() for name in ("whole", "killed"))
    assert [step.number for step in killed] == [step.number for step in whole]
    assert difference(last_state(tmp_path / "killed"), last_state(tmp_path / "whole")) is None
    whole_names, killed_names = ({each.name for each in (tmp_path / name).iterdir()} for name in ("whole", "killed"))
    assert killed_names == whole_names
    assert not list((tmp_path / "killed").rglob(f"*{SUFFIX}"))


def test_a_run_that_has_lost_its_record_is_not_replaced(tmp_path: Path, data: Path) -> None:
    assert start("branch", tmp_path / "run", data, "after the record") == -signal.SIGKILL
    run(START, tmp_path / "run", data, resume=True)
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(DestinationExistsError, match=r"holds the checkpoints of a run without its run\.json"):
        RunFolder(tmp_path / "run").check_new()
