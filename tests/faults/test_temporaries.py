"""Temporaries of dead writers are removed; those of live writers are not."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.io import temporaries
from tensorkeep.io.commit import Commit
from tensorkeep.io.temporaries import SUFFIX, prefix, remove_abandoned
from tensorkeep.testing.disk import names_in

STATE = {"w": torch.arange(1000.0)}


@pytest.fixture
def locks_that_nobody_sees() -> Iterator[None]:
    """Simulate the locks of a network file system, seen from another host."""
    with mock.patch.object(temporaries.fcntl, "flock"):
        yield


@pytest.mark.usefixtures("locks_that_nobody_sees")
def test_a_writer_whose_temporary_was_removed_raises(tmp_path: Path) -> None:
    with (
        pytest.raises(tensorkeep.StoreError, match="cannot make the checkpoint visible"),
        Commit(tmp_path / "ckpt", directory=True, overwrite=False, replaceable=lambda path: True) as commit,
    ):
        remove_abandoned(tmp_path)
        commit.publish()
    assert names_in(tmp_path) == []


@pytest.mark.usefixtures("locks_that_nobody_sees")
def test_a_destination_that_became_visible_first_is_not_removed(tmp_path: Path) -> None:
    with Commit(tmp_path / "ckpt", directory=True, overwrite=False, replaceable=lambda path: True) as commit:
        (commit.path / "file").write_text("whole")

        def publish(folder: Path) -> None:
            commit.publish()

        with mock.patch.object(temporaries, "sync_directory", publish):
            remove_abandoned(tmp_path)
    assert (tmp_path / "ckpt" / "file").read_text() == "whole"
    assert names_in(tmp_path) == ["ckpt"]


def left_behind(destination: Path) -> Path:
    return destination.with_name(f"{prefix(destination)}00000000{SUFFIX}")


def test_a_file_with_a_temporary_name_is_removed(tmp_path: Path) -> None:
    left_behind(tmp_path / "ckpt").write_text("hidden")
    tensorkeep.save(STATE, tmp_path / "ckpt")
    assert names_in(tmp_path) == ["ckpt"]


def test_files_with_similar_names_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / ".notes.tensorkeep-tmp").write_text("mine")
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
    assert names_in(tmp_path) == [".notes.tensorkeep-tmp", "step-000001"]


@pytest.fixture
def another_users() -> Iterator[None]:
    """Create temporaries that belong to another user."""
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    real = temporaries._open_directory

    def open_directory(path: Path) -> int:
        if path.name.endswith(f"00000000{SUFFIX}"):
            raise refused
        return real(path)

    with mock.patch.object(temporaries, "_open_directory", open_directory):
        yield


@pytest.mark.usefixtures("another_users")
def test_temporaries_of_another_user_do_not_block_a_save(tmp_path: Path) -> None:
    left = left_behind(tmp_path / "step-000001")
    left.mkdir()
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        manager.save(2, STATE)
    assert names_in(tmp_path) == [left.name, "step-000002"]


@pytest.mark.usefixtures("another_users")
def test_a_temporary_of_another_user_at_the_same_path_is_reported(tmp_path: Path) -> None:
    left = left_behind(tmp_path / "ckpt")
    left.mkdir()
    with pytest.raises(tensorkeep.StoreError, match="another save left here: Permission denied") as error:
        tensorkeep.save(STATE, tmp_path / "ckpt")
    assert error.value.path == str(left)
