"""Resuming with other settings: which may change, what follows for the results, and the record of it."""

import json
import re
from pathlib import Path

import pytest

import tensorkeep
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.resume import current_config
from tensorkeep.train.run.setup import open_run
from train.tiny_training import CONFIG, last_state, lines, prepared, run

COSINE = {"schedule.name": "cosine"}


@pytest.fixture(autouse=True)
def quick_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorkeep.train.run.setup.measured_peak", lambda device: 1e9)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def notes(config: Config, folder: Path, data: Path) -> tuple[str, ...]:
    """Return the notes of a resume that does no step."""
    with open_run(config, RunFolder(folder), Dataset.open(data), resume=True) as opened:
        return opened.notes


def test_longer_run_with_a_constant_rate_is_that_of_its_length_from_the_start(tmp_path: Path, data: Path) -> None:
    longer = CONFIG.changed({"loop.steps": 20})
    run(longer, tmp_path / "whole", data)
    run(CONFIG, tmp_path / "run", data)
    assert notes(longer, tmp_path / "run", data) == (
        "the run now has 20 steps instead of 12; its result is that of a run of 20 steps from the start",
    )
    assert run(longer, tmp_path / "run", data, resume=True).step == 20
    for part in ("model", "optimizers", "batches", "rng"):
        assert difference(last_state(tmp_path / "run")[part], last_state(tmp_path / "whole")[part]) is None


def test_schedule_of_a_longer_run_is_that_of_the_new_length(tmp_path: Path, data: Path) -> None:
    short = CONFIG.changed(COSINE)
    longer = short.changed({"loop.steps": 24})
    run(short, tmp_path / "run", data)
    (note,) = notes(longer, tmp_path / "run", data)
    assert "from step 13 on its schedule (cosine) is that of 24 steps" in note
    assert "the learning rate goes from 0.10 to 0.52 of its peak" in note
    assert "the result differs from that of a run of 24 steps from the start" in note
    run(longer, tmp_path / "run", data, resume=True)
    run(longer, tmp_path / "whole", data)
    rates = {line["step"]: line["learning_rate"] for line in lines(tmp_path / "run", "train")}
    new = {line["step"]: line["learning_rate"] for line in lines(tmp_path / "whole", "train")}
    assert [rates[step] for step in range(13, 25)] == [new[step] for step in range(13, 25)]
    assert rates[12] < new[12]


def test_run_that_was_made_longer_keeps_its_length_and_resumes_exactly(tmp_path: Path, data: Path) -> None:
    short = CONFIG.changed(COSINE)
    longer = short.changed({"loop.steps": 24, "log.every": 2})
    for name in ("whole", "parts"):
        run(short, tmp_path / name, data)
    run(longer, tmp_path / "whole", data, resume=True)
    run(longer, tmp_path / "parts", data, resume=True, stop_at=17)
    current = current_config(RunFolder(tmp_path / "parts").record())
    assert (current.loop.steps, current.log.every) == (24, 2)
    assert notes(current, tmp_path / "parts", data) == ()
    assert run(current, tmp_path / "parts", data, resume=True).step == 24
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None


def test_settings_that_only_observe_may_change_and_the_record_keeps_the_history(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "whole", data)
    run(CONFIG, tmp_path / "run", data, stop_at=5)
    first = CONFIG.changed({"eval.every": 2, "eval.batches": 1, "sample.every": 3, "sample.tokens": 2, "log.every": 4})
    run(first, tmp_path / "run", data, resume=True, stop_at=8)
    second = first.changed({"eval.patience": 50, "checkpoint.every": 1, "checkpoint.keep_last": 3, "log.every": 1})
    run(second, tmp_path / "run", data, resume=True)
    for part in ("model", "optimizers", "batches", "rng"):
        assert difference(last_state(tmp_path / "run")[part], last_state(tmp_path / "whole")[part]) is None
    history = [(each.step, each.settings.get("log.every")) for each in RunFolder(tmp_path / "run").record().resumed]
    assert history == [(5, (1, 4)), (8, None)]
    settings = RunFolder(tmp_path / "run").record().resumed[-1].settings
    assert settings["eval.patience"] == (None, 50)
    assert len(tensorkeep.CheckpointManager(tmp_path / "run" / "checkpoints").steps()) >= 3


@pytest.mark.parametrize("setting", ["eval.tokens", "eval.batches"])
def test_other_windows_of_evaluations_are_noted(tmp_path: Path, data: Path, setting: str) -> None:
    run(CONFIG, tmp_path / "run", data, stop_at=5)
    (note,) = notes(CONFIG.changed({setting: 1}), tmp_path / "run", data)
    assert note.startswith("validation losses are measured on other windows from now on")


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ({}, {"loop.steps": 11}, r"loop\.steps: 12 then, 11 now \(a run may become longer, not shorter\)"),
        (
            {"schedule.name": "range", "schedule.final": 0.1},
            {"loop.steps": 20},
            r"loop\.steps: 12 then, 20 now \(the learning rates of a range test depend on it\)",
        ),
        (
            {"schedule.name": "plateau", "eval.every": 2},
            {"eval.every": 3},
            r"eval\.every: 2 then, 3 now \(the schedule 'plateau' depends on the evaluations\)",
        ),
        ({}, {"loop.batch_size": 4}, r"loop\.batch_size: 3 then, 4 now$"),
        ({}, {"schedule.final": 0.2}, r"schedule\.final: 0\.1 then, 0\.2 now$"),
    ],
)
def test_settings_that_decide_the_result_are_refused(
    tmp_path: Path, data: Path, start: dict[str, object], changes: dict[str, object], message: str
) -> None:
    config = CONFIG.changed(start)
    run(config, tmp_path / "run", data, stop_at=4)
    with pytest.raises(tensorkeep.UsageError) as raised:
        run(config.changed(changes), tmp_path / "run", data, resume=True)
    assert re.search(message, raised.value.message)


def test_run_that_was_made_longer_cannot_become_shorter_again(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data)
    run(CONFIG.changed({"loop.steps": 20}), tmp_path / "run", data, resume=True, stop_at=14)
    with pytest.raises(tensorkeep.UsageError, match=r"loop\.steps: 20 then, 16 now"):
        run(CONFIG.changed({"loop.steps": 16}), tmp_path / "run", data, resume=True)


def test_techniques_whose_stages_depend_on_the_length_make_a_longer_run_differ(tmp_path: Path, data: Path) -> None:
    config = CONFIG.changed({"techniques.progressive-length": {"pieces": [2, 1], "shares": [0.5, 0.5]}})
    run(config, tmp_path / "run", data)
    (note,) = notes(config.changed({"loop.steps": 24}), tmp_path / "run", data)
    assert "the result differs from that of a run of 24 steps" in note


def test_run_from_before_the_setting_evaluates_all_tokens(tmp_path: Path, data: Path) -> None:
    run(CONFIG, tmp_path / "run", data, stop_at=5)
    path = tmp_path / "run" / "run.json"
    values = json.loads(path.read_text())
    del values["config"]["eval"]["tokens"]
    path.write_text(json.dumps(values))
    current = current_config(RunFolder(tmp_path / "run").record())
    assert current.eval.tokens is None
    assert notes(current, tmp_path / "run", data) == ()
