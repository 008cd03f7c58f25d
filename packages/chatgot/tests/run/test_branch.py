"""Branching: a new run from a checkpoint of another one, which is not touched and not needed afterwards."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import tensorkeep
from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.loop import train
from chatgot.run.data import open_branch_data
from chatgot.run.folder import METRIC, RunFolder
from chatgot.run.resume import branch_point
from chatgot.run.setup import open_run
from chatgot.step.state import StepState
from tensorkeep.manager import CheckpointManager
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tiny_training import CONFIG, TEXT, Trained, Witness, check_same, last_state, prepared, run

START = CONFIG.changed({"checkpoint.every": 4, "checkpoint.keep_last": 9, "eval.every": 4})
ANNEAL = {"schedule.name": "linear", "schedule.final": 0.0, "schedule.start": 8, "loop.steps": 13, "loop.batch_size": 2}


@pytest.fixture
def origin(tmp_path: Path, trained: Trained) -> Path:
    trained(START, tmp_path / "origin")
    return tmp_path / "origin"


def branch(
    address: str, out: Path, data: Path, config: Config, arrange: Callable[[StepState], object] = lambda run: None
) -> None:
    with open_run(config, RunFolder(out), Dataset.open(data), branch=branch_point(address)) as opened:
        arrange(opened)
        train(opened, Witness())


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(each.relative_to(folder)): (each.read_bytes(), each.stat().st_mtime_ns)
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


def test_branch_is_what_a_leg_from_that_step_would_be_and_resumes_exactly_without_its_origin(
    tmp_path: Path, data: Path, origin: Path, trained: Trained
) -> None:
    config = START.changed(ANNEAL)
    trained(START, tmp_path / "leg", stop_at=8)
    run(config, tmp_path / "leg", data, resume=True)
    before = files(origin)
    branch(f"{origin}@8", tmp_path / "whole", data, config)
    assert files(origin) == before
    assert difference(last_state(tmp_path / "whole"), last_state(tmp_path / "leg")) is None
    record = RunFolder(tmp_path / "whole").record()
    assert (record.origin.run, record.origin.step) == (str(origin), 8)
    assert record.origin.settings["loop.batch_size"] == (3, 2)
    assert (record.config.schedule.start, record.segments) == (8, [])
    # Killed before the first step, then within the branch.
    with open_run(config, RunFolder(tmp_path / "parts"), Dataset.open(data), branch=branch_point(f"{origin}@8")):
        pass
    shutil.rmtree(origin)
    run(config, tmp_path / "parts", data, resume=True, stop_at=11)
    run(config, tmp_path / "parts", data, resume=True)
    check_same(tmp_path / "parts", tmp_path / "whole", "train", "evaluate")
    assert CheckpointManager(tmp_path / "parts" / "checkpoints").steps()[0].number == 8


def test_branch_of_a_leg_has_the_settings_of_its_step(tmp_path: Path, data: Path, origin: Path) -> None:
    run(START.changed({"optim.lr": 0.5, "loop.steps": 20}), origin, data, resume=True)
    assert [branch_point(f"{origin}@{step}").config.optim.lr for step in (8, 12, 16)] == [1e-3, 1e-3, 0.5]
    assert branch_point(origin).step == branch_point(origin / "checkpoints").step == 20
    best = branch_point(f"{origin}@best")
    steps = CheckpointManager(origin / "checkpoints").steps()
    assert best.metrics[METRIC] == min(step.metrics[METRIC] for step in steps)


def test_data_in_the_folder_of_the_origin_is_copied(tmp_path: Path) -> None:
    data, origin = prepared(tmp_path), tmp_path / "origin"
    run(START, origin, data, stop_at=4)
    shutil.move(data, origin / "data")
    point, new = branch_point(f"{origin}@4"), RunFolder(tmp_path / "new")
    dataset = open_branch_data(point.config, new, point, (), lambda activity: nullcontext())
    assert dataset.path == new.data
    assert dataset.fingerprint == point.record.data.fingerprint
    # Data elsewhere stays there.
    shutil.move(origin / "data", data)
    other = RunFolder(tmp_path / "other")
    assert open_branch_data(point.config, other, point, (), lambda activity: nullcontext()).path == data


def test_other_data_with_the_same_tokenizer_begins_at_its_first_batch(tmp_path: Path, data: Path, origin: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    prepare(tmp_path / "other.txt", tmp_path / "other")
    config = START.changed({"loop.steps": 10, "eval.every": 0})
    seen: list[int] = []
    branch(f"{origin}@8", tmp_path / "new", tmp_path / "other", config, lambda run: seen.append(run.batches.position))
    assert seen == [0]
    # Where the data is the same, other windows of evaluations are noted.
    config, point = START.changed({"loop.steps": 14, "eval.tokens": 32}), branch_point(f"{origin}@8")
    with open_run(config, RunFolder(tmp_path / "same"), Dataset.open(data), branch=point) as opened:
        assert opened.notes[-1].startswith("validation losses are measured on other windows from now on")
    with pytest.raises(tensorkeep.UsageError, match="this data is not the tokenizer of"):
        (tmp_path / "text.txt").write_text(TEXT.upper())
        prepare(tmp_path / "text.txt", tmp_path / "upper")
        branch(f"{origin}@8", tmp_path / "upper-run", tmp_path / "upper", config)
    assert not (tmp_path / "upper-run").exists()


@pytest.mark.exhaustive
def test_losses_of_other_data_are_not_compared_with_the_origins(tmp_path: Path, data: Path, trained: Trained) -> None:
    plateau = {"schedule.name": "plateau", "schedule.patience": 2, "eval.every": 1, "loop.steps": 9}
    trained(START.changed(plateau), tmp_path / "origin")
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    prepare(tmp_path / "other.txt", tmp_path / "other")
    states: list[dict[str, float | int]] = []
    for place in (data, tmp_path / "other"):
        config = START.changed({**plateau, "loop.steps": 10})
        out = tmp_path / f"on {place.name}"
        branch(f"{tmp_path}/origin@8", out, place, config, lambda run: states.append(run.plateau.state_dict()))
    kept, fresh = states
    assert kept["best"] < math.inf == fresh["best"]
    assert (fresh["share"], fresh["waited"]) == (kept["share"], 0)


def test_a_branch_without_steps_of_its_own_is_resumed_and_branched(tmp_path: Path, data: Path, origin: Path) -> None:
    """As one that was killed before its next checkpoint: its schedule has not begun."""
    config = START.changed({**ANNEAL, "schedule.warmup_steps": 0})
    with open_run(config, RunFolder(tmp_path / "new"), Dataset.open(data), branch=branch_point(f"{origin}@8")):
        pass
    other = config.changed({"optim.lr": config.optim.lr / 2})
    branch(f"{tmp_path / 'new'}@8", tmp_path / "second", data, other)
    run(other, tmp_path / "new", data, resume=True)
    assert difference(last_state(tmp_path / "second"), last_state(tmp_path / "new")) is None


def test_branch_of_an_earlier_version_keeps_its_vocabulary(tmp_path: Path, data: Path) -> None:
    """It had rows without a token, and its record does not say which."""
    old = tmp_path / "old"
    run(START.changed({"model.vocab_size": 64}), old, data)
    record = json.loads((old / "run.json").read_text())
    for name in ("vocab_padding", "vocab_multiple"):
        del record["config"]["model"][name]
    (old / "run.json").write_text(json.dumps(record))
    branch(f"{old}@8", tmp_path / "new", data, branch_point(f"{old}@8").config.changed({"loop.steps": 14}))
    assert RunFolder(tmp_path / "new").record().config.model.vocab_padding == 0


def test_branch_refuses_what_the_state_does_not_fit(tmp_path: Path, data: Path, origin: Path) -> None:
    for name, value, message in (
        ("model.n_layers", 2, r"model\.n_layers: 1 then, 2 now"),
        ("loop.steps", 8, r"loop\.steps is 8, and 8 steps are done"),
        ("schedule.start", 9, r"schedule\.start is 9, and the next step is 9"),
    ):
        with case(name), pytest.raises(tensorkeep.UsageError, match=message):
            branch(f"{origin}@8", tmp_path / "new", data, START.changed({name: value}))
        assert not (tmp_path / "new").exists()
    with pytest.raises(tensorkeep.DestinationExistsError):
        branch(f"{origin}@8", origin, data, START.changed({"loop.steps": 14}))
    for address, reason in ((f"{origin}@9", "step 9"), (tmp_path / "nothing", "holds no run")):
        with case(address), pytest.raises(tensorkeep.NotFoundError, match=reason):
            branch_point(address)


def test_a_branch_that_has_lost_all_checkpoints_does_not_resume(tmp_path: Path, data: Path, origin: Path) -> None:
    config = START.changed({"loop.steps": 14})
    branch(f"{origin}@8", tmp_path / "new", data, config)
    shutil.rmtree(tmp_path / "new" / "checkpoints")
    before = (tmp_path / "new" / "log.jsonl").read_bytes()
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="lost all checkpoints of its run") as raised:
        run(config, tmp_path / "new", data, resume=True)
    assert raised.value.remedy == "copy step 8 or a later one back, or start the branch again in another --out"
    assert (tmp_path / "new" / "log.jsonl").read_bytes() == before
    assert RunFolder(tmp_path / "new").record().resumed == []
