"""The disk usage of steps that share files by hard links, and the new bytes of each step."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager, SaveReport
from tensorkeep.formats.native.directory import freed_bytes


@pytest.fixture
def reports(tmp_path: Path) -> list[SaveReport]:
    """Return the reports of three steps that share most of their bytes."""
    with CheckpointManager(tmp_path / "run", incremental=True) as manager:
        return [
            manager.save(n, {"frozen": torch.arange(60_000.0), "w": torch.full((9000,), n)}).wait() for n in (1, 2, 3)
        ]


def occupied(*folders: Path) -> int:
    """Return the bytes on disk of all files below some folders; hard links count once, as in ``du``."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                found[path.stat().st_ino] = path.stat().st_blocks * 512
    return sum(found.values())


def test_info_reports_the_new_bytes_and_the_disk_usage_of_a_step(reports: list[SaveReport]) -> None:
    for number, report in enumerate(reports):
        new = [entry.stat().st_size for entry in Path(report.path).iterdir() if not entry.name.startswith("from-")]
        assert report.new_bytes == sum(new)
        assert number == 0 or tensorkeep.info(report.path).details["history"]["new_bytes"] == report.new_bytes
    path = Path(reports[-1].path)
    space = tensorkeep.info(path).details["space"]
    shared = path / "from-step-000001-model.tensorkeep"
    assert space["shared_bytes"] == shared.stat().st_blocks * 512 > 0
    assert space["own_bytes"] + space["shared_bytes"] == space["occupied_bytes"] == occupied(path)
    for report in reports[:-1]:
        shutil.rmtree(report.path)
    space = tensorkeep.info(path).details["space"]
    assert (space["own_bytes"], space["shared_bytes"]) == (occupied(path), 0)


@pytest.mark.parametrize("gone", [[0], [1], [0, 1], [2], [0, 1, 2]])
def test_bytes_freed_by_deleting_several_steps_are_predicted(reports: list[SaveReport], gone: list[int]) -> None:
    paths = [Path(reports[index].path) for index in gone]
    predicted, before = freed_bytes(paths), occupied(paths[0].parent)
    with CheckpointManager(paths[0].parent) as manager:
        assert len(gone) > 1 or manager.steps()[gone[0]].own_bytes == predicted
    for path in paths:
        shutil.rmtree(path)
    assert predicted == before - occupied(paths[0].parent)
    with pytest.raises(tensorkeep.StoreError) as caught:
        freed_bytes(paths)
    assert caught.value.path == os.fspath(paths[0])


def test_converted_step_keeps_number_time_and_metrics(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", incremental=True) as manager:
        for number in (1, 2):
            manager.save(number, {"w": torch.full((9000,), number)}, metrics={"loss": 1 / number}).wait()
    for number in (1, 2):
        name = f"step-{number:06d}"
        tensorkeep.convert(tmp_path / "run" / name, tmp_path / "other" / name)
    before, after = (CheckpointManager(tmp_path / run).steps() for run in ("run", "other"))
    assert [(s.number, s.saved_at, s.metrics) for s in before] == [(s.number, s.saved_at, s.metrics) for s in after]
    assert CheckpointManager(tmp_path / "other").best("loss").number == 2
