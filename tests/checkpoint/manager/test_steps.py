"""The steps of a folder: their numbers, and removing one and nothing else."""

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint.manager.place import DiskPlace
from tensorkeep.checkpoint.manager.steps import step_number, step_path
from tensorkeep.io import commit
from tensorkeep.testing.disk import names_in


@pytest.fixture
def step(tmp_path: Path) -> Path:
    place = step_path(tmp_path, 1)
    tensorkeep.save({"w": torch.arange(10.0)}, place)
    return place


def damage(step: Path) -> None:
    content = (step / "manifest.json").read_bytes()
    (step / "manifest.json").write_bytes(content[:-9])


@pytest.mark.parametrize("number", [7, np.int64(7), np.uint8(7), torch.tensor(7)])
def test_integers_of_every_library_are_numbers(tmp_path: Path, number: Any) -> None:
    assert step_path(tmp_path, number).name == "step-000007"
    assert type(step_number(number)) is int


@pytest.mark.parametrize("number", [-1, np.int64(-1), 1.0, np.float32(1), True, np.True_, "1", None, 10**18])
def test_other_values_are_not_step_numbers(tmp_path: Path, number: Any) -> None:
    with pytest.raises(tensorkeep.UsageError, match="not the number of a step") as error:
        step_path(tmp_path, number)
    assert error.value.path == str(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, number: int) -> None:
    refused = OSError(number, os.strerror(number))
    with mock.patch.object(os, "scandir", side_effect=refused), pytest.raises(tensorkeep.StoreError) as error:
        DiskPlace(tmp_path).numbers()
    assert os.strerror(number) in error.value.message
    assert DiskPlace(tmp_path / "none").numbers() == []


def test_a_step_that_is_deleted_while_it_is_listed_is_left_out(step: Path, tmp_path: Path) -> None:
    place = DiskPlace(tmp_path)
    with mock.patch.object(place, "numbers", return_value=[1, 2]):
        assert [found.number for found in place.listing().steps] == [1]
        assert not place.listing().broken


@pytest.mark.parametrize("damaged", [False, True])
def test_a_step_is_removed_complete_or_damaged(step: Path, tmp_path: Path, damaged: bool) -> None:
    if damaged:
        damage(step)
    DiskPlace(step.parent).remove(step)
    assert names_in(tmp_path) == []
    DiskPlace(step.parent).remove(step)  # gone already, by another process perhaps


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("name", ["eval.json", "logs"])
def test_a_step_with_other_files_is_not_removed(step: Path, damaged: bool, name: str) -> None:
    if damaged:
        damage(step)
    if name == "logs":
        (step / name).mkdir()
    else:
        (step / name).write_text("{}")
    before = names_in(step)
    with pytest.raises(tensorkeep.UsageError, match=f"holds '{name}', which does not belong to the step"):
        DiskPlace(step.parent).remove(step)
    assert names_in(step) == before


def a_folder(place: Path, step: Path) -> None:
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")


def an_empty_folder(place: Path, step: Path) -> None:
    place.mkdir()


def a_file(place: Path, step: Path) -> None:
    torch.save({"w": torch.ones(3)}, place)


def a_link(place: Path, step: Path) -> None:
    place.symlink_to(step)


def weights_of_others(place: Path, step: Path) -> None:
    tensorkeep.save({"w": torch.ones(3)}, place, format="safetensors")


@pytest.mark.parametrize("make", [a_folder, an_empty_folder, a_file, a_link, weights_of_others])
def test_anything_but_a_step_is_not_removed(step: Path, tmp_path: Path, make: Any) -> None:
    place = step_path(tmp_path, 2)
    make(place, step)
    for call in (DiskPlace(tmp_path).check_removable, DiskPlace(tmp_path).remove):
        with pytest.raises(tensorkeep.NotACheckpointError, match="is not deleted"):
            call(place)
    assert os.path.lexists(place)
    assert names_in(tmp_path) == ["step-000001", "step-000002"]


def test_a_removal_that_the_system_refuses_is_an_error(step: Path, tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(commit.os, "rename", side_effect=refused), pytest.raises(tensorkeep.StoreError) as error:
        DiskPlace(step.parent).remove(step)
    assert "cannot delete the step: Permission denied" in error.value.message
    assert names_in(tmp_path) == ["step-000001"]
