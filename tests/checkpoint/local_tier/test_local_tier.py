"""Steps are saved to a disk, uploaded in the background, and never lost between the two."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from forked import ended, start
from store_servers import Fault, FaultAt, Proxy, environment_of
from tensorkeep import CheckpointManager
from tensorkeep.checkpoint.local_tier.transfer import Throttle, Transfer, copy_to_store
from tensorkeep.checkpoint.manager.place import DiskPlace
from tensorkeep.formats.probe import names_in
from tensorkeep.io.objects import stores
from tensorkeep.io.parallel import Cancellation
from tensorkeep.paths import StorePath
from tensorkeep.testing.equality import same

pytest.importorskip("obstore")

BUCKET = "s3://tiers"


def state(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3000,), float(number)), "frozen": torch.arange(50_000.0)}, "step": number}


@pytest.fixture
def url(bucket: Proxy, tmp_path: Path) -> str:
    """Return the URL of a run that does not exist yet; ``tmp_path / "disk"`` is for its local tier."""
    return f"{BUCKET}/{tmp_path.name}"


def tiered(url: str, tmp_path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(url, local=tmp_path / "disk", **options)


def in_store(url: str) -> list[int]:
    return [step.number for step in CheckpointManager(url).steps()]


def on_disk(tmp_path: Path) -> list[int]:
    return [step.number for step in CheckpointManager(tmp_path / "disk").steps()]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what uploads wait for."""
    opened = threading.Event()
    real = copy_to_store

    def copy(*arguments: Any, **options: Any) -> Any:
        assert opened.wait(60)
        return real(*arguments, **options)

    monkeypatch.setattr("tensorkeep.checkpoint.local_tier.uploader.copy_to_store", copy)
    return opened


@pytest.fixture
def broken(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Let every request fail; `Proxy.start_again` ends that."""
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "1")
    server.start_again(Fault("503", lambda number: True))
    yield server
    server.start_again(None)


def test_steps_are_saved_before_they_are_uploaded(url: str, tmp_path: Path, gate: threading.Event) -> None:
    with tiered(url, tmp_path) as manager:
        for number in (1, 2):
            report = manager.save(number, state(number), metrics={"loss": 1 / number}).wait()
            assert report.path == str(tmp_path / "disk" / f"step-{number:06d}")
        assert [status.step for status in manager.uploads()] == [1, 2]
        assert manager.uploads()[1] == tensorkeep.UploadStatus(2, "waiting")
        assert in_store(url) == []
        gate.set()
        manager.wait()
        assert manager.uploads() == []
        assert [step.number for step in manager.steps()] == [1, 2]
        best = manager.best()
        assert best is not None
        assert best.number == 2
    assert in_store(url) == [1, 2]
    assert same(tensorkeep.load(f"{url}@1"), state(1))
    assert tensorkeep.verify(url)


def test_the_disk_keeps_the_last_steps_and_the_rules_hold_in_the_store(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path, keep_local=1, keep_last=3) as manager:
        for number in range(1, 6):
            manager.save(number, state(number))
            manager.wait()
        assert [step.number for step in manager.steps()] == [3, 4, 5]
    assert (on_disk(tmp_path), in_store(url)) == ([5], [3, 4, 5])


def test_without_a_number_the_rules_hold_on_the_disk_as_well(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path, keep_local=None, keep_last=2, keep_every=2) as manager:
        for number in range(1, 6):
            manager.save(number, state(number))
            manager.wait()
    assert on_disk(tmp_path) == in_store(url) == [2, 4, 5]


def test_a_step_that_was_not_uploaded_stays_on_the_disk(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path, keep_local=1) as manager:
        manager.save(2, state(2))
        manager.wait()
        shutil.copytree(tmp_path / "disk" / "step-000002", tmp_path / "disk" / "step-000001")
        manager.save(3, state(3))
    assert (on_disk(tmp_path), in_store(url)) == ([1, 3], [2, 3])


def test_steps_that_no_rule_keeps_any_more_are_not_uploaded(url: str, tmp_path: Path, gate: threading.Event) -> None:
    with tiered(url, tmp_path, keep_local=1, keep_last=1) as manager:
        for number in range(1, 6):
            manager.save(number, state(number)).wait()
        gate.set()
    assert (on_disk(tmp_path), in_store(url)) == ([5], [5])
    # Of the others, the first one was being uploaded.
    assert set(names_in(StorePath(url))) <= {"step-000001", "step-000005"}


def test_steps_that_were_deleted_from_the_store_are_not_uploaded_again(url: str, tmp_path: Path, server: Proxy) -> None:
    with tiered(url, tmp_path, keep_local=2, keep_last=1) as manager:
        for number in (1, 2):
            manager.save(number, state(number))
            manager.wait()
    assert (on_disk(tmp_path), in_store(url)) == ([1, 2], [2])
    server.start_again(None)
    with tiered(url, tmp_path, keep_local=2, keep_last=1) as manager:
        manager.claim()
    assert not [request for request in server.requests if request.startswith("PUT")]


def test_a_step_is_restored_from_the_nearest_whole_copy(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tensorkeep")
    with tiered(url, tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, state(number))
        manager.wait()
        into = state(0)
        manager.restore(into=into)
        assert same(into, state(2) | {"step": 0})
        assert str(manager.restored_from) == str(tmp_path / "disk" / "step-000002")
        assert f"read {tmp_path}/disk/step-000002" in caplog.text

        file = next((tmp_path / "disk" / "step-000002").glob("model*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        assert same(manager.restore(), state(2))
        assert str(manager.restored_from) == f"{url}/step-000002"
        assert same(manager.restore(1), state(1))
        assert str(manager.restored_from) == str(tmp_path / "disk" / "step-000001")

        shutil.rmtree(tmp_path / "disk" / "step-000001")
        assert same(manager.restore(1), state(1))
        assert str(manager.restored_from) == f"{url}/step-000001"


def test_a_run_continues_on_another_machine(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path, incremental=True) as manager:
        manager.save(1, state(1))
    shutil.rmtree(tmp_path / "disk")
    with tiered(url, tmp_path, incremental=True) as manager:
        latest = manager.latest()
        assert latest is not None
        assert latest.path == f"{url}/step-000001"
        assert same(manager.restore(), state(1))
        manager.save(2, state(2))
    assert in_store(url) == [1, 2]
    assert same(tensorkeep.load(f"{url}@2"), state(2))


def test_both_copies_damaged_is_an_earlier_step(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path) as manager:
        for number in (1, 2):
            manager.save(number, state(number))
        manager.wait()
        for copy in (tmp_path / "disk" / "step-000002", StorePath(f"{url}/step-000002")):
            damage(copy)
        with pytest.warns(UserWarning, match="step-000002 is skipped"):
            assert same(manager.restore(), state(1))
        manager.save(2, state(7))
    assert same(tensorkeep.load(f"{url}@2"), state(7))


def test_a_whole_copy_in_place_of_a_damaged_one_is_not_replaced(url: str, tmp_path: Path) -> None:
    with (
        pytest.raises(tensorkeep.StoreError, match=r"1 step \(2\) could not be uploaded .*: exists already"),
        tiered(url, tmp_path) as manager,
    ):
        for number in (1, 2):
            manager.save(number, state(number))
        manager.wait()
        for copy in (tmp_path / "disk" / "step-000002", StorePath(f"{url}/step-000002")):
            damage(copy)
        with pytest.warns(UserWarning, match="step-000002 is skipped"):
            manager.restore()
        tensorkeep.save(state(9), f"{url}/step-000002", overwrite=True)
        manager.save(2, state(7))
    assert same(tensorkeep.load(f"{url}@2"), state(9))
    assert same(tensorkeep.load(tmp_path / "disk@2"), state(7))


def damage(copy: Path) -> None:
    """Flip the last bit of the tensors of a step."""
    name = next(name for name in names_in(copy) if name.startswith("model"))
    if isinstance(copy, StorePath):
        content = bytearray(stores.get(copy / name))
        content[-1] ^= 1
        stores.put(copy / name, bytes(content))
    else:
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)


def lose_an_object(url: str, number: int) -> None:
    step = StorePath(f"{url}/step-{number:06d}")
    stores.delete([next(step / name for name in names_in(step) if name.startswith("model"))])


def test_a_step_whose_copy_has_lost_an_object_is_uploaded_again(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path) as manager:
        manager.save(1, state(1))
    lose_an_object(url, 1)
    with tiered(url, tmp_path, keep_local=1) as manager:
        for number in (2, 3):
            manager.save(number, state(number))
            manager.wait()
    assert (on_disk(tmp_path), in_store(url)) == ([3], [1, 2, 3])
    assert same(tensorkeep.load(f"{url}@1"), state(1))


def test_a_step_whose_copy_was_damaged_while_another_was_uploaded_stays_on_the_disk(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path, keep_local=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        lose_an_object(url, 1)
        manager.save(2, state(2))
    assert (on_disk(tmp_path), in_store(url)) == ([1, 2], [2])


def test_a_damaged_copy_that_appears_before_an_upload_is_replaced(
    url: str, tmp_path: Path, gate: threading.Event
) -> None:
    with tiered(url, tmp_path) as manager:
        manager.save(1, state(1)).wait()
        disk, copy = tmp_path / "disk" / "step-000001", StorePath(f"{url}/step-000001")
        copy_to_store(disk, copy, Transfer(Throttle(None), Cancellation(), lambda *_: None), overwrite=False)
        lose_an_object(url, 1)
        gate.set()
    assert same(tensorkeep.load(f"{url}@1"), state(1))


def test_a_damaged_copy_beside_other_objects_is_reported_and_not_tried_for_ever(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path) as manager:
        manager.save(1, state(1))
    lose_an_object(url, 1)
    stores.put(StorePath(f"{url}/step-000001/notes.txt"), b"kept by hand")
    manager = tiered(url, tmp_path, keep_local=1)
    manager.save(2, state(2))
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(1\) could not be uploaded .*notes.txt"):
        manager.close()
    assert (on_disk(tmp_path), in_store(url)) == ([1, 2], [2])


@pytest.mark.parametrize("incremental", [True, "delta"])
def test_a_chain_of_incremental_steps_is_uploaded_once(url: str, tmp_path: Path, incremental: Any) -> None:
    def save(*numbers: int) -> None:
        with tiered(url, tmp_path, incremental=incremental, keep_local=1, keep_last=2) as manager:
            if numbers[0] > 1:
                manager.restore()
            for number in numbers:
                manager.save(number, state(number))
                manager.wait()

    save(1, 2, 3)
    before = {each.key for each in stores.objects(StorePath(url))}
    save(4, 5)  # another process, which finds what the store has
    added = [each for each in stores.objects(StorePath(url)) if each.key not in before]
    assert sum(each.size for each in added if "manifest" not in each.key and "removed" not in each.key) < 100_000
    assert in_store(url) == [4, 5]
    for number in (4, 5):
        assert same(tensorkeep.load(f"{url}@{number}"), state(number))
        assert tensorkeep.verify(f"{url}@{number}")


def test_steps_that_are_uploaded_late_share_their_files(url: str, tmp_path: Path, gate: threading.Event) -> None:
    with tiered(url, tmp_path, incremental=True, keep_local=1) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).wait()
        gate.set()
    assert on_disk(tmp_path) == [3]
    for number in (2, 3):
        assert sum(each.size for each in stores.objects(StorePath(url) / f"step-{number:06d}")) < 100_000
        assert same(tensorkeep.load(f"{url}@{number}"), state(number))


def test_a_request_that_fails_once_is_not_reported(url: str, tmp_path: Path, server: Proxy) -> None:
    with tiered(url, tmp_path) as manager:
        manager.claim()
        manager.wait()
        server.start_again(FaultAt("truncated", 0, 1))
        manager.save(1, state(1))
    assert in_store(url) == [1]


def test_a_store_that_fails_is_tried_again(url: str, tmp_path: Path, broken: Proxy) -> None:
    manager = tiered(url, tmp_path, keep_local=1)
    with pytest.warns(UserWarning, match="steps are saved to .* uploaded later: .*cannot list it"):
        manager.save(1, state(1)).wait()
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(1\) could not be uploaded from") as caught:
        manager.wait()
    assert caught.value.path == url
    assert "do-not-print" not in str(caught.value)
    assert [(status.step, status.state) for status in manager.uploads()] == [(1, "failed")]
    manager.save(2, state(2)).wait()
    while {status.state for status in manager.uploads()} != {"failed"}:
        time.sleep(0.01)
    with pytest.warns(UserWarning, match="not in the store yet"):
        manager.save(3, state(3)).wait()
    assert on_disk(tmp_path) == [1, 2, 3], "nothing leaves the disk that is not in the store"
    broken.start_again(None)
    manager.close()
    assert (on_disk(tmp_path), in_store(url)) == ([3], [1, 2, 3])


def test_a_step_that_failed_and_was_deleted_is_forgotten(
    url: str, tmp_path: Path, server: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "1")
    manager = tiered(url, tmp_path)
    manager.claim()
    manager.wait()
    server.start_again(Fault("500", lambda number: True))
    manager.save(1, state(1)).wait()
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(1\) could not be uploaded"):
        manager.wait()
    server.start_again(None)
    manager.delete(1)
    manager.close()
    assert (on_disk(tmp_path), in_store(url)) == ([], [])


def test_a_manager_that_was_closed_without_the_store_leaves_its_steps_to_the_next(
    url: str, tmp_path: Path, broken: Proxy
) -> None:
    with (
        pytest.warns(UserWarning, match="uploaded later"),
        pytest.raises(tensorkeep.StoreError, match=r"2 steps \(1, 2\) could not be uploaded"),
        tiered(url, tmp_path) as manager,
    ):
        for number in (1, 2):
            manager.save(number, state(number)).wait()
    broken.start_again(None)
    with tiered(url, tmp_path) as manager:
        assert same(manager.restore(), state(2))
        manager.claim()
    assert in_store(url) == [1, 2]


def save_steps(url: str, disk: Path, environment: dict[str, str]) -> None:
    """Save three steps; a process of its own."""
    os.environ.update(environment)
    with CheckpointManager(url, local=disk, incremental=True) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).wait()


@pytest.mark.parametrize("request_number", [1, 3, 5, 7, 9])
def test_a_killed_process_leaves_its_steps_to_the_next(
    url: str, tmp_path: Path, server: Proxy, request_number: int
) -> None:
    server.start_again(FaultAt("kill", request_number))
    process = start(save_steps, url, tmp_path / "disk", environment_of(server.url), output=tmp_path / "out")
    server.client = process.pid
    assert ended(process) == -9, (tmp_path / "out").read_text()
    server.start_again(None)
    saved = on_disk(tmp_path)
    with tiered(url, tmp_path, incremental=True) as manager:
        manager.claim()
    assert in_store(url) == saved
    for number in saved:
        assert same(tensorkeep.load(f"{url}@{number}"), state(number))


def test_a_step_of_another_run_in_the_store_is_not_replaced(url: str, tmp_path: Path) -> None:
    with CheckpointManager(url) as other:
        other.save(1, state(9))
    with tiered(url, tmp_path) as manager:
        with pytest.raises(tensorkeep.DestinationExistsError, match="saved already"):
            manager.save(1, state(1))
        manager.save(1, state(2), overwrite=True)
    assert same(tensorkeep.load(f"{url}@1"), state(2))


def test_a_step_that_differs_from_that_in_the_store_is_reported(url: str, tmp_path: Path) -> None:
    with CheckpointManager(url) as other:
        other.save(1, state(9))
    tensorkeep.save(state(1), tmp_path / "disk" / "step-000001")
    manager = tiered(url, tmp_path)
    manager.claim()
    with pytest.raises(tensorkeep.StoreError, match="another step of this number is in the store"):
        manager.wait()
    assert same(tensorkeep.load(f"{url}@1"), state(9))
    manager.delete(1)
    manager.close()
    assert (on_disk(tmp_path), in_store(url)) == ([], [])


def test_a_damaged_step_does_not_hold_up_the_others(url: str, tmp_path: Path, gate: threading.Event) -> None:
    manager = tiered(url, tmp_path)
    for number in (1, 2, 3):
        manager.save(number, state(number)).wait()
    file = next((tmp_path / "disk" / "step-000002").glob("model*"))
    file.write_bytes(file.read_bytes()[:-1])
    gate.set()
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(2\) could not be uploaded .*was cut short"):
        manager.close()
    assert in_store(url) == [1, 3]


def test_steps_are_deleted_in_both_places(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path, keep_local=1) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number))
        manager.wait()
        manager.delete(1)
        manager.delete(3)
        with pytest.raises(tensorkeep.NotFoundError, match="the nearest step is 2"):
            manager.delete(1)
    assert (on_disk(tmp_path), in_store(url)) == ([], [2])


def test_a_step_is_deleted_after_its_upload(url: str, tmp_path: Path, gate: threading.Event) -> None:
    with tiered(url, tmp_path) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number)).wait()
        manager.delete(2)  # waits
        deletion = threading.Thread(target=manager.delete, args=(1,))  # is being uploaded
        deletion.start()
        gate.set()
        deletion.join()
    assert (on_disk(tmp_path), in_store(url)) == ([3], [3])


def test_a_step_that_is_saved_again_replaces_its_copy(url: str, tmp_path: Path, gate: threading.Event) -> None:
    with tiered(url, tmp_path, incremental=True) as manager:
        manager.save(1, state(1)).wait()
        manager.save(1, state(2), overwrite=True).wait()  # while the first one is being uploaded
        gate.set()
        manager.wait()
        assert same(tensorkeep.load(f"{url}@1"), state(2))
        manager.save(1, state(3), overwrite=True)
    assert same(tensorkeep.load(f"{url}@1"), state(3))


def test_a_step_that_is_saved_again_is_not_removed_with_old_ones(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(url, tmp_path, keep_local=5) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number))
    removing, saved = threading.Event(), threading.Event()
    real = DiskPlace.remove

    def remove(self: DiskPlace, path: Path) -> None:
        real(self, path)
        if path.name == "step-000001":
            removing.set()
            saved.wait(0.5)  # not longer: the save waits until this step is removed

    monkeypatch.setattr(DiskPlace, "remove", remove)
    with tiered(url, tmp_path, keep_local=1) as manager:
        manager.save(4, state(4)).wait()
        assert removing.wait(10)
        with pytest.warns(UserWarning, match="later ones"):
            manager.save(3, state(33), overwrite=True).wait()
        saved.set()
        manager.wait()
        assert manager.uploads() == []
    assert same(tensorkeep.load(f"{url}@3"), state(33))
    assert 3 in on_disk(tmp_path)


def test_a_step_that_others_delete_before_its_upload_is_reported(
    url: str, tmp_path: Path, gate: threading.Event
) -> None:
    manager = tiered(url, tmp_path)
    for number in (1, 2):
        manager.save(number, state(number)).wait()
    shutil.rmtree(tmp_path / "disk" / "step-000001")
    gate.set()
    with pytest.raises(tensorkeep.StoreError, match=r"1 step \(1\) could not be uploaded .*was deleted before"):
        manager.close()
    assert in_store(url) == [2]


def test_prune_uploads_before_it_deletes(url: str, tmp_path: Path) -> None:
    with tiered(url, tmp_path) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number))
    with tiered(url, tmp_path, keep_last=1) as manager:
        assert [step.number for step in manager.prune(dry_run=True)] == [1, 2]
        assert [step.number for step in manager.prune()] == [1, 2]
    assert (on_disk(tmp_path), in_store(url)) == ([3], [3])


def test_a_failure_that_nobody_waits_for_is_logged_at_the_end(url: str, tmp_path: Path, broken: Proxy) -> None:
    code = "import sys, tensorkeep; tensorkeep.CheckpointManager(sys.argv[1], local=sys.argv[2]).save(1, {'step': 1})"
    command = [sys.executable, "-W", "ignore", "-c", code, url, str(tmp_path / "disk")]
    found = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert f"NOT UPLOADED: steps of {tmp_path}/disk" in found.stderr
    assert on_disk(tmp_path) == [1]


def interrupt_in_wait(manager: CheckpointManager) -> None:
    """Call `wait`, and press Ctrl-C once it waits for an upload, so that it comes nowhere else."""
    uploader = manager._folder.place._uploader  # type: ignore[attr-defined]

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


def test_ctrl_c_ends_the_uploads(url: str, tmp_path: Path, gate: threading.Event) -> None:
    manager = tiered(url, tmp_path)
    manager.save(1, state(1)).wait()
    with pytest.raises(KeyboardInterrupt):
        interrupt_in_wait(manager)
    gate.set()
    while [status.state for status in manager.uploads()] != ["waiting"]:
        time.sleep(0.01)
    assert in_store(url) == []
    manager.close()
    assert in_store(url) == [1]


class Interrupted(BaseException):
    """Stands for Ctrl-C at one instruction."""


def test_ctrl_c_before_the_uploads_start(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise Interrupted

    manager = tiered(url, tmp_path)
    with monkeypatch.context() as patches:
        patches.setattr("tensorkeep.checkpoint.local_tier.uploader.threading.Thread.start", interrupted)
        with pytest.raises(Interrupted):
            manager.claim()
    assert manager._folder.place._uploader._thread is None, "wait() would wait for ever"  # type: ignore[attr-defined]
    manager.save(1, state(1))
    manager.close()
    assert in_store(url) == [1]


def test_what_ctrl_c_has_left_is_uploaded_when_the_manager_is_closed(
    url: str, tmp_path: Path, gate: threading.Event
) -> None:
    manager = tiered(url, tmp_path)
    manager.save(1, state(1)).wait()
    with pytest.raises(KeyboardInterrupt):
        interrupt_in_wait(manager)
    threading.Timer(0.3, gate.set).start()  # until then the thread of the uploads is still ending
    manager.close()
    assert manager.uploads() == []
    assert in_store(url) == [1]


def test_ctrl_c_cannot_leave_the_lock_of_the_uploads_held(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(url, tmp_path) as manager:
        uploader = manager._folder.place._uploader  # type: ignore[attr-defined]
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


def test_a_bucket_that_does_not_exist_is_reported_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.NotFoundError, match="its bucket does not exist"):
        CheckpointManager("s3://no-such-bucket/run", local=tmp_path).save(1, state(1))


def test_a_store_that_cannot_be_reached_is_not_an_empty_run(url: str, tmp_path: Path, broken: Proxy) -> None:
    manager = tiered(url, tmp_path)
    with pytest.raises(tensorkeep.StoreError, match="cannot list it"):
        manager.latest()
    tensorkeep.save(state(1), tmp_path / "disk" / "step-000001")
    with pytest.warns(UserWarning, match="only the steps of .* are found"):
        assert same(manager.restore(), state(1))


def test_arguments(url: str, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"keep_local": 0}, "keep_local is 0"),
        ({"local": url}, "is a URL"),
        ({"upload_bytes_per_second": "fast"}, "is not a size"),
        ({"upload_bytes_per_second": 0}, "upload_bytes_per_second is 0"),
    ]
    for options, message in cases:
        with pytest.raises(tensorkeep.UsageError, match=message):
            CheckpointManager(url, **{"local": tmp_path, **options})
    with pytest.raises(tensorkeep.UsageError, match="local= is for a run in an object store"):
        CheckpointManager(tmp_path / "a", local=tmp_path / "b")
    with pytest.raises(tensorkeep.UnsupportedError, match="https:// is only read from"):
        CheckpointManager("https://host.example/run", local=tmp_path)
    assert CheckpointManager(tmp_path).uploads() == []
