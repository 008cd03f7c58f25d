"""The metrics of deleted steps: recorded before a step is deleted, whatever happens to the file."""

import errno
import json
import math
import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorkeep
from faults import injection as faults
from tensorkeep import CheckpointManager, Step
from tensorkeep.cli.main import main
from tensorkeep.runs import pruned
from tensorkeep.runs.pruned import FILE_NAME, PrunedSteps, read_pruned
from tensorkeep.storage.clock import Clock, use_clock

STATE = {"w": torch.ones(9)}


def save(root: Path, losses: dict[int, float], **options: Any) -> None:
    with CheckpointManager(root, **options) as manager:
        for number, loss in losses.items():
            manager.save(number, STATE, metrics={"loss": loss})


def losses_of(root: Path) -> dict[int, float]:
    return {number: step.metrics["loss"] for number, step in read_pruned(root).items()}


class Stopped(Clock):
    """A time of constant length, so that the same steps make a file of the same size."""

    def time(self) -> float:
        return 1000.0


def a_step(number: int, **metrics: float) -> Step:
    return Step(number, f"step-{number:06d}", 1000.0 + number, MappingProxyType(metrics), 0, 0)


def test_steps_leave_their_metrics_when_a_rule_a_call_or_the_command_deletes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, {number: 1 / number for number in range(1, 6)}, keep_last=3)
    assert losses_of(tmp_path) == {1: 1.0, 2: 0.5}
    with CheckpointManager(tmp_path) as manager:
        manager.delete(3)
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--json"]) == 0
    assert losses_of(tmp_path) == {number: 1 / number for number in range(1, 5)}


def test_every_kind_of_number_survives(tmp_path: Path) -> None:
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0, "e": 1e-320, "ä/loss\n": 0.1}
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        manager.save(1, STATE, metrics=metrics)
        manager.save(2, STATE)
    step = read_pruned(tmp_path)[1]
    assert repr(step.metrics) == repr(metrics)
    assert json.loads((tmp_path / FILE_NAME).read_text())["saved_at"] == step.saved_at


def test_a_run_without_metrics_has_no_file(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1) as manager:
        for number in (1, 2, 3):
            manager.save(number, STATE)
    assert not (tmp_path / FILE_NAME).exists()


def test_a_step_that_is_saved_again_replaces_its_record_and_a_return_drops_the_abandoned_branch(tmp_path: Path) -> None:
    save(tmp_path, {number: float(number) for number in (1, 2, 3, 4, 5)}, keep_best=1, metric="loss", keep_last=1)
    assert losses_of(tmp_path) == {2: 2.0, 3: 3.0, 4: 4.0}
    with CheckpointManager(tmp_path) as manager:
        manager.delete(5)
    # The run returns to step 1, its best one.
    save(tmp_path, {2: 20.0, 3: 30.0}, keep_last=1)
    assert losses_of(tmp_path) == {1: 1.0, 2: 20.0}


def test_an_earlier_step_that_is_saved_again_beside_later_ones_is_not_a_return(tmp_path: Path) -> None:
    save(tmp_path, {number: float(number) for number in (1, 2, 3, 4)}, keep_every=4, keep_last=1)
    with CheckpointManager(tmp_path) as manager, pytest.warns(UserWarning, match="there are later ones"):
        manager.save(1, STATE, metrics={"loss": 0.5})
    assert losses_of(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert tensorkeep.log(tmp_path).curves()["loss"] == [(1, 0.5), (2, 2.0), (3, 3.0), (4, 4.0)]


def test_a_step_without_metrics_hides_an_older_record_of_its_number(tmp_path: Path) -> None:
    log = PrunedSteps(tmp_path)
    log.add([a_step(1, loss=1.0)])
    log.add([a_step(1)])
    log.add([a_step(2)])
    assert read_pruned(tmp_path) == {}
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 2


def test_a_step_that_cannot_be_deleted_is_recorded_once(tmp_path: Path) -> None:
    save(tmp_path, {1: 1.0})
    (tmp_path / "step-000001" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="notes.txt"):
        save(tmp_path, {2: 2.0, 3: 3.0, 4: 4.0}, keep_last=1)
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 3


@given(
    st.lists(st.tuples(st.sampled_from(["prune", "return", "new process"]), st.integers(1, 6), st.integers(0, 3))),
    st.data(),
)
def test_a_file_that_is_cut_at_any_byte_keeps_its_whole_lines_and_can_be_continued(
    tmp_path_factory: pytest.TempPathFactory, works: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("run")
    log, expected = PrunedSteps(root), {}
    # What the file says after each of its sizes.
    states: dict[int, dict[int, float]] = {0: {}}
    with use_clock(Stopped()):
        for what, number, value in works:
            if what == "prune":
                log.add([a_step(number, loss=float(value))])
                expected[number] = float(value)
            elif what == "return":
                log.saved(number, list)
                # The step itself exists now; its record counts again only if the step is deleted.
                if any(other > number for other in expected):
                    expected = {other: loss for other, loss in expected.items() if other < number}
            else:
                log = PrunedSteps(root)
            path = root / FILE_NAME
            states[path.stat().st_size if path.exists() else 0] = dict(expected)
            assert losses_of(root) == expected
    content = path.read_bytes() if works and path.exists() else b""
    cut = data.draw(st.integers(0, len(content)))
    (root / FILE_NAME).write_bytes(content[:cut])
    # A line without its line break is whole as well.
    kept = states[max(size for size in states if size <= cut + 1)]
    assert losses_of(root) == kept
    PrunedSteps(root).add([a_step(9, loss=9.0)])
    assert losses_of(root) == kept | {9: 9.0}


@pytest.mark.parametrize("operation", ["append_lines", "first_bytes"])
def test_a_full_disk_is_pruned_and_the_metrics_are_recorded_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def fails(path: Path, argument: Any) -> Any:
        raise tensorkeep.StoreError("cannot be used: disk full", path=path)

    save(tmp_path, {1: 1.0})
    with CheckpointManager(tmp_path, keep_last=1, asynchronous=False) as manager:
        with monkeypatch.context() as broken, pytest.warns(UserWarning, match="not recorded yet: .*disk full"):
            broken.setattr(pruned, operation, fails)
            manager.save(2, STATE, metrics={"loss": 2.0})
        assert ([step.number for step in manager.steps()], losses_of(tmp_path)) == ([2], {})
        manager.save(3, STATE, metrics={"loss": 3.0})
    assert losses_of(tmp_path) == {1: 1.0, 2: 2.0}


@pytest.mark.parametrize("action", [faults.raise_error(errno.ENOSPC), faults.write_short], ids=["full", "short"])
def test_each_operation_of_an_append_may_fail(tmp_path: Path, action: faults.Action) -> None:
    def append(root: Path) -> PrunedSteps:
        log = PrunedSteps(root)
        log.add([a_step(1, loss=1.0)])
        return log

    (tmp_path / "count").mkdir()
    for index in range(faults.count_operations(lambda: append(tmp_path / "count"))):
        root = tmp_path / str(index)
        root.mkdir()
        with faults.broken(fail_at=index, action=action):
            log = append(root)
        warnings = log.take_warnings()
        # An error is reported, and what it left undone is done by the next call.
        assert all(os.strerror(errno.ENOSPC) in text for text in warnings)
        assert warnings or losses_of(root) == {1: 1.0}
        log.add(())
        assert (losses_of(root), log.take_warnings()) == ({1: 1.0}, [])


def test_hostile_lines_are_left_out(tmp_path: Path) -> None:
    good = b'{"step": 3, "saved_at": 1.0, "metrics": {"loss": 3.0}, "later": "field"}'
    bad = [
        *(b"[" * 100_000, b"\xff\x00", b"null", b'{"step": -1, "saved_at": 1, "metrics": {"loss": 1}}'),
        *(b'{"step": 1, "saved_at": 1, "metrics": {"loss": "x"}}', b'{"step": 1e3, "saved_at": 1}'),
        b'{"step": 3, "saved_at": 1.0, "metrics": {"lo',
    ]
    (tmp_path / FILE_NAME).write_bytes(b"\n".join([good, *bad]))
    assert losses_of(tmp_path) == {3: 3.0}
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    assert losses_of(tmp_path) == {}


def test_a_damaged_step_leaves_its_metrics_if_its_manifest_can_be_read(tmp_path: Path) -> None:
    save(tmp_path, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    for number in (1, 2):
        (tmp_path / f"step-00000{number}" / "model.safetensors").unlink()
    (tmp_path / "step-000003" / "manifest.json").write_bytes(b'{"format":"tensorkeep", "damaged')
    assert main(["prune", str(tmp_path), "--broken", "--yes"]) == 0
    assert losses_of(tmp_path) == {1: 1.0, 2: 2.0}
