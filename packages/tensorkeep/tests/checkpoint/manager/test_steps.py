"""The steps of a folder: their numbers, removing one and nothing else, and the direction of a metric by its name."""

import errno
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.runs.backends import LocalBackend
from tensorkeep.runs.steps import direction, step_number, step_path, usual_metric
from tensorkeep.storage import commit
from tensorkeep.testing.cases import case
from tensorkeep.testing.format_suite import content, names_in


@pytest.fixture
def step(tmp_path: Path) -> Path:
    place = step_path(tmp_path, 1)
    tensorkeep.save({"w": torch.arange(10.0)}, place)
    return place


def test_integers_of_every_library_and_no_other_values_are_numbers(tmp_path: Path) -> None:
    for number in (7, np.int64(7), np.uint8(7), torch.tensor(7)):
        with case(repr(number)):
            assert step_path(tmp_path, number).name == "step-000007"
            assert type(step_number(number)) is int
    for number in (-1, np.int64(-1), 1.0, np.float32(1), True, np.True_, "1", None, 10**18):
        with case(repr(number)), pytest.raises(tensorkeep.UsageError, match="not the number of a step") as error:
            step_path(tmp_path, number)
        assert error.value.path == str(tmp_path)


def test_an_unreadable_folder_is_an_error_and_a_step_deleted_meanwhile_is_left_out(step: Path, tmp_path: Path) -> None:
    for number in (errno.EACCES, errno.EIO):
        refused = OSError(number, os.strerror(number))
        with mock.patch.object(os, "scandir", side_effect=refused), pytest.raises(tensorkeep.StoreError) as error:
            LocalBackend(tmp_path).numbers()
        assert os.strerror(number) in error.value.message
    assert LocalBackend(tmp_path / "none").numbers() == []
    place = LocalBackend(tmp_path)
    with mock.patch.object(place, "numbers", return_value=[1, 2]):
        assert [found.number for found in place.listing().steps] == [1]
        assert not place.listing().broken


@pytest.mark.parametrize("damaged", [False, True])
def test_a_step_is_removed_complete_or_damaged_unless_it_holds_other_files(step: Path, damaged: bool) -> None:
    place = LocalBackend(step.parent)
    if damaged:
        (step / "manifest.json").write_bytes((step / "manifest.json").read_bytes()[:-9])
    other = step / "other"
    for make, remove in ((other.touch, other.unlink), (other.mkdir, other.rmdir)):
        make()
        before = names_in(step)
        with pytest.raises(tensorkeep.UsageError, match="holds 'other', which does not belong to the step"):
            place.remove(step)
        assert names_in(step) == before
        remove()
    place.remove(step)
    assert names_in(step.parent) == []
    place.remove(step)  # gone already, by another process perhaps


def test_anything_but_a_step_is_not_removed(step: Path, tmp_path: Path) -> None:
    disk, state = LocalBackend(tmp_path), {"w": torch.ones(3)}
    places = [step_path(tmp_path, number) for number in range(2, 7)]
    places[0].mkdir()
    (places[0] / "thesis.txt").write_text("years of work")
    places[1].mkdir()
    torch.save(state, places[2])
    places[3].symlink_to(step)
    tensorkeep.save(state, places[4], format="safetensors")
    before = content(tmp_path)
    for place in places:
        assert isinstance(disk.not_removable([place])[place], tensorkeep.NotACheckpointError)
        with case(place), pytest.raises(tensorkeep.NotACheckpointError, match="is not deleted"):
            disk.remove(place)
    assert names_in(tmp_path) == [step.name, *(place.name for place in places)]
    assert content(tmp_path) == before


def test_a_removal_that_the_system_refuses_is_an_error(step: Path, tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    with mock.patch.object(commit.os, "rename", side_effect=refused), pytest.raises(tensorkeep.StoreError) as error:
        LocalBackend(step.parent).remove(step)
    assert "cannot delete the step: Permission denied" in error.value.message
    assert names_in(tmp_path) == ["step-000001"]


METRICS = {
    "min": "loss val_loss eval/loss valLoss validation_loss train.loss perplexity val_ppl top1_error wer"
    " MSE rmse loss_0 bpb",
    "max": "acc accuracy val_acc top1_accuracy acc@5 acc5 f1 macro_f1 F1 bleu bleu4 rougeL rouge1 auc roc_auc mAP"
    " map50 r2 mean_reward eval/accuracy",
    None: "score lr step accumulated accuracy_loss neg_mse negative_loss loss_scale mapping rank format"
    " tokens_per_second",
}


def test_the_direction_of_a_metric_by_its_name() -> None:
    for mode, names in METRICS.items():
        assert {name: direction(name) for name in names.split()} == dict.fromkeys(names.split(), mode)


def test_the_metric_that_is_meant() -> None:
    for usual, names in [
        *((None, []), ("score", ["score"]), ("loss", ["loss", "accuracy"]), ("val_loss", ["loss", "val_loss"])),
        ("eval/loss", ["train/loss", "eval/loss", "eval/accuracy"]),
    ]:
        with case(names):
            assert usual_metric(names) == usual
    with pytest.raises(tensorkeep.UsageError, match=r"several metrics: a_loss, b_loss\n.*metric=\"a_loss\"$"):
        usual_metric(["b_loss", "a_loss"])
