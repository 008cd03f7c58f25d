"""Branching: a new run from a checkpoint of another one, which is not touched and not needed afterwards."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

import tensorkeep
from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.testing.equality import difference
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.loop import train
from tensorkeep.train.run.branch import branch_point, open_branch_data
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import METRIC, Run
from train.tiny_training import CONFIG, TEXT, Witness, last_state, lines, prepared, run

START = CONFIG.changed({"checkpoint.every": 4, "checkpoint.keep_last": 9, "eval.every": 4})
ANNEAL = {"schedule.name": "linear", "schedule.final": 0.0, "schedule.start": 8, "loop.steps": 14, "loop.batch_size": 2}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    run(START, tmp_path / "origin", prepared(tmp_path))
    return tmp_path / "origin"


def branch(
    address: str, out: Path, data: Path, config: Config, arrange: Callable[[Run], object] = lambda run: None
) -> None:
    with open_run(config, RunFolder(out), Dataset.open(data), branch=branch_point(address)) as opened:
        arrange(opened)
        train(opened, Witness())


def no_meter(activity: str) -> AbstractContextManager[None]:
    return nullcontext()


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(each.relative_to(folder)): (each.read_bytes(), each.stat().st_mtime_ns)
        for each in sorted(folder.rglob("*"))
        if each.is_file()
    }


def test_branch_is_what_a_leg_from_that_step_would_be(tmp_path: Path, origin: Path) -> None:
    data = tmp_path / "prepared"
    run(START, tmp_path / "leg", data, stop_at=8)
    run(START.changed(ANNEAL), tmp_path / "leg", data, resume=True)
    before = files(origin)
    branch(f"{origin}@8", tmp_path / "new", data, START.changed(ANNEAL))
    assert files(origin) == before
    assert difference(last_state(tmp_path / "new"), last_state(tmp_path / "leg")) is None
    record = RunFolder(tmp_path / "new").record()
    assert record.origin is not None
    assert (record.origin.run, record.origin.step) == (str(origin), 8)
    assert record.origin.settings["loop.batch_size"] == (3, 2)
    assert record.config.schedule.start == 8
    assert record.legs == []


def test_branch_does_not_need_its_origin_and_resumes_exactly(tmp_path: Path, origin: Path) -> None:
    data, config = tmp_path / "prepared", START.changed(ANNEAL)
    branch(f"{origin}@8", tmp_path / "whole", data, config)
    # Killed before the first step, then within the branch.
    with open_run(config, RunFolder(tmp_path / "parts"), Dataset.open(data), branch=branch_point(f"{origin}@8")):
        pass
    shutil.rmtree(origin)
    run(config, tmp_path / "parts", data, resume=True, stop_at=11)
    run(config, tmp_path / "parts", data, resume=True)
    assert difference(last_state(tmp_path / "parts"), last_state(tmp_path / "whole")) is None
    assert lines(tmp_path / "parts", "train", "evaluate") == lines(tmp_path / "whole", "train", "evaluate")
    assert CheckpointManager(tmp_path / "parts" / "checkpoints").steps()[0].number == 8


def test_branch_of_a_leg_has_the_settings_of_its_step(tmp_path: Path, origin: Path) -> None:
    run(START.changed({"optim.lr": 0.5, "loop.steps": 20}), origin, tmp_path / "prepared", resume=True)
    assert [branch_point(f"{origin}@{step}").config.optim.lr for step in (8, 12, 16)] == [1e-3, 1e-3, 0.5]
    assert branch_point(origin).step == branch_point(origin / "checkpoints").step == 20
    best = branch_point(f"{origin}@best")
    assert best.metrics[METRIC] == min(
        step.metrics[METRIC] for step in CheckpointManager(origin / "checkpoints").steps()
    )


def test_data_in_the_folder_of_the_origin_is_copied(tmp_path: Path, origin: Path) -> None:
    shutil.move(tmp_path / "prepared", origin / "data")
    point, new = branch_point(f"{origin}@8"), RunFolder(tmp_path / "new")
    dataset = open_branch_data(point.config, new, point, (), no_meter)
    assert dataset.path == new.data
    assert dataset.fingerprint == point.record.data.fingerprint
    # Data elsewhere stays there.
    shutil.move(origin / "data", tmp_path / "prepared")
    assert (
        open_branch_data(point.config, RunFolder(tmp_path / "other"), point, (), no_meter).path == tmp_path / "prepared"
    )


def test_other_data_with_the_same_tokenizer_begins_from_its_first_batch(tmp_path: Path, origin: Path) -> None:
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    prepare(tmp_path / "other.txt", tmp_path / "other")
    config = START.changed({"loop.steps": 14, "eval.every": 0})
    seen: list[int] = []
    branch(f"{origin}@8", tmp_path / "new", tmp_path / "other", config, lambda run: seen.append(run.batches.position))
    assert seen == [0]
    with pytest.raises(tensorkeep.UsageError, match=r"data\.tokenizer: the tokenizer of this data is not that of"):
        (tmp_path / "text.txt").write_text(TEXT.upper())
        prepare(tmp_path / "text.txt", tmp_path / "upper")
        branch(f"{origin}@8", tmp_path / "upper-run", tmp_path / "upper", config)
    assert not (tmp_path / "upper-run").exists()


def test_losses_of_other_data_are_not_compared_with_those_of_the_origin(tmp_path: Path) -> None:
    data, plateau = prepared(tmp_path), {"schedule.name": "plateau", "schedule.patience": 2, "eval.every": 1}
    run(START.changed(plateau), tmp_path / "origin", data)
    (tmp_path / "other.txt").write_text(TEXT[::-1])
    prepare(tmp_path / "other.txt", tmp_path / "other")
    states: list[dict[str, float | int]] = []
    for place in (data, tmp_path / "other"):
        config = START.changed({**plateau, "loop.steps": 14})
        out = tmp_path / f"on {place.name}"
        branch(f"{tmp_path}/origin@8", out, place, config, lambda run: states.append(run.plateau.state_dict()))
    kept, fresh = states
    assert kept["best"] < math.inf == fresh["best"]
    assert (fresh["share"], fresh["waited"]) == (kept["share"], 0)


def test_a_branch_without_steps_of_its_own_is_resumed_and_branched(tmp_path: Path, origin: Path) -> None:
    """As one that was killed before its next checkpoint: its schedule has not begun."""
    data, config = tmp_path / "prepared", START.changed({**ANNEAL, "schedule.warmup_steps": 0})
    with open_run(config, RunFolder(tmp_path / "new"), Dataset.open(data), branch=branch_point(f"{origin}@8")):
        pass
    other = config.changed({"optim.lr": config.optim.lr / 2})
    branch(f"{tmp_path / 'new'}@8", tmp_path / "second", data, other)
    run(other, tmp_path / "new", data, resume=True)
    assert difference(last_state(tmp_path / "second"), last_state(tmp_path / "new")) is None


def test_other_windows_of_evaluations_are_noted(tmp_path: Path, origin: Path) -> None:
    notes: list[tuple[str, ...]] = []
    config = START.changed({"loop.steps": 14, "eval.tokens": 32})
    branch(f"{origin}@8", tmp_path / "new", tmp_path / "prepared", config, lambda run: notes.append(run.notes))
    assert notes[0][-1].startswith("validation losses are measured on other windows from now on")


def test_branch_of_an_earlier_version_keeps_its_vocabulary(tmp_path: Path) -> None:
    """It had rows without a token, and its record does not say which."""
    data, old = prepared(tmp_path), tmp_path / "old"
    run(START.changed({"model.vocab_size": 64}), old, data)
    record = json.loads((old / "run.json").read_text())
    for name in ("vocab_padding", "vocab_multiple"):
        del record["config"]["model"][name]
    (old / "run.json").write_text(json.dumps(record))
    branch(f"{old}@8", tmp_path / "new", data, branch_point(f"{old}@8").config.changed({"loop.steps": 14}))
    assert RunFolder(tmp_path / "new").record().config.model.vocab_padding == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.n_layers": 2}, r"model\.n_layers: 1 then, 2 now"),
        ({"loop.steps": 8}, r"loop\.steps is 8, and 8 steps are done"),
        ({"schedule.start": 9}, r"schedule\.start is 9, and the next step is 9"),
    ],
)
def test_branch_refuses_what_the_state_does_not_fit(
    tmp_path: Path, origin: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(tensorkeep.UsageError, match=message):
        branch(f"{origin}@8", tmp_path / "new", tmp_path / "prepared", START.changed(changes))
    assert not (tmp_path / "new").exists()


def test_branch_is_not_made_where_a_run_is_and_needs_a_run(tmp_path: Path, origin: Path) -> None:
    with pytest.raises(tensorkeep.DestinationExistsError):
        branch(f"{origin}@8", origin, tmp_path / "prepared", START.changed({"loop.steps": 14}))
    with pytest.raises(tensorkeep.NotFoundError, match="step 9"):
        branch_point(f"{origin}@9")
    with pytest.raises(tensorkeep.NotFoundError, match="holds no run"):
        branch_point(tmp_path / "nothing")


def test_a_branch_that_has_lost_all_checkpoints_does_not_resume(tmp_path: Path, origin: Path) -> None:
    data, config = tmp_path / "prepared", START.changed({"loop.steps": 14})
    branch(f"{origin}@8", tmp_path / "new", data, config)
    shutil.rmtree(tmp_path / "new" / "checkpoints")
    before = (tmp_path / "new" / "log.jsonl").read_bytes()
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="lost all checkpoints of its run") as raised:
        run(config, tmp_path / "new", data, resume=True)
    assert raised.value.remedy == "copy step 8 or a later one back, or start the branch again in another --out"
    assert (tmp_path / "new" / "log.jsonl").read_bytes() == before
    assert RunFolder(tmp_path / "new").record().resumed == []
