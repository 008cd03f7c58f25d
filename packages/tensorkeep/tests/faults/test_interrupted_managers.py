"""A manager is interrupted at each file-system operation: every durable step is there, complete, and no other."""

import errno
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tensorkeep
from fault_cases import Choose, copy_tree, swept
from faults import injection as faults
from faults import power_loss
from tensorkeep import CheckpointManager
from tensorkeep.runs.pruned import FILE_NAME, read_pruned
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same


def state(number: int) -> dict[str, Any]:
    """Return a state that is mostly equal for all numbers."""
    state = {"frozen": torch.arange(4000.0), "slow": torch.arange(3000.0) * (1 + number * 2.0**-18)}
    return state | {"w": torch.full((2000,), float(number)), "step": number}


def start(root: Path, **arguments: Any) -> CheckpointManager:
    given = {"incremental": "delta", "threads": 2, **arguments}
    return CheckpointManager(root, **given)


def saves(number: int, value: int, arguments: dict[str, Any], **options: Any) -> Callable[[Path], None]:
    def work(root: Path) -> None:
        with start(root, **arguments) as manager:
            manager.save(number, state(value), metrics={"value": value}, **options)

    return work


def prunes(**arguments: Any) -> Callable[[Path], None]:
    def work(root: Path) -> None:
        with start(root, **arguments) as manager:
            manager.prune()

    return work


def delete_last(root: Path) -> None:
    with start(root) as manager:
        manager.delete(3)


# It starts in a folder in which another manager was killed.
clean_up = prunes()

States = dict[int, set[int]]
"""Which states each step may hold, by number; 0 stands for a step that does not exist."""


class Work(NamedTuple):
    """What a manager does, what may exist if it was interrupted, and what must exist if it returned."""

    do: Callable[[Path], None]
    allowed: States
    done: States


SAVED = {1: {1}, 2: {2}, 3: {3}}
AT_ONCE = {"asynchronous": False, "incremental": True, "compression": "none"}
SAVING = {
    "save": Work(saves(4, 4, {}), {**SAVED, 4: {0, 4}}, {**SAVED, 4: {4}}),
    "save at once": Work(saves(4, 4, AT_ONCE), {**SAVED, 4: {0, 4}}, {**SAVED, 4: {4}}),
    "replace": Work(saves(3, 30, {}, overwrite=True), {**SAVED, 3: {3, 30}}, {**SAVED, 3: {30}}),
    "save and prune": Work(
        saves(4, 4, {"keep_last": 2}), {1: {0, 1}, 2: {0, 2}, 3: {3}, 4: {0, 4}}, {1: {0}, 2: {0}, 3: {3}, 4: {4}}
    ),
}
WORKS = {
    **SAVING,
    "prune": Work(prunes(keep_last=1), {1: {0, 1}, 2: {0, 2}, 3: {3}}, {1: {0}, 2: {0}, 3: {3}}),
    "delete": Work(delete_last, {**SAVED, 3: {0, 3}}, {**SAVED, 3: {0}}),
    "start": Work(clean_up, SAVED, SAVED),
}
DEATHS = {"before": faults.die, "after": faults.die_after}
ERRORS = {name: getattr(errno, name) for name in ("ENOSPC", "EIO", "EROFS", "EDQUOT")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Work], Path]:
    """Return a function that makes a folder with three steps, in which a manager may have been killed."""
    folder = tmp_path_factory.mktemp("prepared")
    with start(folder / "steps") as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number), metrics={"value": number}).wait()

    def prepare(root: Path, work: Work) -> Path:
        source = folder / ("killed" if work.do is clean_up else "steps")
        if not source.exists():
            copy_tree(folder / "steps", source)

            def die() -> None:
                with faults.broken(fail_at=5, action=faults.die), start(source) as manager:
                    manager.save(4, state(4))

            assert faults.in_child(die) == signal.SIGKILL
            assert any(path.name.endswith(".tensorkeep-tmp") for path in source.iterdir())
        copy_tree(source, root)
        return root

    return prepare


Prepare = Callable[[Path, Work], Path]
_seen: dict[Callable[[Path], None], list[str]] = {}


def operations(work: Work, root: Path, prepared: Prepare) -> list[str]:
    """Return the names of the file-system operations; when first asked, check that the work was done."""
    if work.do not in _seen:
        prepared(root, work)
        with faults.broken() as seen:
            work.do(root)
        assert len(seen.seen) >= 2
        check(root, work.done)
        _seen[work.do] = seen.seen
    return _seen[work.do]


def check(root: Path, allowed: States) -> None:
    """Assert that each step is complete and allowed, and has left its metrics if it was deleted.

    A new manager can save, and no temporaries remain.
    """
    manager = start(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        latest = manager.latest()
    survey = manager.listing()
    assert not survey.broken
    there = {step.number for step in survey.steps}
    assert there <= set(allowed)
    for number, states in allowed.items():
        if number not in there:
            assert 0 in states, f"step {number} is gone"
            continue
        path = root / f"step-{number:06d}"
        assert tensorkeep.verify(path).ok
        assert any(same(tensorkeep.load(path), state(each)) for each in states - {0})
    pruned = read_pruned(root)
    assert set(SAVED) - there <= set(pruned) <= set(SAVED)
    assert all(step.metrics == {"value": number} for number, step in pruned.items())
    if latest is not None:
        assert latest.number == max(there)
    with start(root) as manager:
        manager.save(9, state(9)).wait()
        assert same(manager.restore(), state(9))
        visible = {f"step-{step.number:06d}" for step in manager.steps()}
    assert {path.name for path in root.iterdir()} - {FILE_NAME} == visible


@pytest.mark.integration
@pytest.mark.parametrize(("work", "action", "choose"), swept(WORKS, DEATHS, stride=43))
def test_killed_at_any_operation(tmp_path: Path, work: Work, action: Any, chosen: Choose, prepared: Prepare) -> None:
    for index in chosen(len(operations(work, tmp_path / "count", prepared))):
        root = prepared(tmp_path / str(index), work)

        def doomed(root: Path = root, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                work.do(root)

        assert faults.in_child(doomed) == signal.SIGKILL
        check(root, work.allowed)


@pytest.mark.integration  # as the folder for "start" is made by a killed process
@pytest.mark.parametrize(("work", "number", "choose"), swept(WORKS, ERRORS, stride=29))
def test_an_error_at_any_operation(tmp_path: Path, work: Work, number: int, chosen: Choose, prepared: Prepare) -> None:
    for index in chosen(len(operations(work, tmp_path / "count", prepared))):
        root = prepared(tmp_path / str(index), work)
        message = ""
        broken = faults.broken(fail_at=index, action=faults.raise_error(number))
        with warnings.catch_warnings(record=True, action="always") as caught, broken:
            try:
                work.do(root)
            except tensorkeep.StoreError as error:
                message = str(error)
        message += "".join(str(warning.message) for warning in caught)
        assert not message or os.strerror(number) in message
        # Without an error or a warning, the work was done.
        check(root, work.allowed if message else work.done)


@pytest.mark.parametrize(("work", "choose"), swept(SAVING, stride=29))
def test_short_writes_are_continued(tmp_path: Path, work: Work, chosen: Choose, prepared: Prepare) -> None:
    seen = operations(work, tmp_path / "count", prepared)
    writes = [index for index, operation in enumerate(seen) if operation == "pwrite"]
    for place in chosen(len(writes)):
        root = prepared(tmp_path / str(place), work)
        with faults.broken(fail_at=writes[place], action=faults.write_short):
            work.do(root)
        check(root, work.done)


@pytest.mark.integration  # as the folder for "start" is made by a killed process
@pytest.mark.parametrize(("work", "choose"), swept(WORKS, stride=59))
def test_power_is_lost_while_a_manager_works(tmp_path: Path, work: Work, chosen: Choose, prepared: Prepare) -> None:
    root = prepared(tmp_path / "run", work)
    with power_loss.recorded(root) as recording:
        work.do(root)
    assert len(recording.events) >= 2
    crashes = recording.crashes()
    for index in chosen(len(crashes)):
        crash, place = crashes[index], tmp_path / "case"
        crash.write_out(place)
        with case(crash):
            check(place, work.done if crash.returned else work.allowed)
        shutil.rmtree(place)
