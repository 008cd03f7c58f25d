"""The checkpoint manager."""

import errno
import json
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults import injection as faults
from tensorkeep import CheckpointManager, EverySteps, KeepBest, Retention, SaveOptions
from tensorkeep.cli.main import main
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in


def state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3000,), float(number)), "frozen": torch.arange(5000.0)}, "step": number}


def numbers(manager: CheckpointManager) -> list[int]:
    return [step.number for step in manager.steps()]


def run_of(folder: Path, *steps: int, **arguments: Any) -> Path:
    with CheckpointManager(folder, **arguments) as manager:
        for number in steps:
            manager.save(number, state(number)).wait()
    return folder


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
        assert (latest.number, latest.metrics["loss"]) == (30, 1 / 30)
        assert same(manager.restore(), state(30))
        assert same(manager.restore(10), state(10))
        assert same(manager.restore(latest), state(30))
    assert names_in(tmp_path / "run") == ["step-000010", "step-000020", "step-000030"]


def test_a_step_is_a_checkpoint_with_metrics(tmp_path: Path) -> None:
    given: dict[str, Any] = {"nan": float("nan"), "best": float("-inf"), "loss": torch.tensor(0.5)}
    with CheckpointManager(tmp_path, save_when=EverySteps(5)) as manager:
        manager.save(7, state(7), metrics=given)
        assert [number for number in range(12) if manager.due(number)] == [5, 10]
    assert same(tensorkeep.load(tmp_path / "step-000007"), state(7))
    assert tensorkeep.info(tmp_path / "step-000007").details["step"]["number"] == 7
    metrics = CheckpointManager(tmp_path).steps()[0].metrics
    assert (str(metrics["best"]), metrics["loss"]) == ("-inf", 0.5)


def test_unwanted_steps_are_deleted_after_the_next_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    real = tensorkeep.storage.commit.Commit.publish

    def look(self: Any, manifest: bytes) -> None:
        seen.append(names_in(tmp_path))
        real(self, manifest)

    monkeypatch.setattr("tensorkeep.storage.commit.Commit.publish", look)
    run_of(tmp_path, *range(10, 90, 10), keep_last=2, keep_every=30)
    assert [[name for name in each if not name.startswith(".")] for each in seen[2:4]] == [
        ["step-000010", "step-000020"],
        ["step-000020", "step-000030"],
    ]
    assert names_in(tmp_path) == ["step-000030", "step-000060", "step-000070", "step-000080"]


@pytest.mark.parametrize(
    ("rules", "kept", "found"),
    [
        ({"keep_last": 1, "keep_best": KeepBest(1, "loss")}, [2, 4], {(): 2, ("score", "min"): 4}),
        ({"keep_best": 2, "metric": "score", "mode": "max"}, [1, 2, 4], {(): 2, ("loss",): 2}),
    ],
)
def test_the_best_are_kept_and_found(tmp_path: Path, rules: Any, kept: list[int], found: dict[Any, int]) -> None:
    with CheckpointManager(tmp_path, **rules) as manager:
        for number, loss in [(1, 3.0), (2, 1.0), (3, 4.0), (4, 5.0)]:
            manager.save(number, state(number), metrics={"loss": loss, "score": -loss}).wait()
        assert numbers(manager) == kept
        assert {given: best.number for given in found if (best := manager.best(*given))} == found
        with pytest.raises(tensorkeep.UsageError, match="'los', only loss, score"):
            manager.best("los")


def test_a_mistyped_metric_deletes_nothing_and_warns(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1, keep_best=1, metric="val_loss", asynchronous=False)
    manager.save(0, state(0), metrics={"validation_loss": 1.0})
    with pytest.warns(UserWarning, match="not deleted: no step has the metric 'val_loss', only validation_loss"):
        manager.save(1, state(1), metrics={"validation_loss": 1.0})
    assert numbers(manager) == [0, 1]
    manager.close()


def test_only_one_manager_writes_and_a_saved_step_only_if_asked(tmp_path: Path) -> None:
    first = CheckpointManager(tmp_path)
    first.save(1, state(1)).wait()
    with pytest.raises(tensorkeep.DestinationExistsError, match="saved already"):
        first.save(1, state(2))
    first.save(1, state(2), overwrite=True).wait()
    assert same(first.restore(1), state(2))
    second = CheckpointManager(tmp_path)
    assert numbers(second) == [1]  # reading is free
    with pytest.raises(tensorkeep.BusyError, match=f"process {os.getpid()}"):
        second.save(2, state(2))
    first.close()
    second.save(2, state(2)).wait()
    second.close()


@pytest.mark.integration
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
    run_of(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-000004" / "manifest.json").unlink()
    os.truncate(tmp_path / "step-000003" / "model.safetensors", 10)
    for name in ("step-000009", "notes", "step-7"):
        (tmp_path / name).mkdir()
    manager = CheckpointManager(tmp_path)
    with pytest.warns(UserWarning) as caught:
        assert manager.latest().number == 2
    warned = [str(each.message).partition(":")[0] for each in caught]
    assert warned == [f"step {number} is skipped" for number in (3, 4, 9)]
    with pytest.warns(UserWarning):
        assert same(manager.restore(), state(2))
    assert set(manager.listing().broken) == {3, 4, 9}


def test_a_step_whose_bytes_are_damaged_is_passed_over_when_it_is_read_and_saved_again(tmp_path: Path) -> None:
    run_of(tmp_path, 1, 2, 3)
    faults.flip_bit(tmp_path / "step-000003" / "model.safetensors", -1)
    cut = tmp_path / "step-000002" / "model.safetensors"
    os.truncate(cut, cut.stat().st_size - 1)
    target = state(0)
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="step-000003 is skipped"):
            restored = manager.restore(into=target)
        assert same(restored, state(1))
        assert restored["model"]["w"] is target["model"]["w"]
        with pytest.raises(tensorkeep.CorruptCheckpointError):
            manager.restore(3)
        for number in (3, 2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # step 3 is later than step 2
                manager.save(number, state(10 + number)).wait()
            assert same(manager.restore(number), state(10 + number))
        with pytest.raises(tensorkeep.DestinationExistsError):
            manager.save(3, state(3))


def test_an_empty_and_a_missing_folder(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "none"):
        manager = CheckpointManager(root)
        assert (manager.steps(), manager.latest(), manager.best()) == ([], None, None)
        with pytest.raises(tensorkeep.NotACheckpointError, match="contains no steps"):
            manager.restore()
    with pytest.raises(tensorkeep.NotACheckpointError):
        CheckpointManager(tmp_path).restore(5)


def test_deleting_and_pruning(tmp_path: Path) -> None:
    with CheckpointManager(run_of(tmp_path, *range(5), incremental=True), keep_last=2, incremental=True) as manager:
        assert [step.number for step in manager.prune(dry_run=True)] == [0, 1, 2]
        assert numbers(manager) == [0, 1, 2, 3, 4]
        manager.prune()
        assert numbers(manager) == [3, 4]
        manager.delete(manager.steps()[0])
        assert numbers(manager) == [4]
        assert same(manager.restore(), state(4))
        for call in (manager.delete, manager.restore):
            with pytest.raises(tensorkeep.NotFoundError, match="has no step 2\nthe nearest step is 4"):
                call(2)
        manager.delete(4)
        with pytest.raises(tensorkeep.NotFoundError, match="it has no steps"):
            manager.restore(4)
        assert names_in(tmp_path) == []
        manager.save(5, state(5)).wait()


@contextmanager
def failing(number: int, error: type[BaseException] = tensorkeep.StoreError) -> Iterator[Any]:
    """Let a save fail with an error number, and expect an error."""
    with faults.broken(fail_at=4, action=faults.raise_error(number)), pytest.raises(error) as raised:
        yield raised


def test_the_error_of_a_failed_save_is_raised_once(tmp_path: Path) -> None:
    manager = CheckpointManager(run_of(tmp_path, 1))
    with failing(errno.ENOSPC) as raised:
        manager.save(2, state(2))
        manager.save(3, state(3))
    assert "No space left" in str(raised.value)
    manager.save(3, state(3)).wait()
    with failing(errno.EIO):
        manager.save(4, state(4))
        manager.wait()
    manager.wait()  # the error was raised before
    with failing(errno.EIO), manager:
        manager.save(4, state(4))
    with failing(errno.EIO, ZeroDivisionError) as raised, manager:
        manager.save(4, state(4))
        raise ZeroDivisionError
    assert "was not saved" in raised.value.__notes__[0]
    assert numbers(manager) == [1, 3]


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    manager = CheckpointManager(tmp_path)
    first = manager.save(1, state(1))
    saving = threading.Thread(target=manager.save, args=(2, state(2)))
    saving.start()
    saving.join(0.1)
    assert saving.is_alive(), "it did not wait"
    gate.set()
    saving.join()
    assert first.done()
    manager.close()
    assert numbers(manager) == [1, 2]


def test_a_queued_save_is_replaced(tmp_path: Path, gate: threading.Event) -> None:
    manager = CheckpointManager(tmp_path, when_busy="replace", incremental=True)
    pending = [manager.save(number, state(number)) for number in (1, 2, 3, 4)]
    gate.set()
    manager.wait()
    assert numbers(manager) == [1, 4]
    assert same(manager.restore(), state(4))
    for number in (1, 2):
        with pytest.raises(tensorkeep.BusyError, match="took its place"):
            pending[number].wait()
    assert pending[3].wait().base == str(tmp_path / "step-000001")
    manager.close()


def test_incremental_saves_continue_after_a_restart_on_a_step_that_was_read(tmp_path: Path) -> None:
    """The bytes of an unread one may be damaged, and the right ones are in memory."""
    frozen = torch.arange(1_000_000.0)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for number in (1, 2):
            manager.save(number, {"frozen": frozen, "n": number})
    damaged = next((tmp_path / "step-000002").glob("from-*"))
    content = damaged.read_bytes()
    damaged.unlink()  # what is written now is a file of its own, no longer shared with step 1
    damaged.write_bytes(content)
    faults.flip_bit(damaged, 2_000_000)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        with pytest.warns(UserWarning, match="step-000002 is skipped"):
            assert manager.restore()["n"] == 1
        report = manager.save(2, {"frozen": frozen, "n": 2}, overwrite=True).wait()
        assert report.base == str(tmp_path / "step-000001")
        assert same(manager.restore(2), {"frozen": frozen, "n": 2})
    with CheckpointManager(tmp_path, incremental=True) as manager:
        assert manager.save(3, {"frozen": frozen, "n": 3}).wait().base is None
    with CheckpointManager(tmp_path, incremental=True, keep_last=1) as manager:
        manager.restore()
        report = manager.save(4, {"frozen": frozen, "n": torch.zeros(10)}).wait()
        assert report.new_bytes < 100_000
        assert same(manager.restore(), {"frozen": frozen, "n": torch.zeros(10)})
        assert numbers(manager) == [4]


def test_keywords_are_fields_of_options_and_win_over_them(tmp_path: Path) -> None:
    rules, saving = Retention(keep_last=2, keep_every=9), SaveOptions(asynchronous=False)
    with CheckpointManager(tmp_path, retention=rules, saving=saving, keep_every=5) as manager:
        assert manager.keep == CheckpointManager(tmp_path, keep_last=2, keep_every=5).keep
        assert manager.save(1, state(1)).done()
    with pytest.raises(tensorkeep.UsageError, match="keep_local has no effect without local="):
        CheckpointManager(tmp_path / "c", keep_local=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'keep_latest'"):
        CheckpointManager(tmp_path, keep_latest=1)  # type: ignore[call-arg]


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        *({"incremental": "yes"}, {"incremental": "delta", "compression": "none"}, {"when_busy": "panic"}),
        *({"memory_budget": "1MiB"}, {"memory_budget": "128MiB", "when_busy": "replace"}, {"keep_last": 0}),
        *({"keep_best": 2, "metric": "score"}, {"keep_best": KeepBest(1, "loss"), "mode": "max"}),
    ]
    for arguments in wrong:
        with case(arguments), pytest.raises(tensorkeep.UsageError):
            CheckpointManager(tmp_path, **arguments)
    with pytest.raises(tensorkeep.UsageError, match="no rule for when to save"):
        CheckpointManager(tmp_path).due(1)
    saves: list[tuple[int, dict[str, Any], str]] = [
        (-1, {}, "not the number of a step"),
        (1, {"loss": "low"}, "metric 'loss' is 'low'"),
        *((1, metrics, "the metric") for metrics in ({"loss": 10**400}, {"\ud800": 1.0})),
    ]
    for number, metrics, message in saves:
        with case(message), CheckpointManager(tmp_path) as manager, pytest.raises(tensorkeep.UsageError, match=message):
            manager.save(number, state(1), metrics=metrics)
    assert names_in(tmp_path) == []


def test_the_command_line_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert names_in(tmp_path) == ["pruned.jsonl", "step-000002", "step-000005"]
