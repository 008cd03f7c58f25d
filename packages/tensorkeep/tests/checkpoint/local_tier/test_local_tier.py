"""Steps are saved to a disk, uploaded in the background, and never lost between the two."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch

import tensorkeep
from checkpoint.local_tier.copies import copy
from faults.injection import flip_bit
from forked import ended, start
from store_servers import Fault, FaultAt, JumpingClock, Proxy, always, damage, environment_of
from tensorkeep import CheckpointManager
from tensorkeep.paths import StorePath
from tensorkeep.runs import tiered
from tensorkeep.runs.backends import LocalBackend
from tensorkeep.runs.object_store import StoreBackend
from tensorkeep.storage import names_in, store_requests
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tiers import exhaustive

pytestmark = pytest.mark.integration
pytest.importorskip("obstore")

BUCKET = "s3://tiers"


def state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3000,), float(number)), "frozen": torch.arange(50_000.0)}, "step": number}


class Tier:
    """A run in the bucket that does not exist yet, with a local tier."""

    def __init__(self, url: str, disk: Path) -> None:
        self.url = url
        self.disk = disk

    def manager(self, **options: Any) -> CheckpointManager:
        return CheckpointManager(self.url, local=self.disk, **options)

    def step(self, number: int) -> Path:
        return self.disk / f"step-{number:06d}"

    def copy(self, number: int) -> StorePath:
        return StorePath(self.url) / f"step-{number:06d}"

    def on_disk(self) -> list[int]:
        return [step.number for step in CheckpointManager(self.disk).steps()]

    def in_store(self) -> list[int]:
        return [step.number for step in CheckpointManager(self.url).steps()]

    def both(self) -> tuple[list[int], list[int]]:
        """Return the steps on the disk and in the store."""
        return self.on_disk(), self.in_store()

    def stores_state(self, number: int, value: int | None = None) -> bool:
        """Return whether the step in the store is whole, and has the state of its number, or another one."""
        return same(tensorkeep.load(f"{self.url}@{number}"), state(number if value is None else value))

    def lose_an_object(self, number: int) -> None:
        store_requests.delete([StorePath(str(data_of(self.copy(number))))])


@pytest.fixture
def tier(bucket: Proxy, tmp_path: Path) -> Tier:
    return Tier(f"{BUCKET}/{tmp_path.name}", tmp_path / "disk")


def data_of(step: Path) -> Path:
    """Return the file or object of the tensors of a step."""
    return step / next(name for name in names_in(step) if name.startswith("model"))


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until another thread has come so far."""
    while not condition():
        time.sleep(0.001)


def save_each(manager: CheckpointManager, *numbers: int, upload: bool = True) -> None:
    """Save steps, and wait until each is uploaded, or until it is on the disk."""
    for number in numbers:
        manager.save(number, state(number)).wait()
        if upload:
            manager.wait()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what uploads wait for."""
    opened = threading.Event()
    real = tiered.copy_to_store

    def waits(*arguments: Any, **options: Any) -> Any:
        assert opened.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr(tiered, "copy_to_store", waits)
    return opened


@pytest.fixture
def broken(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Let every request fail; `Proxy.start_again` ends that."""
    server.start_again(Fault("503", always))
    yield server
    server.start_again(None)


def test_steps_are_saved_before_they_are_uploaded(tier: Tier, gate: threading.Event) -> None:
    with tier.manager() as manager:
        for number in (1, 2):
            report = manager.save(number, state(number), metrics={"loss": 1 / number}).wait()
            assert report.path == str(tier.step(number))
        assert [status.step for status in manager.uploads()] == [1, 2]
        assert manager.uploads()[1] == tensorkeep.UploadStatus(2, "waiting")
        assert tier.in_store() == []
        gate.set()
        manager.wait()
        assert manager.uploads() == []
        assert [step.number for step in manager.steps()] == [1, 2]
        best = manager.best()
        assert best is not None
        assert best.number == 2
    assert tier.in_store() == [1, 2]
    assert tier.stores_state(1)
    assert tensorkeep.verify(tier.url)


@pytest.mark.parametrize(
    ("rules", "disk", "store"),
    [
        ({"keep_local": 1, "keep_last": 3}, [5], [3, 4, 5]),
        # Without a number, the rules hold on the disk as well.
        ({"keep_local": None, "keep_last": 2, "keep_every": 2}, [2, 4, 5], [2, 4, 5]),
    ],
)
def test_the_rules_hold_in_the_store_and_the_disk_keeps_the_last_steps(
    tier: Tier, rules: dict[str, Any], disk: list[int], store: list[int]
) -> None:
    with tier.manager(**rules) as manager:
        save_each(manager, *range(1, 6))
        assert [step.number for step in manager.steps()] == store
    assert tier.both() == (disk, store)


def test_a_step_without_a_whole_copy_stays_on_the_disk(tier: Tier) -> None:
    with tier.manager(keep_local=1) as manager:
        save_each(manager, 2)
        shutil.copytree(tier.step(2), tier.step(1))
        save_each(manager, 3)
        assert tier.both() == ([1, 3], [2, 3])
        tier.lose_an_object(3)
        manager.save(4, state(4))
    assert tier.both() == ([1, 3, 4], [2, 4])


def test_steps_that_no_rule_keeps_any_more_are_not_uploaded(tier: Tier, gate: threading.Event) -> None:
    with tier.manager(keep_local=1, keep_last=1) as manager:
        save_each(manager, *range(1, 6), upload=False)
        gate.set()
    assert tier.both() == ([5], [5])
    # Of the others, the first one was being uploaded.
    assert set(names_in(StorePath(tier.url))) <= {"step-000001", "step-000005"}


def test_steps_that_were_deleted_from_the_store_are_not_uploaded_again(tier: Tier, server: Proxy) -> None:
    with tier.manager(keep_local=2, keep_last=1) as manager:
        save_each(manager, 1, 2)
    assert tier.both() == ([1, 2], [2])
    server.start_again(None)
    with tier.manager(keep_local=2, keep_last=1) as manager:
        manager.claim()
    assert not [request for request in server.requests if request.startswith("PUT")]


def test_a_step_is_restored_from_the_nearest_whole_copy(tier: Tier) -> None:
    with tier.manager() as manager:
        save_each(manager, 1, 2)
        into = state(0)
        with TestCase().assertLogs("tensorkeep", "INFO") as logged:
            manager.restore(into=into)
        assert same(into, state(2) | {"step": 0})
        assert str(manager.restored_from) == str(tier.step(2))
        assert f"read {tier.step(2)}" in str(logged.output)
        flip_bit(data_of(tier.step(2)), -1)
        assert same(manager.restore(), state(2))
        assert str(manager.restored_from) == str(tier.copy(2))
        assert same(manager.restore(1), state(1))
        assert str(manager.restored_from) == str(tier.step(1))
        shutil.rmtree(tier.step(1))
        assert same(manager.restore(1), state(1))
        assert str(manager.restored_from) == str(tier.copy(1))


def test_a_run_continues_on_another_machine(tier: Tier) -> None:
    with tier.manager(incremental=True) as manager:
        manager.save(1, state(1))
    shutil.rmtree(tier.disk)
    with tier.manager(incremental=True) as manager:
        latest = manager.latest()
        assert latest is not None
        assert latest.path == str(tier.copy(1))
        assert same(manager.restore(), state(1))
        manager.save(2, state(2))
    assert tier.in_store() == [1, 2]
    assert tier.stores_state(2)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_step_with_two_damaged_copies_is_saved_again_but_replaces_no_whole_copy(tier: Tier, replaced: bool) -> None:
    manager = tier.manager()
    save_each(manager, 1, 2)
    flip_bit(data_of(tier.step(2)), -1)
    damage(StorePath(str(data_of(tier.copy(2)))))
    with pytest.warns(UserWarning, match="step-000002 is skipped"):
        assert same(manager.restore(), state(1))
    refused: Any = nullcontext()
    if replaced:
        tensorkeep.save(state(9), str(tier.copy(2)), overwrite=True)
        refused = pytest.raises(tensorkeep.StoreError, match=r"1 step \(2\) could not be uploaded .*: exists already")
    manager.save(2, state(7))
    with refused:
        manager.close()
    assert tier.stores_state(2, 9 if replaced else 7)
    assert same(tensorkeep.load(f"{tier.disk}@2"), state(7))


def test_a_step_whose_copy_has_lost_an_object_is_uploaded_again_unless_others_are_in_its_place(tier: Tier) -> None:
    with tier.manager() as manager:
        manager.save(1, state(1))
    tier.lose_an_object(1)
    store_requests.put(tier.copy(1) / "notes.txt", b"kept by hand")
    manager = tier.manager(keep_local=1)
    manager.save(2, state(2))
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(1\) could not be uploaded .*notes.txt"):
        manager.close()
    assert tier.both() == ([1, 2], [2]), "it is not tried for ever"
    store_requests.delete([tier.copy(1) / "notes.txt"])
    with tier.manager(keep_local=1) as manager:
        save_each(manager, 3)
    assert tier.both() == ([3], [1, 2, 3])
    assert tier.stores_state(1)


def test_a_damaged_copy_that_appears_before_an_upload_is_replaced(tier: Tier, gate: threading.Event) -> None:
    with tier.manager() as manager:
        manager.save(1, state(1)).wait()
        copy(tier.step(1), tier.copy(1))
        tier.lose_an_object(1)
        gate.set()
    assert tier.stores_state(1)


@pytest.mark.parametrize("incremental", [*exhaustive(True), "delta"])
def test_a_chain_of_incremental_steps_is_uploaded_once(tier: Tier, incremental: Any) -> None:
    def save(*numbers: int) -> None:
        with tier.manager(incremental=incremental, keep_local=1, keep_last=2) as manager:
            if numbers[0] > 1:
                manager.restore()
            save_each(manager, *numbers)

    save(1, 2, 3)
    before = {each.key for each in store_requests.objects(StorePath(tier.url))}
    save(4, 5)  # another process, which finds what the store has
    added = [each for each in store_requests.objects(StorePath(tier.url)) if each.key not in before]
    assert sum(each.size for each in added if "manifest" not in each.key and "removed" not in each.key) < 100_000
    assert tier.in_store() == [4, 5]
    for number in (4, 5):
        assert tier.stores_state(number)
        assert tensorkeep.verify(f"{tier.url}@{number}")


def test_steps_that_are_uploaded_late_share_their_files(tier: Tier, gate: threading.Event) -> None:
    with tier.manager(incremental=True, keep_local=1) as manager:
        save_each(manager, 1, 2, 3, upload=False)
        gate.set()
    assert tier.on_disk() == [3]
    for number in (2, 3):
        assert sum(each.size for each in store_requests.objects(tier.copy(number))) < 100_000
        assert tier.stores_state(number)


def test_a_request_that_fails_once_is_not_reported_and_a_failed_step_may_be_deleted(tier: Tier, server: Proxy) -> None:
    manager = tier.manager()
    manager.claim()
    manager.wait()
    server.start_again(FaultAt("truncated", 0, 1))
    save_each(manager, 1)
    assert tier.in_store() == [1]
    server.start_again(Fault("500", always))
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(2\) could not be uploaded"):
        save_each(manager, 2)
    server.start_again(None)
    manager.delete(2)
    manager.close()
    assert tier.both() == ([1], [1])


def test_a_store_that_fails_is_tried_again(tier: Tier, broken: Proxy) -> None:
    manager = tier.manager(keep_local=1)
    with pytest.warns(UserWarning, match="steps are saved to .* uploaded later: .*cannot list it"):
        manager.save(1, state(1)).wait()
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(1\) could not be uploaded from") as caught:
        manager.wait()
    assert caught.value.path == tier.url
    assert "do-not-print" not in str(caught.value)
    assert [(status.step, status.state) for status in manager.uploads()] == [(1, "failed")]
    manager.save(2, state(2)).wait()
    wait_for(lambda: {status.state for status in manager.uploads()} == {"failed"})
    with pytest.warns(UserWarning, match="not in the store yet"):
        manager.save(3, state(3)).wait()
    assert tier.on_disk() == [1, 2, 3], "nothing leaves the disk that is not in the store"
    broken.start_again(None)
    manager.close()
    assert tier.both() == ([3], [1, 2, 3])


def test_no_save_waits_for_a_store_that_does_not_answer(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    for function in ("numbers", "listing"):
        real = getattr(StoreBackend, function)
        monkeypatch.setattr(StoreBackend, function, lambda place, real=real: answered.wait() and real(place))
    monkeypatch.setattr(JumpingClock, "patience", lambda clock, seconds: 0)
    with tier.manager() as manager:
        with pytest.warns(UserWarning, match="and uploaded later: .*no answer for 1 s"):
            save_each(manager, 1, 2, upload=False)
        assert tier.on_disk() == [1, 2]
        answered.set()
    assert tier.in_store() == [1, 2]


def test_without_the_store_steps_on_the_disk_are_used_and_the_next_manager_uploads_them(
    tier: Tier, broken: Proxy
) -> None:
    with pytest.raises(tensorkeep.StoreError, match="cannot list it"):
        tier.manager().latest()
    with (
        pytest.warns(UserWarning, match="uploaded later|not in the store yet"),
        pytest.raises(tensorkeep.StoreError, match=r"2 steps \(1, 2\) could not be uploaded"),
        tier.manager() as manager,
    ):
        save_each(manager, 1, 2, upload=False)
    with pytest.warns(UserWarning, match="only the steps of .* are found"):
        assert same(tier.manager().restore(), state(2))
    broken.start_again(None)
    with tier.manager() as manager:
        assert same(manager.restore(), state(2))
        manager.claim()
    assert tier.in_store() == [1, 2]


def save_steps(url: str, disk: Path, environment: dict[str, str]) -> None:
    """Save three steps; a process of its own."""
    os.environ.update(environment)
    with Tier(url, disk).manager(incremental=True) as manager:
        save_each(manager, 1, 2, 3, upload=False)


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("request_number", [9, *exhaustive(1, 3, 5, 7)])
def test_a_killed_process_leaves_its_steps_to_the_next(tier: Tier, server: Proxy, request_number: int) -> None:
    server.start_again(FaultAt("kill", request_number))
    output = tier.disk.with_name("output")
    process = start(save_steps, tier.url, tier.disk, environment_of(server.url), output=output)
    server.client.put(process.pid)
    assert ended(process) == -9, output.read_text()
    server.start_again(None)
    saved = tier.on_disk()
    with tier.manager(incremental=True) as manager:
        manager.claim()
    assert tier.in_store() == saved
    for number in saved:
        assert tier.stores_state(number)


def test_a_step_of_another_run_in_the_store_is_not_replaced(tier: Tier) -> None:
    with CheckpointManager(tier.url) as other:
        save_each(other, 1, 2)
    tensorkeep.save(state(7), tier.step(1))
    manager = tier.manager()
    with pytest.raises(tensorkeep.DestinationExistsError, match="saved already"):
        manager.save(2, state(1))
    with pytest.raises(tensorkeep.StoreError, match="another step of this number is in the store"):
        manager.wait()
    manager.delete(1)
    manager.save(2, state(9), overwrite=True)
    manager.close()
    assert tier.both() == ([2], [2])
    assert tier.stores_state(2, 9)


@pytest.mark.parametrize(("what", "message"), [("damaged", "was cut short"), ("deleted", "was deleted before")])
def test_a_damaged_step_does_not_hold_up_the_others(tier: Tier, gate: threading.Event, what: str, message: str) -> None:
    manager = tier.manager()
    save_each(manager, 1, 2, 3, upload=False)
    if what == "damaged":
        os.truncate(data_of(tier.step(2)), 100)
    else:
        shutil.rmtree(tier.step(2))
    gate.set()
    with pytest.raises(tensorkeep.StoreError, match=rf"1 step \(2\) could not be uploaded .*{message}"):
        manager.close()
    assert tier.in_store() == [1, 3]


def test_steps_are_deleted_and_pruned_in_both_places(tier: Tier) -> None:
    with tier.manager(keep_local=3) as manager:
        save_each(manager, *range(1, 6))
        manager.delete(1)
        manager.delete(5)
        with pytest.raises(tensorkeep.NotFoundError, match="the nearest steps are 2, 3, 4"):
            manager.delete(1)
    assert tier.both() == ([3, 4], [2, 3, 4])
    with tier.manager(keep_last=1) as manager:
        assert [step.number for step in manager.prune(dry_run=True)] == [2, 3]
        assert [step.number for step in manager.prune()] == [2, 3]
    assert tier.both() == ([4], [4])


def test_a_step_is_deleted_after_its_upload(tier: Tier, gate: threading.Event) -> None:
    with tier.manager() as manager:
        save_each(manager, 1, 2, 3, upload=False)
        manager.delete(2)  # waits
        deletion = threading.Thread(target=manager.delete, args=(1,))  # is being uploaded
        deletion.start()
        gate.set()
        deletion.join()
    assert tier.both() == ([3], [3])


def test_a_step_that_is_saved_again_replaces_its_copy(tier: Tier, gate: threading.Event) -> None:
    with tier.manager(incremental=True) as manager:
        manager.save(1, state(1)).wait()
        manager.save(1, state(2), overwrite=True).wait()  # while the first one is being uploaded
        gate.set()
        manager.wait()
        assert tier.stores_state(1, 2)
        manager.save(1, state(3), overwrite=True)
    assert tier.stores_state(1, 3)


def test_a_step_that_is_saved_again_is_not_removed_with_old_ones(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier.manager(keep_local=5) as manager:
        save_each(manager, 1, 2, 3)
    removing, saved = threading.Event(), threading.Event()
    real = LocalBackend.remove

    def remove(self: LocalBackend, path: Path) -> None:
        real(self, path)
        if path.name == "step-000001":
            removing.set()
            saved.wait(0.2)  # not longer: the save waits until this step is removed

    monkeypatch.setattr(LocalBackend, "remove", remove)
    with tier.manager(keep_local=1) as manager:
        manager.save(4, state(4)).wait()
        assert removing.wait(60)
        with pytest.warns(UserWarning, match="later ones"):
            manager.save(3, state(33), overwrite=True).wait()
        saved.set()
        manager.wait()
        assert manager.uploads() == []
    assert tier.stores_state(3, 33)
    assert 3 in tier.on_disk()


def test_a_failure_that_nobody_waits_for_is_logged_at_the_end(tier: Tier, broken: Proxy) -> None:
    code = "import sys, tensorkeep; tensorkeep.CheckpointManager(sys.argv[1], local=sys.argv[2]).save(1, {'step': 1})"
    command = [sys.executable, "-W", "ignore", "-c", code, tier.url, str(tier.disk)]
    environment = {**os.environ, "TENSORKEEP_STORE_TIMEOUT": "0.2"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"NOT UPLOADED: steps of {tier.disk}" in found.stderr
    assert tier.on_disk() == [1]


def interrupt_in_wait(manager: CheckpointManager) -> None:
    """Call `wait`, and press Ctrl-C once it waits for an upload, so that it comes nowhere else."""
    uploader = manager._backend._uploader  # type: ignore[attr-defined]

    def press() -> None:
        while not uploader._changed._waiters:
            if ended.wait(0.01):
                return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    ended = threading.Event()
    threading.Thread(target=press, daemon=True).start()
    try:
        manager.wait()
    finally:
        ended.set()


@pytest.mark.parametrize("ended", [True, False])
def test_uploads_that_ctrl_c_ended_are_made_up_for_at_the_end(tier: Tier, gate: threading.Event, ended: bool) -> None:
    manager = tier.manager()
    save_each(manager, 1, upload=False)
    with pytest.raises(KeyboardInterrupt):
        interrupt_in_wait(manager)
    if ended:
        gate.set()
        wait_for(lambda: [status.state for status in manager.uploads()] == ["waiting"])
        assert tier.in_store() == []
    else:
        threading.Timer(0.1, gate.set).start()  # until then the thread of the uploads is still ending
    manager.close()
    assert manager.uploads() == []
    assert tier.in_store() == [1]


class Interrupted(BaseException):
    """Stands for Ctrl-C at one instruction."""


def test_ctrl_c_before_the_uploads_start(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "tensorkeep-uploads":
            raise Interrupted
        real(thread)

    manager = tier.manager()
    with monkeypatch.context() as patches:
        patches.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(Interrupted):
            manager.claim()
    assert manager._backend._uploader._thread is None, "wait() would wait for ever"  # type: ignore[attr-defined]
    manager.save(1, state(1))
    manager.close()
    assert tier.in_store() == [1]


def test_ctrl_c_cannot_leave_the_lock_of_the_uploads_held(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    with tier.manager() as manager:
        uploader = manager._backend._uploader  # type: ignore[attr-defined]
        entered: list[Any] = []
        real = threading.Condition.__enter__

        def enter(condition: threading.Condition) -> bool:
            entered.append(condition)
            return real(condition)

        # It is written in Python: Ctrl-C can come between its last instruction and the block.
        monkeypatch.setattr(threading.Condition, "__enter__", enter)
        manager.save(1, state(1)).wait()
        manager.wait()
    assert not [condition for condition in entered if condition is uploader._changed]


def test_arguments(tier: Tier) -> None:
    errors: dict[tuple[type[tensorkeep.TensorkeepError], str], dict[str, Any]] = {
        (tensorkeep.UsageError, "keep_local is 0"): {"keep_local": 0},
        (tensorkeep.UsageError, "is a URL"): {"local": tier.url},
        (tensorkeep.UsageError, "is not a size"): {"upload_bytes_per_second": "fast"},
        (tensorkeep.UsageError, "upload_bytes_per_second is 0"): {"upload_bytes_per_second": 0},
        (tensorkeep.UsageError, "local= is for a run in an object store"): {"root": f"{tier.disk}-of-run"},
        (tensorkeep.UnsupportedError, "https:// is only read from"): {"root": "https://host.example/run"},
        (tensorkeep.NotFoundError, "its bucket does not exist"): {"root": "s3://no-such-bucket/run"},
    }
    for (kind, message), options in errors.items():
        with case(options), pytest.raises(kind, match=message):
            CheckpointManager(**{"root": tier.url, "local": tier.disk, **options}).save(1, state(1))
    assert CheckpointManager(tier.disk).uploads() == []


def test_the_bucket_keeps_the_metrics_of_all_steps_also_of_those_that_were_never_uploaded(
    tier: Tier, gate: threading.Event
) -> None:
    with tier.manager(keep_last=1, keep_local=1) as manager:
        for number in (1, 2, 3, 4):
            manager.save(number, state(number), metrics={"loss": 1 / number}).wait()
        gate.set()
        manager.wait()
        manager.save(5, state(5), metrics={"loss": 1 / 5}).wait()
    assert tier.both() == ([5], [5])
    expected = {number: {"loss": 1 / number} for number in (1, 2, 3, 4)}
    for place in (tier.url, tier.disk):
        assert {step.number: step.metrics for step in tensorkeep.log(place).pruned} == expected
    # Another machine, with an empty disk, deletes a step by hand.
    with CheckpointManager(tier.url, local=tier.disk.with_name("other")) as manager:
        manager.save(6, state(6)).wait()
        manager.wait()
        manager.delete(5)
    assert [step.number for step in tensorkeep.log(tier.url).pruned] == [1, 2, 3, 4, 5]
