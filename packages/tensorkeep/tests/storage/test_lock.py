"""One writer for a folder: a lock is released with its object, and a lost one is noticed."""

import fcntl
import gc
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

from faults import injection as faults
from tensorkeep import BusyError, CheckpointManager
from tensorkeep.storage import commit
from tensorkeep.storage.commit import FolderLock


def test_a_lock_is_released_once_also_when_it_is_collected(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(BusyError):
        FolderLock(tmp_path)
    del first
    gc.collect()
    second = FolderLock(tmp_path)
    second.release()
    third = FolderLock(tmp_path)
    second.release()  # does nothing
    assert third.is_valid()
    third.release()


def test_a_manager_that_is_collected_releases_its_folder(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, asynchronous=False)
    manager.save(1, {"w": torch.zeros(2)})
    del manager
    gc.collect()
    with CheckpointManager(tmp_path) as other:
        other.save(2, {"w": torch.zeros(2)}).wait()
        assert [step.number for step in other.steps()] == [1, 2]


def test_a_lock_is_lost_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder_lock = FolderLock(folder)
    assert folder_lock.is_valid()
    shutil.rmtree(folder)
    assert not folder_lock.is_valid()
    folder.mkdir()
    assert not folder_lock.is_valid()
    other = FolderLock(folder)
    assert other.is_valid()
    other.release()
    assert not other.is_valid()
    folder_lock.release()


def test_a_folder_that_is_created_again_before_it_is_locked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    real = fcntl.flock
    swapped: list[int] = []

    def flock(fd: int, operation: int) -> None:
        if not swapped:
            swapped.append(fd)
            shutil.rmtree(folder)
            folder.mkdir()
        real(fd, operation)

    with mock.patch.object(commit.fcntl, "flock", flock):
        folder_lock = FolderLock(folder)
    assert folder_lock.is_valid()
    with pytest.raises(BusyError):
        FolderLock(folder)
    folder_lock.release()


@pytest.mark.integration
def test_a_forked_child_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    held = [FolderLock(tmp_path)]

    def child() -> None:
        held.clear()
        gc.collect()

    assert faults.in_child(child) == 0
    assert held[0].is_valid()
    with pytest.raises(BusyError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path)
    held[0].release()
