"""A run stores results after every cell, ends cleanly, and resumes with the next cell."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tensorkeep.bench.experiment.library import read_experiment
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.experiment.workload import Outcome, Task
from tensorkeep.bench.results import Cell, Limits, Results, Status
from tensorkeep.bench.results_file import read_results
from tensorkeep.bench.run.runner import ExperimentRun, plan_results
from tensorkeep.bench.run.scratch import NAME, scratch_folder
from tensorkeep.errors import BusyError, StoreError, UsageError

ARMS = ["one", "one (again)", "two", "three"]
Measure = Callable[[Task, Limits], Outcome]


@pytest.fixture
def planned(tmp_path: Path) -> Results:
    """Return the planned results of an experiment of three arms and three blocks."""
    file = tmp_path / "experiment.json"
    settings = {"model": "openllama-3b:scale=0.0005:layers=1", "slow_model": "openllama-3b:scale=0.0005:first-2"}
    arms = [
        {"name": "one", "settings": {"tool": "torch"}},
        {"name": "two", "settings": {"tool": "safetensors"}, "slow": True},
        {"name": "three", "settings": {"tool": "tensorkeep"}},
    ]
    file.write_text(json.dumps({"name": "small", "runs": 3, "settings": settings, "arms": arms}))
    plan = read_experiment(file)
    file.unlink()
    return plan_results(plan, "tensorkeep bench")


class Events:
    """Records what a listener receives."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def preparing(self) -> None:
        self.events.append("preparing")

    def cell_started(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None:
        self.events.append((cell.arm, done, total, seconds_left))

    def cell_ended(self, cell: Cell) -> None:
        self.events.append(cell.status)


def measured(task: Task, limits: Limits) -> Outcome:
    figures = {"save": 1.0, "load_cold": 2.0, "load_warm": 3.0, "stored": 4.0, "returned": 0.5}
    return Outcome("ok", None, 10.0, figures, {"build": 1.0})


def execute(results: Results, folder: Path, measure: Measure = measured, listener: Events | None = None) -> Results:
    run = ExperimentRun(results, folder / "results.json", folder, measure)
    run.execute(listener or Events())
    return run.results


def on_disk(folder: Path) -> Results:
    return read_results(folder / "results.json")


def with_model(results: Results, model: str) -> Results:
    settings = {**results.experiment.settings, "model": model}
    return msgspec.structs.replace(results, experiment=msgspec.structs.replace(results.experiment, settings=settings))


def test_every_cell_is_run_once_in_blocks(planned: Results, tmp_path: Path) -> None:
    tasks, listener = [], Events()

    def run(task: Task, limits: Limits) -> Outcome:
        assert list((tmp_path / NAME).iterdir())
        assert not (tmp_path / task.directory).exists()
        tasks.append(task)
        return measured(task, limits)

    results = execute(planned, tmp_path, run, listener)
    assert sorted(task.arm for task in tasks[:4]) == sorted(ARMS)
    assert sorted(task.arm for task in tasks) == sorted(ARMS * 3)
    assert len({task.directory for task in tasks}) == 12
    assert not (tmp_path / NAME).exists()
    found = on_disk(tmp_path)
    assert found == results
    assert found.complete
    assert found.finished is not None
    assert found.finished >= found.started
    assert found.statistics("two", "save").n == 3
    assert {measure.name for measure in found.measures} >= {"save", "load_cold", "load_warm", "stored"}
    assert "into_warm" not in {measure.name for measure in found.measures}
    assert found.environment["storage"]["free_bytes"] > 0
    assert listener.events[0] == "preparing"
    assert listener.events[1][1:] == (0, 12, None)
    assert listener.events[-2][1:] == (11, 12, 10.0)


def test_slow_arms_work_on_the_smaller_model(planned: Results, tmp_path: Path) -> None:
    results = execute(planned, tmp_path)
    amounts = {cell.arm: cell.amount for cell in results.cells}
    assert amounts["one"] == amounts["three"] == results.subject.bytes
    assert 0 < (amounts["two"] or 0) < (amounts["one"] or 0)
    [subject] = {cell.subject for cell in results.cells if cell.arm == "two"}
    assert str(subject).startswith("openllama-3b:scale=0.0005:first-2: 2 tensors, ")


def test_results_are_written_after_every_cell(planned: Results, tmp_path: Path) -> None:
    counts = []

    def run(task: Task, limits: Limits) -> Outcome:
        counts.append(sum(cell.status == "ok" for cell in on_disk(tmp_path).cells))
        return measured(task, limits)

    execute(planned, tmp_path, run)
    assert counts == list(range(12))


def interrupt_at(number: int, error: BaseException) -> Measure:
    calls = []

    def run(task: Task, limits: Limits) -> Outcome:
        calls.append(task)
        if len(calls) == number:
            raise error
        return measured(task, limits)

    return run


def test_interrupted_run_resumes(planned: Results, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(planned, tmp_path, interrupt_at(6, KeyboardInterrupt()))
    found = on_disk(tmp_path)
    assert not (tmp_path / NAME).exists()
    assert sum(cell.status == "ok" for cell in found.cells) == 5
    assert (found.complete, found.finished) == (False, None)
    assert found.statistics("one", "save").n >= 1
    done = [cell for cell in found.cells if cell.status == "ok"]
    arms = []

    def run(task: Task, limits: Limits) -> Outcome:
        arms.append(task.arm)
        return measured(task, limits)

    resumed = execute(found, tmp_path, run)
    assert len(arms) == 7
    assert arms == [cell.arm for cell in planned.cells][5:]
    assert resumed.complete
    assert [cell for cell in resumed.cells if cell.order < 5] == done


def test_full_disk_ends_the_run_and_is_tried_again(planned: Results, tmp_path: Path) -> None:
    def run(task: Task, limits: Limits) -> Outcome:
        return Outcome("disk", "no space left", 1.0) if task.arm == "three" else measured(task, limits)

    with pytest.raises(StoreError, match=r"the disk was full in arm 'three'.*\n.*--resume"):
        execute(planned, tmp_path, run)
    assert not (tmp_path / NAME).exists()
    found = on_disk(tmp_path)
    assert not found.complete
    assert sum(cell.status == "disk" for cell in found.cells) == 1
    resumed = execute(found, tmp_path)
    assert resumed.complete
    assert {cell.status for cell in resumed.cells} == {"ok"}


@pytest.mark.parametrize("status", ["failed", "timeout", "memory", "gate", "not-run"])
def test_failed_arm_is_not_repeated(status: Status, planned: Results, tmp_path: Path) -> None:
    arms = []

    def run(task: Task, limits: Limits) -> Outcome:
        arms.append(task.arm)
        return Outcome(status, "why", 1.0) if task.arm == "two" else measured(task, limits)

    results = execute(planned, tmp_path, run)
    assert arms.count("two") == 1
    assert arms.count("one") == 3
    cells = [cell for cell in results.cells if cell.arm == "two"]
    assert [cell.status for cell in cells] == [status, "not-run", "not-run"]
    assert str(cells[2].reason).startswith("not repeated: in block 1 it ")
    assert results.complete
    assert results.statistics("two", "save").verdict == "not run"


def test_second_run_in_the_same_folder_is_refused(planned: Results, tmp_path: Path) -> None:
    with scratch_folder(tmp_path), pytest.raises(BusyError, match="another bench is running in this folder"):
        execute(planned, tmp_path)


def test_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    left = tmp_path / NAME / "cell-3"
    left.mkdir(parents=True)
    (left / "state.pt").write_bytes(b"x")
    with scratch_folder(tmp_path) as scratch:
        assert list(scratch.iterdir()) == []
        (scratch / "y").write_bytes(b"y")
    assert list(tmp_path.iterdir()) == []


def test_earlier_results_are_kept_until_a_run_has_begun(planned: Results, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("earlier")
    with pytest.raises(StoreError, match="the measurement needs"):
        execute(with_model(planned, "openllama-3b:scale=16"), tmp_path)
    assert (tmp_path / "results.json").read_text() == "earlier"


def test_run_does_not_resume_on_another_machine(planned: Results, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute(planned, tmp_path, interrupt_at(3, KeyboardInterrupt()))
    found = on_disk(tmp_path)
    found.environment["versions"]["torch"] = "1.0"
    with pytest.raises(UsageError, match="has changed since this run began"):
        execute(found, tmp_path)
    assert on_disk(tmp_path).environment["versions"]["torch"] != "1.0"


def test_folders_of_cells_do_not_depend_on_the_results_file(planned: Results, tmp_path: Path) -> None:
    """Everything in the folder of a cell is removed, so a results file from a stranger must not choose it."""
    arms = tuple(msgspec.structs.replace(arm, name=f"../../{arm.name}") for arm in planned.arms)
    cells = tuple(msgspec.structs.replace(cell, arm=f"../../{cell.arm}", order=7) for cell in planned.cells)
    folders = []

    def run(task: Task, limits: Limits) -> Outcome:
        folders.append(task.directory)
        return measured(task, limits)

    execute(msgspec.structs.replace(planned, arms=arms, cells=cells), tmp_path, run)
    assert all(folder.startswith(str(tmp_path / NAME / "cell-")) and ".." not in folder for folder in folders)


def test_settings_of_a_resumed_run_are_validated(planned: Results, tmp_path: Path) -> None:
    arms = tuple(msgspec.structs.replace(arm, settings={"tool": "rm"}) for arm in planned.arms)
    with pytest.raises(UsageError, match="the tool 'rm' does not exist"):
        execute(msgspec.structs.replace(planned, arms=arms), tmp_path, lambda task, limits: pytest.fail("ran"))


def test_too_little_disk_is_refused_before_anything_runs(planned: Results, tmp_path: Path) -> None:
    large = with_model(planned, "openllama-3b:scale=16")
    with pytest.raises(StoreError, match="the measurement needs"):
        execute(large, tmp_path, lambda task, limits: pytest.fail("ran"))


def fixed(gains: dict[str, list[float]]) -> Measure:
    """Return a measurement whose saves take 1 / gain seconds, by arm and block, and whose cells take 10 seconds."""

    def run(task: Task, limits: Limits) -> Outcome:
        found = gains.get(task.arm, [1.0])
        return Outcome("ok", None, 10.0, {"save": 1.0 / found[task.block % len(found)]})

    return run


def sequential(planned: Results, **changes: Any) -> Results:
    """Return a planned experiment of 8 blocks with a precision or a budget."""
    plan = Plan(msgspec.structs.replace(planned.experiment, runs=8, **changes), planned.arms)
    return plan_results(plan, "tensorkeep bench")


def counted_runs(results: Results) -> list[int]:
    return [len(results.cells_by_arm[name]) for name in ARMS]


def test_an_arm_is_measured_until_its_gain_is_precise(planned: Results, tmp_path: Path) -> None:
    results = sequential(planned, precision=1.05)
    noisy = fixed({"two": [2.0, 2.002, 2.001], "three": [1.0, 3.0]})
    found = execute(results, tmp_path, noisy)
    assert counted_runs(found) == [8, 3, 3, 8]
    assert found.complete
    assert found.finished is not None
    # Baseline and control end with the last arm.
    folder = tmp_path / "again"
    folder.mkdir()
    assert counted_runs(execute(results, folder, fixed({"two": [2.0], "three": [1.0]}))) == [3, 3, 3, 3]


def test_an_arm_that_failed_keeps_no_other_arm_running(planned: Results, tmp_path: Path) -> None:
    def run(task: Task, limits: Limits) -> Outcome:
        return Outcome("failed", "it broke", 1.0) if task.arm == "three" else fixed({})(task, limits)

    assert counted_runs(execute(sequential(planned, precision=1.05), tmp_path, run)) == [3, 3, 3, 3]


def test_no_block_begins_that_would_exceed_the_budget(planned: Results, tmp_path: Path) -> None:
    for budget, blocks in ((1, 1), (79, 1), (80, 2), (130, 3)):
        folder = tmp_path / str(budget)
        folder.mkdir()
        found = execute(sequential(planned, budget=budget), folder, fixed({}))
        assert counted_runs(found) == [blocks] * 4


def test_a_cell_of_an_arm_is_given_the_settings_of_the_baseline(planned: Results, tmp_path: Path) -> None:
    seen = {}

    def run(task: Task, limits: Limits) -> Outcome:
        seen[task.arm] = task.baseline
        return measured(task, limits)

    execute(planned, tmp_path, run)
    assert seen == {name: None if name == "one" else {"tool": "torch"} for name in ARMS}
