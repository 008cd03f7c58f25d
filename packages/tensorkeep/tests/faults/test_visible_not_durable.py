"""The final sync of a save fails: the error states that the checkpoint is visible and may not be durable."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

import tensorkeep
from faults import injection as faults
from tensorkeep.storage import commit as commit_module
from tensorkeep.storage.commit import SUFFIX
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in

STATE = {"w": torch.arange(1000.0)}
OTHER = {"w": torch.zeros(2)}


def make_name_not_durable(save: Callable[[], object], place: Path) -> tensorkeep.StoreError:
    """Let the final sync of a save fail and return the message."""
    seen: list[str] = []
    real = commit_module.sync_directory

    def sync_directory(path: Path) -> None:
        # The temporary is synced before the new name is made, its folder after.
        seen.append(path.name)
        written = any(name.endswith(SUFFIX) for name in seen) or place.is_file()
        if path == place.parent and written:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    fails = mock.patch.object(commit_module, "sync_directory", sync_directory)
    with fails, pytest.raises(tensorkeep.StoreError) as error:
        save()
    return error.value


@pytest.mark.parametrize("name", ["ckpt", "w.safetensors"])
def test_a_failed_final_sync_is_raised_and_the_checkpoint_is_visible(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    error = make_name_not_durable(lambda: tensorkeep.save(STATE, place), place)
    assert "is visible and can be read, but perhaps not durable" in error.message
    assert "Input/output error" in error.message
    assert "overwrite=True" in str(error.remedy)
    assert names_in(tmp_path) == [name]
    assert same(tensorkeep.load(place), STATE)


def test_the_replaced_checkpoint_is_kept_until_the_new_name_is_durable(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    tensorkeep.save(STATE, place)
    make_name_not_durable(lambda: tensorkeep.save(OTHER, place, overwrite=True), place)
    assert same(tensorkeep.load(place), OTHER)
    kept = next(path for path in tmp_path.iterdir() if path != place)
    assert same(tensorkeep.load(kept), STATE)
    with faults.broken() as operations:
        tensorkeep.save(STATE, place, overwrite=True)
    assert operations.seen[:2] == ["fsync", "rename"]  # durable, before anything of the old one goes
    assert names_in(tmp_path) == ["ckpt"]


def test_a_step_after_a_failed_final_sync_can_be_saved_again(tmp_path: Path) -> None:
    with tensorkeep.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE).wait()
        place = tmp_path / "run" / "step-000002"
        make_name_not_durable(lambda: manager.save(2, OTHER).wait(), place)
        assert manager.latest().number == 2
        with pytest.raises(tensorkeep.DestinationExistsError, match="saved already"):
            manager.save(2, OTHER)
        manager.save(2, OTHER, overwrite=True).wait()
        assert same(manager.restore(), OTHER)
    assert names_in(tmp_path / "run") == ["step-000001", "step-000002"]
