"""A manager is interrupted at each file-system operation: every durable step is there, complete, and no other."""

import errno
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults import injection as faults
from faults.conftest import Choose
from tensorkeep import CheckpointManager
from tensorkeep.testing.equality import same


def state(number: int) -> dict[str, Any]:
    """Return a state that is mostly equal for all numbers."""
    return {
        "frozen": torch.arange(4000.0),
        "slow": torch.arange(3000.0) * (1 + number * 2.0**-18),
        "w": torch.full((2000,), float(number)),
        "step": number,
    }


def start(root: Path, **arguments: Any) -> CheckpointManager:
    given = {"incremental": "delta", "threads": 2, **arguments}
    return CheckpointManager(root, **given)


def with_steps(root: Path) -> None:
    with start(root) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).wait()


def save_next(root: Path) -> None:
    with start(root) as manager:
        manager.save(4, state(4))


def save_next_at_once(root: Path) -> None:
    with start(root, asynchronous=False, incremental=True, compression="none") as manager:
        manager.save(4, state(4))


def replace(root: Path) -> None:
    with start(root) as manager:
        manager.save(3, state(30), overwrite=True)


def thin_out(root: Path) -> None:
    with start(root, keep_last=1) as manager:
        manager.prune()


def save_and_thin_out(root: Path) -> None:
    with start(root, keep_last=2) as manager:
        manager.save(4, state(4))


def delete_last(root: Path) -> None:
    with start(root) as manager:
        manager.delete(3)


def clean_up(root: Path) -> None:
    """Start in a folder in which another manager was killed."""
    with start(root) as manager:
        manager.prune()


Work = Callable[[Path], None]
States = dict[int, set[int]]
"""Which states each step may hold, by number; 0 stands for a step that does not exist."""

WORKS: dict[str, tuple[Work, States, States]] = {
    # What may exist if it was interrupted, and what must exist if it returned.
    "save": (save_next, {1: {1}, 2: {2}, 3: {3}, 4: {0, 4}}, {1: {1}, 2: {2}, 3: {3}, 4: {4}}),
    "save at once": (save_next_at_once, {1: {1}, 2: {2}, 3: {3}, 4: {0, 4}}, {1: {1}, 2: {2}, 3: {3}, 4: {4}}),
    "replace": (replace, {1: {1}, 2: {2}, 3: {3, 30}}, {1: {1}, 2: {2}, 3: {30}}),
    "prune": (thin_out, {1: {0, 1}, 2: {0, 2}, 3: {3}}, {1: {0}, 2: {0}, 3: {3}}),
    "save and prune": (
        save_and_thin_out,
        {1: {0, 1}, 2: {0, 2}, 3: {3}, 4: {0, 4}},
        {1: {0}, 2: {0}, 3: {3}, 4: {4}},
    ),
    "delete": (delete_last, {1: {1}, 2: {2}, 3: {0, 3}}, {1: {1}, 2: {2}, 3: {0}}),
    "start": (clean_up, {1: {1}, 2: {2}, 3: {3}}, {1: {1}, 2: {2}, 3: {3}}),
}
PARAMETERS = [pytest.param(*value, id=name) for name, value in WORKS.items()]


def prepare(root: Path, work: Work) -> None:
    with_steps(root)
    if work is clean_up:

        def die() -> None:
            with faults.broken(fail_at=5, action=faults.die), start(root) as manager:
                manager.save(4, state(4))

        assert faults.in_child(die) == signal.SIGKILL
        assert any(path.name.endswith(".tensorkeep-tmp") for path in root.iterdir())


def operations(work: Work, root: Path) -> int:
    prepare(root, work)
    count = faults.count_operations(lambda: work(root))
    assert count >= 2
    return count


def check(root: Path, allowed: States) -> None:
    """Assert that each step is complete and allowed, that a new manager can save, and that no temporaries remain."""
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
    if latest is not None:
        assert latest.number == max(there)
    with start(root) as manager:
        manager.save(9, state(9)).wait()
        assert same(manager.restore(), state(9))
        visible = {f"step-{step.number:06d}" for step in manager.steps()}
    assert {path.name for path in root.iterdir()} == visible


@pytest.mark.parametrize(("work", "allowed", "done"), PARAMETERS)
@pytest.mark.parametrize("action", [faults.die, faults.die_after], ids=["before", "after"])
def test_killed_at_any_operation(
    tmp_path: Path,
    work: Work,
    allowed: States,
    done: States,
    action: faults.Action,
    choose: Choose,
    record_property: Any,
) -> None:
    chosen = choose(operations(work, tmp_path / "count"))
    check(tmp_path / "count", done)
    for index in chosen:
        root = tmp_path / str(index)
        prepare(root, work)

        def doomed(root: Path = root, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                work(root)

        assert faults.in_child(doomed) == signal.SIGKILL
        check(root, allowed)
    record_property("cases", len(chosen))


def fail_at(chosen: Choose, tmp_path: Path, work: Work, allowed: States, done: States, number: int) -> int:
    """Let the chosen operations fail, one in each run; return how many were chosen."""
    indices = chosen(operations(work, tmp_path / "count"))
    for index in indices:
        root = tmp_path / str(index)
        prepare(root, work)
        message = ""
        with (
            warnings.catch_warnings(record=True) as caught,
            faults.broken(fail_at=index, action=faults.raise_error(number)),
        ):
            warnings.simplefilter("always")
            try:
                work(root)
            except tensorkeep.StoreError as error:
                message = str(error)
        message += "".join(str(warning.message) for warning in caught)
        assert not message or os.strerror(number) in message
        # Without an error or a warning, the work was done.
        check(root, allowed if message else done)
    return len(indices)


@pytest.mark.parametrize(("work", "allowed", "done"), PARAMETERS)
@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        pytest.param(errno.EIO, marks=pytest.mark.slow),
        pytest.param(errno.EROFS, marks=pytest.mark.slow),
        pytest.param(errno.EDQUOT, marks=pytest.mark.slow),
    ],
    ids=errno.errorcode.get,
)
def test_an_error_at_any_operation(
    tmp_path: Path, work: Work, allowed: States, done: States, number: int, choose: Choose, record_property: Any
) -> None:
    cases = fail_at(choose, tmp_path, work, allowed, done, number)
    assert cases > 0
    record_property("cases", cases)


def test_an_exceeded_quota_at_any_operation_of_an_incremental_save(
    tmp_path: Path, choose: Choose, record_property: Any
) -> None:
    cases = fail_at(choose, tmp_path, *WORKS["save at once"], errno.EDQUOT)
    assert cases > 0
    record_property("cases", cases)


@pytest.mark.parametrize(("work", "allowed", "done"), PARAMETERS)
def test_short_writes_are_continued(
    tmp_path: Path, work: Work, allowed: States, done: States, choose: Choose, record_property: Any
) -> None:
    chosen = choose(operations(work, tmp_path / "count"))
    for index in chosen:
        root = tmp_path / str(index)
        prepare(root, work)
        with faults.broken(fail_at=index, action=faults.write_short):
            work(root)
        check(root, done)
    record_property("cases", len(chosen))
