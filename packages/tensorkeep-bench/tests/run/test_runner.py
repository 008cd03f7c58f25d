"""A run stores results after every cell, ends cleanly, and resumes with the next cell."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from tensorkeep.errors import BusyError, StoreError, UsageError
from tensorkeep_bench.experiment import ExperimentPlan, read_design
from tensorkeep_bench.results import Limits, Results, Status, read_results
from tensorkeep_bench.run.runner import SCRATCH, ExperimentRun, plan_results, scratch_folder
from tensorkeep_bench.workload import Outcome, Task

ARMS = ["one", "one (again)", "two", "three"]
Measure = Callable[[Task, Limits], Outcome]


@pytest.fixture
def planned() -> Results:
    """Return the planned results of an experiment of three arms and three blocks."""
    settings = {"model": "openllama-3b:scale=0.0005:layers=1", "slow_model": "openllama-3b:scale=0.0005:first-2"}
    arms = [
        {"name": "one", "settings": {"tool": "torch"}},
        {"name": "two", "settings": {"tool": "safetensors"}, "slow": True},
        {"name": "three", "settings": {"tool": "tensorkeep"}},
    ]
    plan = read_design({"runs": 3, "settings": settings, "arms": arms}, Path("small.json"))
    return plan_results(plan, "tensorkeep bench")


def measured(task: Task, limits: Limits | None = None) -> Outcome:
    figures = {"save": 1.0, "load_cold": 2.0, "load_warm": 3.0, "stored": 4.0, "returned": 0.5}
    return Outcome("ok", None, 10.0, figures, {"build": 1.0})


def execute(results: Results, folder: Path, measure: Measure = measured, progress: mock.Mock | None = None) -> Results:
    folder.mkdir(exist_ok=True)
    run = ExperimentRun(results, folder / "results.json", folder, measure)
    run.execute(progress or mock.Mock())
    return run.results


def on_disk(folder: Path) -> Results:
    return read_results(folder / "results.json")


def test_every_cell_is_run_once_in_blocks_on_the_model_of_its_arm(planned: Results, tmp_path: Path) -> None:
    tasks: list[Task] = []
    progress = mock.Mock()

    def run(task: Task, limits: Limits) -> Outcome:
        # Results are written after every cell.
        assert sum(cell.status == "ok" for cell in on_disk(tmp_path).cells) == len(tasks)
        assert list((tmp_path / SCRATCH).iterdir())
        assert not (tmp_path / task.directory).exists()
        tasks.append(task)
        return measured(task, limits)

    results = execute(planned, tmp_path, run, progress)
    assert sorted(task.arm for task in tasks[:4]) == sorted(ARMS)
    assert (sorted(task.arm for task in tasks), len({task.directory for task in tasks})) == (sorted(ARMS * 3), 12)
    # A cell of an arm is given the settings of the baseline.
    assert {task.arm: task.baseline for task in tasks} == {**{arm: {"tool": "torch"} for arm in ARMS}, "one": None}
    assert not (tmp_path / SCRATCH).exists()
    found = on_disk(tmp_path)
    assert found == results
    assert found.complete and str(found.finished) >= found.started
    assert found.statistics("two", "save").n == 3
    measures = {measure.name for measure in found.measures}
    assert measures >= {"save", "load_cold", "load_warm", "stored"} and "into_warm" not in measures
    assert found.environment["storage"]["free_bytes"] > 0
    assert [call.args[0].status for call in progress.mock_calls] == ["planned", "ok"] * 12
    started = [call.args[1:] for call in progress.mock_calls[::2]]
    assert (started[0], started[-1]) == ((0, 12, None), (11, 12, 10.0))
    # Slow arms work on the smaller model.
    amounts = {cell.arm: cell.amount for cell in results.cells}
    assert amounts["one"] == amounts["three"] == results.subject.bytes
    assert 0 < (amounts["two"] or 0) < (amounts["one"] or 0)
    [subject] = {cell.subject for cell in results.cells if cell.arm == "two"}
    assert str(subject).startswith("openllama-3b:scale=0.0005:first-2: 2 tensors, ")


def test_interrupted_run_resumes_on_the_same_machine(planned: Results, tmp_path: Path) -> None:
    ok = measured(mock.Mock())
    with pytest.raises(KeyboardInterrupt):
        execute(planned, tmp_path, mock.Mock(side_effect=[*[ok] * 5, KeyboardInterrupt]))
    found = on_disk(tmp_path)
    assert not (tmp_path / SCRATCH).exists()
    assert (found.complete, found.finished) == (False, None)
    assert found.statistics("one", "save").n >= 1
    done = [cell for cell in found.cells if cell.status == "ok"]
    assert len(done) == 5
    with mock.patch.dict(found.environment["versions"], torch="1.0"):
        with pytest.raises(UsageError, match="has changed since this run began"):
            execute(found, tmp_path)
        assert on_disk(tmp_path).environment["versions"]["torch"] != "1.0"
    run = mock.Mock(side_effect=measured)
    resumed = execute(found, tmp_path, run)
    assert [call.args[0].arm for call in run.mock_calls] == [cell.arm for cell in planned.cells][5:]
    assert resumed.complete
    assert [cell for cell in resumed.cells if cell.order < 5] == done


def test_full_disk_ends_the_run_and_is_tried_again(planned: Results, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"the disk was full in arm 'two'.*\n.*--resume"):
        execute(planned, tmp_path, without_two("disk"))
    assert not (tmp_path / SCRATCH).exists()
    found = on_disk(tmp_path)
    assert not found.complete and sum(cell.status == "disk" for cell in found.cells) == 1
    resumed = execute(found, tmp_path)
    assert resumed.complete and {cell.status for cell in resumed.cells} == {"ok"}


def without_two(status: Status) -> mock.Mock:
    """Return a measurement in which the arm two ends with this status."""
    return mock.Mock(side_effect=lambda task, _: Outcome(status, "why", 1.0) if task.arm == "two" else measured(task))


@pytest.mark.parametrize("status", ["failed", "timeout", "memory", "gate", "not-run"])
def test_failed_arm_is_not_repeated(status: Status, planned: Results, tmp_path: Path) -> None:
    run = without_two(status)
    results = execute(planned, tmp_path, run)
    arms = [call.args[0].arm for call in run.mock_calls]
    assert (arms.count("two"), arms.count("one")) == (1, 3)
    cells = [cell for cell in results.cells if cell.arm == "two"]
    assert [cell.status for cell in cells] == [status, "not-run", "not-run"]
    assert str(cells[2].reason).startswith("not repeated: in block 1 it ")
    verdict = "wrong result" if status == "gate" else "not run"
    assert results.complete and results.statistics("two", "save").verdict == verdict


def test_a_second_run_is_refused_and_files_of_a_killed_one_are_removed(planned: Results, tmp_path: Path) -> None:
    left = tmp_path / SCRATCH / "cell-3"
    left.mkdir(parents=True)
    (left / "state.pt").write_bytes(b"x")
    with scratch_folder(tmp_path) as scratch:
        assert list(scratch.iterdir()) == []
        (scratch / "y").write_bytes(b"y")
        with pytest.raises(BusyError, match="another bench is running in this folder"):
            execute(planned, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_refused_first_and_keeps_earlier_results(planned: Results, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("earlier")
    planned.experiment.settings["model"] = "openllama-3b:scale=16"
    with pytest.raises(StoreError, match="the measurement needs"):
        execute(planned, tmp_path, lambda task, limits: pytest.fail("ran"))
    assert (tmp_path / "results.json").read_text() == "earlier"


def test_folders_of_cells_do_not_depend_on_the_results_file(planned: Results, tmp_path: Path) -> None:
    """Everything in the folder of a cell is removed, so a results file from a stranger must not choose it."""
    arms = tuple(msgspec.structs.replace(arm, name=f"../../{arm.name}") for arm in planned.arms)
    cells = tuple(msgspec.structs.replace(cell, arm=f"../../{cell.arm}", order=7) for cell in planned.cells)
    run = mock.Mock(side_effect=measured)
    execute(msgspec.structs.replace(planned, arms=arms, cells=cells), tmp_path, run)
    folders = [call.args[0].directory for call in run.mock_calls]
    assert all(folder.startswith(str(tmp_path / SCRATCH / "cell-")) and ".." not in folder for folder in folders)
    # Its settings are validated, too.
    arms = tuple(msgspec.structs.replace(arm, settings={"tool": "rm"}) for arm in planned.arms)
    with pytest.raises(UsageError, match="the tool 'rm' does not exist"):
        execute(msgspec.structs.replace(planned, arms=arms), tmp_path, lambda task, limits: pytest.fail("ran"))


def fixed(gains: dict[str, list[float]]) -> Measure:
    """Return a measurement whose saves take 1 / gain seconds, by arm and block, and whose cells take 10 seconds."""

    def run(task: Task, limits: Limits) -> Outcome:
        found = gains.get(task.arm, [1.0])
        return Outcome("ok", None, 10.0, {"save": 1.0 / found[task.block % len(found)]})

    return run


def sequential(planned: Results, **changes: Any) -> Results:
    """Return a planned experiment of 8 blocks with a precision or a budget."""
    plan = ExperimentPlan(msgspec.structs.replace(planned.experiment, runs=8, **changes), planned.arms)
    return plan_results(plan, "tensorkeep bench")


def counted_runs(results: Results) -> list[int]:
    return [len(results.cells_by_arm[name]) for name in ARMS]


def test_an_arm_is_measured_until_its_gain_is_precise(planned: Results, tmp_path: Path) -> None:
    results = sequential(planned, precision=1.05)
    noisy = fixed({"two": [2.0, 2.002, 2.001], "three": [1.0, 3.0]})
    found = execute(results, tmp_path, noisy)
    assert counted_runs(found) == [8, 3, 3, 8]
    assert found.complete and found.finished
    # Baseline and control end with the last arm; one that failed keeps no other running.
    for name, measure in {"again": fixed({"two": [2.0], "three": [1.0]}), "failed": without_two("failed")}.items():
        assert counted_runs(execute(results, tmp_path / name, measure)) == [3, 3, 3, 3], name


def test_no_block_begins_that_would_exceed_the_budget(planned: Results, tmp_path: Path) -> None:
    for budget, blocks in ((1, 1), (79, 1), (80, 2), (130, 3)):
        found = execute(sequential(planned, budget=budget), tmp_path / str(budget), fixed({}))
        assert counted_runs(found) == [blocks] * 4


def test_the_time_left_of_an_arm_that_has_not_run_is_that_of_its_kind(tmp_path: Path) -> None:
    arms = [
        {"name": name, "slow": name[0] == "b", "settings": {"tool": "dcp", "threads": threads}}
        for threads, name in enumerate(("a 1", "a 2", "b 1", "b 2"), start=1)
    ]
    settings = {"model": "openllama-3b:scale=0.0005:layers=1", "slow_model": "openllama-3b:scale=0.0005:first-2"}
    plan = read_design({"runs": 2, "control": False, "settings": settings, "arms": arms}, Path("small.json"))
    progress, took = mock.Mock(), {"a": 10.0, "b": 100.0}

    def run(task: Task, limits: Limits) -> Outcome:
        return msgspec.structs.replace(measured(task), seconds=took[task.arm[0]])

    results = execute(plan_results(plan, "bench"), tmp_path, run, progress)
    order = [cell.arm[0] for cell in results.cells]
    estimates = [call.args[3] for call in progress.mock_calls[::2]]
    both = next(place for place in range(8) if {*order[:place]} == {"a", "b"})
    assert estimates[0] is None
    assert estimates[both:] == [sum(took[kind] for kind in order[place:]) for place in range(both, 8)]
