"""Profiles: a Chrome trace of some steps, which changes nothing."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from chatgot.data.dataset import Dataset
from chatgot.loop import train
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from conftest import Trained
from tensorkeep.errors import StoreError
from tensorkeep.testing.equality import difference
from tiny_training import CONFIG, Witness, last_state, lines


def profiled(folder: Path, data: Path, steps: int, changes: dict[str, Any] | None = None) -> Witness:
    witness = Witness()
    with open_run(CONFIG.changed(changes or {}), RunFolder(folder), Dataset.open(data)) as opened:
        train(opened, witness, profile=steps)
    return witness


def test_trace_has_the_steps_and_changes_nothing(tmp_path: Path, data: Path, trained: Trained) -> None:
    trained(CONFIG, tmp_path / "plain")
    witness = profiled(tmp_path / "run", data, 2)
    ((step, values),) = [(step, values) for step, kind, values in witness.seen if kind == "profile"]
    assert (step, values["steps"], Path(values["path"]).name) == (5, 2, "steps-4-5-rank-0.json.gz")
    with gzip.open(values["path"]) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"aten::embedding", "Optimizer.step#AdamW.step"} <= names
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 2
    trained = [line for line in lines(tmp_path / "run") if line["kind"] != "profile"]
    assert trained == lines(tmp_path / "plain")
    assert difference(last_state(tmp_path / "run"), last_state(tmp_path / "plain")) is None


def test_run_that_ends_before_has_a_shorter_trace_or_none(tmp_path: Path, data: Path) -> None:
    witness = profiled(tmp_path / "shorter", data, 50, {"loop.steps": 6})
    (values,) = [values for _, kind, values in witness.seen if kind == "profile"]
    assert (values["steps"], Path(values["path"]).name) == (3, "steps-4-6-rank-0.json.gz")
    for steps in (1, 3):
        folder = tmp_path / f"{steps} steps"
        assert not profiled(folder, data, 5, {"loop.steps": steps}).of("profile"), steps
        assert not (folder / "profile").exists(), steps


def test_trace_that_cannot_be_written_is_an_error(tmp_path: Path, data: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write the profile"):
        profiled(tmp_path / "run", data, 2)
