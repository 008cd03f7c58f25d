"""The checkpoint manager."""

import errno
import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults import injection as faults
from forked import ended, start
from tensorkeep import CheckpointManager, EverySteps, KeepBest, NotACheckpointError
from tensorkeep.testing.equality import same


def state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3000,), float(number)), "frozen": torch.arange(5000.0)}, "step": number}


def numbers(manager: CheckpointManager) -> list[int]:
    return [step.number for step in manager.steps()]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("incremental", [False, True, "delta"])
def test_steps_are_saved_and_found(tmp_path: Path, asynchronous: bool, incremental: Any) -> None:
    with CheckpointManager(tmp_path / "run", asynchronous=asynchronous, incremental=incremental) as manager:
        assert manager.latest() is None
        for number in (10, 20, 30):
            pending = manager.save(number, state(number), metrics={"loss": 1 / number})
            assert asynchronous or pending.done()
        manager.wait()
        assert numbers(manager) == [10, 20, 30]
        latest = manager.latest()
        assert latest is not None
        assert (latest.number, latest.metrics["loss"]) == (30, 1 / 30)
        assert same(manager.restore(), state(30))
        assert same(manager.restore(10), state(10))
        assert same(manager.restore(latest), state(30))
    assert names(tmp_path / "run") == ["step-000010", "step-000020", "step-000030"]


def test_a_step_is_a_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, state(7), metrics={"loss": float("nan"), "best": float("-inf")})
    assert same(tensorkeep.load(tmp_path / "step-000007"), state(7))
    assert tensorkeep.info(tmp_path / "step-000007").details["step"]["number"] == 7
    assert str(CheckpointManager(tmp_path).steps()[0].metrics["best"]) == "-inf"


def test_unwanted_steps_are_deleted_after_the_next_is_durable(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    real = tensorkeep.io.commit.Commit.publish

    def look(self: Any) -> None:
        seen.append(names(tmp_path))
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorkeep.io.commit.Commit.publish", look)
        with CheckpointManager(tmp_path, keep_last=2, keep_every=30) as manager:
            for number in range(10, 90, 10):
                manager.save(number, state(number))
                manager.wait()
    assert [[name for name in each if not name.startswith(".")] for each in seen[2:4]] == [
        ["step-000010", "step-000020"],
        ["step-000020", "step-000030"],
    ]
    assert names(tmp_path) == ["step-000030", "step-000060", "step-000070", "step-000080"]


def test_the_best_are_kept_and_found(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=1, keep_best=KeepBest(1, "loss")) as manager:
        for number, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0)]:
            manager.save(number, state(number), metrics={"loss": loss, "accuracy": -loss})
            manager.wait()
        assert numbers(manager) == [2, 4]
        best = manager.best()
        worst = manager.best("accuracy", "min")
        assert best is not None
        assert worst is not None
        assert (best.number, worst.number) == (2, 4)
        with pytest.raises(tensorkeep.UsageError, match="'los', only accuracy, loss"):
            manager.best("los")


def test_the_best_by_a_metric_and_mode_of_the_manager(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_best=2, metric="score", mode="max") as manager:
        for number, score in [(1, 3.0), (2, 1.0), (3, 5.0), (4, 2.0)]:
            manager.save(number, state(number), metrics={"score": score, "loss": score}).wait()
        assert numbers(manager) == [1, 3, 4]
        best, least = manager.best(), manager.best("loss")
    assert best is not None
    assert least is not None
    assert (best.number, least.number) == (3, 4)
    with pytest.raises(tensorkeep.UsageError, match="'score' does not say"):
        CheckpointManager(tmp_path, keep_best=2, metric="score")
    with pytest.raises(tensorkeep.UsageError, match="keep_best is a rule"):
        CheckpointManager(tmp_path, keep_best=KeepBest(1, "loss"), mode="max")


def test_a_mistyped_metric_deletes_nothing_and_warns(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, metric="val_loss", asynchronous=False)
    manager.save(0, state(0), metrics={"validation_loss": 1.0})
    with pytest.warns(UserWarning, match="not deleted: no step has the metric 'val_loss', only validation_loss"):
        manager.save(1, state(1), metrics={"validation_loss": 1.0})
    assert numbers(manager) == [0, 1]
    manager.close()


def test_a_saved_step_is_not_saved_again_unless_asked(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1)).wait()
        with pytest.raises(tensorkeep.DestinationExistsError, match="saved already"):
            manager.save(1, state(2))
        manager.save(1, state(2), overwrite=True).wait()
        assert same(manager.restore(1), state(2))


@pytest.mark.parametrize("number", [-1, 1.0, True, "1", 10**18])
def test_invalid_step_numbers_are_refused(tmp_path: Path, number: Any) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(tensorkeep.UsageError, match="not the number of a step"):
        manager.save(number, state(1))


def test_a_metric_must_be_a_number(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(tensorkeep.UsageError, match="metric 'loss' is 'low'"):
            manager.save(1, state(1), metrics={"loss": "low"})  # type: ignore[dict-item]
        manager.save(1, state(1), metrics={"loss": torch.tensor(0.5)}).wait()  # type: ignore[dict-item]
        assert manager.steps()[0].metrics == {"loss": 0.5}


def test_only_one_manager_writes(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path)
    first.save(1, state(1)).wait()
    second = CheckpointManager(tmp_path)
    assert numbers(second) == [1]  # reading is free
    with pytest.raises(tensorkeep.BusyError, match=f"process {os.getpid()}"):
        second.save(2, state(2))
    first.close()
    second.save(2, state(2)).wait()
    second.close()


def test_a_dead_writer_does_not_block(tmp_path: Path) -> None:
    def work() -> None:
        manager = CheckpointManager(tmp_path)
        manager.save(1, state(1)).wait()
        os.kill(os.getpid(), 9)

    assert faults.in_child(work) == 9
    with CheckpointManager(tmp_path) as manager:
        manager.save(2, state(2)).wait()
        assert numbers(manager) == [1, 2]


def test_a_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1)).wait()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    manager.close()
    with CheckpointManager(tmp_path) as other:
        other.save(2, state(2)).wait()
        assert numbers(other) == [1, 2]
    assert os.waitpid(child, os.WNOHANG) == (0, 0)  # the child lived all the time
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0


def test_broken_steps_are_passed_over_with_a_warning(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2, 3, 4):
            manager.save(number, state(number)).wait()
    (tmp_path / "step-000004" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-000003" / "model.safetensors", 10)
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-7").mkdir()
    manager = CheckpointManager(tmp_path)
    with pytest.warns(UserWarning) as caught:
        latest = manager.latest()
    assert latest is not None
    assert latest.number == 2
    assert [str(each.message).partition(":")[0] for each in caught] == [
        "step 3 is skipped",
        "step 4 is skipped",
        "step 9 is skipped",
    ]
    with pytest.warns(UserWarning):
        assert same(manager.restore(), state(2))
    assert set(manager.listing().broken) == {3, 4, 9}


def test_a_step_whose_bytes_are_damaged_is_passed_over_when_it_is_read(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, state(number)).wait()
    file = tmp_path / "step-000002" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    target = state(0)
    with pytest.warns(UserWarning, match="step-000002 is skipped"):
        restored = CheckpointManager(tmp_path).restore(into=target)
    assert same(restored, state(1))
    assert restored["model"]["w"] is target["model"]["w"]
    with pytest.raises(tensorkeep.CorruptCheckpointError):
        CheckpointManager(tmp_path).restore(2)


def test_an_empty_and_a_missing_folder(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        manager = CheckpointManager(root)
        assert manager.steps() == []
        assert manager.latest() is None
        assert manager.best() is None
        with pytest.raises(tensorkeep.NotACheckpointError, match="contains no steps"):
            manager.restore()
    with pytest.raises(tensorkeep.NotACheckpointError):
        CheckpointManager(tmp_path).restore(5)


def test_deleting(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).wait()
        manager.delete(2)
        manager.delete(manager.steps()[0])
        assert numbers(manager) == [3]
        assert same(manager.restore(), state(3))
        for call in (manager.delete, manager.restore):
            with pytest.raises(tensorkeep.NotFoundError, match="has no step 2\nthe nearest step is 3"):
                call(2)
        manager.delete(3)
        with pytest.raises(tensorkeep.NotFoundError, match="it has no steps"):
            manager.restore(3)
        assert names(tmp_path) == []
        manager.save(4, state(4)).wait()


def test_prune_dry_run_returns_the_steps_and_deletes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for number in range(5):
            manager.save(number, state(number)).wait()
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        assert [step.number for step in manager.prune(dry_run=True)] == [0, 1, 2]
        assert numbers(manager) == [0, 1, 2, 3, 4]
        manager.prune()
        assert numbers(manager) == [3, 4]


def test_the_next_save_raises_the_error_of_a_failed_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1)).wait()
    with faults.broken(fail_at=4, action=faults.raise_error(errno.ENOSPC)):
        manager.save(2, state(2))
        with pytest.raises(tensorkeep.StoreError, match="No space left"):
            manager.save(3, state(3))
    manager.save(3, state(3)).wait()
    assert numbers(manager) == [1, 3]
    manager.close()


def test_wait_and_close_raise_the_error_of_a_failed_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with faults.broken(fail_at=6, action=faults.raise_error(errno.EIO)):
        manager.save(2, state(2))
        with pytest.raises(tensorkeep.StoreError):
            manager.wait()
    manager.wait()  # the error was raised before
    broken = faults.broken(fail_at=4, action=faults.raise_error(errno.EIO))
    with broken, pytest.raises(tensorkeep.StoreError), manager:
        manager.save(3, state(3))
    broken = faults.broken(fail_at=4, action=faults.raise_error(errno.EIO))
    with broken, pytest.raises(ZeroDivisionError) as raised, manager:
        manager.save(3, state(3))
        raise ZeroDivisionError
    assert "was not saved" in raised.value.__notes__[0]


class Gate:
    """Delays every commit until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = tensorkeep.io.commit.Commit.publish

        def publish(commit: Any) -> None:
            self.open.wait(20)
            real(commit)

        monkeypatch.setattr("tensorkeep.io.commit.Commit.publish", publish)


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    manager = CheckpointManager(tmp_path)
    first = manager.save(1, state(1))
    threading.Timer(0.2, gate.open.set).start()
    second = manager.save(2, state(2))
    assert first.done()
    report = second.wait()
    assert report.stall_seconds > 0.1
    manager.close()


def test_a_queued_save_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    manager = CheckpointManager(tmp_path, when_busy="replace", incremental=True)
    pending = [manager.save(number, state(number)) for number in (1, 2, 3, 4)]
    gate.open.set()
    manager.wait()
    assert numbers(manager) == [1, 4]
    assert same(manager.restore(), state(4))
    for number in (1, 2):
        with pytest.raises(tensorkeep.BusyError, match="took its place"):
            pending[number].wait()
    assert pending[3].wait().base == str(tmp_path / "step-000001")
    manager.close()


def test_incremental_saves_continue_after_a_restart(tmp_path: Path) -> None:
    large = torch.arange(1_000_000.0)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.save(1, {"frozen": large, "w": torch.ones(10)}).wait()
    with CheckpointManager(tmp_path, incremental=True, keep_last=1) as manager:
        manager.restore()
        report = manager.save(2, {"frozen": large, "w": torch.zeros(10)}).wait()
        assert report.new_bytes < 100_000
        assert same(manager.restore(), {"frozen": large, "w": torch.zeros(10)})
        assert numbers(manager) == [2]


def test_an_unread_step_is_not_a_base(tmp_path: Path) -> None:
    """Its bytes may be damaged, and the right ones are in memory."""
    frozen = torch.arange(1_000_000.0)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for number in (1, 2):
            manager.save(number, {"frozen": frozen, "n": number})
    damaged = next((tmp_path / "step-000002").glob("from-*"))
    content = bytearray(damaged.read_bytes())
    content[2_000_000] ^= 1
    damaged.unlink()  # what is written now is a file of its own, no longer shared with step 1
    damaged.write_bytes(content)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        with pytest.warns(UserWarning, match="step-000002 is skipped"):
            assert manager.restore()["n"] == 1
        report = manager.save(2, {"frozen": frozen, "n": 2}, overwrite=True).wait()
        assert report.base == str(tmp_path / "step-000001")
        assert same(manager.restore(2), {"frozen": frozen, "n": 2})
    with CheckpointManager(tmp_path, incremental=True) as manager:
        assert manager.save(3, {"frozen": frozen, "n": 3}).wait().base is None


def test_due_asks_the_rule(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_when=EverySteps(5)) as manager:
        assert [number for number in range(12) if manager.due(number)] == [5, 10]
    with pytest.raises(tensorkeep.UsageError, match="no rule for when to save"):
        CheckpointManager(tmp_path).due(1)


@pytest.mark.parametrize(
    "arguments",
    [
        {"incremental": "yes"},
        {"incremental": "delta", "compression": "none"},
        {"when_busy": "panic"},
        {"memory_budget": "1MiB"},
        {"memory_budget": "128MiB", "when_busy": "replace"},
        {"keep_last": 0},
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(tensorkeep.UsageError):
        CheckpointManager(tmp_path, **arguments)


def test_a_budget_bounds_the_copies(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, memory_budget="160MiB") as manager:
        for number in range(2):
            tensor = torch.full((200 * 1024**2,), number, dtype=torch.uint8)
            report = manager.save(number, {"t": tensor}).wait()
            assert report.peak_buffer_bytes <= 160 * 1024**2
        assert same(manager.restore(), {"t": tensor})


def test_abandoned_temporaries_go_when_a_manager_starts(tmp_path: Path) -> None:
    def work() -> None:
        manager = CheckpointManager(tmp_path)
        manager.save(1, state(1)).wait()
        with faults.broken(fail_at=6, action=faults.die):
            manager.save(2, state(2)).wait()

    assert faults.in_child(work) == 9
    assert len(names(tmp_path)) == 2
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, state(5)).wait()
    assert names(tmp_path) == ["step-000001", "step-000005"]


def read_until(last: int, folder: Path) -> None:
    """Restore the latest step until it is the last one; each is complete."""
    warnings.simplefilter("error")
    manager, seen = CheckpointManager(folder), -1
    while seen < last:
        try:
            found = manager.restore()
        except NotACheckpointError:
            continue
        seen = found["step"]
        assert bool((found["model"]["w"] == seen).all()), found


@pytest.mark.slow
def test_many_readers_beside_a_writer(tmp_path: Path) -> None:
    outputs = [tmp_path / f"output-{number}" for number in range(2)]
    readers = [start(read_until, 19, tmp_path / "run", output=output) for output in outputs]
    with CheckpointManager(tmp_path / "run", keep_last=2, incremental=True) as manager:
        for number in range(20):
            manager.save(number, state(number))
    for reader, output in zip(readers, outputs, strict=True):
        assert ended(reader) == 0, output.read_text()


def test_the_command_line_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorkeep.cli.main import main

    with CheckpointManager(tmp_path) as manager:
        for number in range(6):
            manager.save(number, state(number), metrics={"loss": abs(number - 2.0)}).wait()
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--keep-best", "2", "--dry-run"]) == 0
    assert "would delete 3 steps, kept 3" in capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--keep-last", "1", "--keep-best", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in document["deleted"]] == [0, 1, 4]
    assert [step["step"] for step in document["kept"]] == [2, 3, 5]
    assert document["freed_bytes"] == sum(step["own_bytes"] for step in document["deleted"])
    assert main(["prune", str(tmp_path)]) == 2
    assert main(["prune", str(tmp_path / "none"), "--keep-last", "1"]) == 5
    os.truncate(tmp_path / "step-000003" / "model.safetensors", 10)
    capsys.readouterr()
    assert main(["prune", str(tmp_path), "--keep-last", "9"]) == 0
    assert "kept: step 3" in capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--keep-thinned", "1h:0", "1d:1h", "--broken"]) == 0
    assert names(tmp_path) == ["step-000002", "step-000005"]


def test_no_warning_without_a_reason(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, state(1)).wait()
            latest = manager.latest()
            assert latest is not None
            assert latest.number == 1
            assert same(manager.restore(), state(1))


def test_a_step_that_was_passed_over_is_saved_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for number in (1, 2, 3):
            manager.save(number, {"w": torch.full((1000,), float(number))}).wait()
    flip(next((tmp_path / "step-000003").glob("*.safetensors")), -1)
    cut = next((tmp_path / "step-000002").glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-1])
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="is skipped"):
            assert manager.restore()["w"][0] == 1
        for number in (3, 2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # step 3 is later than step 2
                manager.save(number, {"w": torch.full((1000,), 10.0 + number)}).wait()
            assert manager.restore(number)["w"][0] == 10 + number
        with pytest.raises(tensorkeep.DestinationExistsError):
            manager.save(3, {"w": torch.zeros(1)})


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
