"""A data file is deleted or truncated between two steps of an incremental run: reported, and the run continues."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.testing.equality import same
from tiers import exhaustive

LINKED = "step-000002/from-step-000001-model.tensorkeep"
CHANGES = "step-000002/changes-model.tensorkeep"
FIRST = "step-000001/model.*"


def state(number: int) -> dict[str, Any]:
    return {"frozen": torch.arange(30_000.0), "w": torch.full((3000,), float(number)), "step": number}


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("incremental", "restarted"),
    [(True, False), ("delta", True), *exhaustive((True, True), ("delta", False))],
)
@pytest.mark.parametrize(
    ("file", "damage", "whole"),
    [
        *((LINKED, Path.unlink, [1]), (CHANGES, Path.unlink, [1]), (FIRST, Path.unlink, [2])),
        # A linked file is one file, whichever step names it.
        *((LINKED, cut_short, []), (CHANGES, cut_short, [1]), (FIRST, cut_short, [])),
    ],
)
def test_a_deleted_or_truncated_file_is_reported_and_saving_continues(
    tmp_path: Path, file: str, damage: Any, whole: list[int], incremental: Any, restarted: bool, record_property: Any
) -> None:
    manager = CheckpointManager(tmp_path, incremental=incremental)
    for number in (1, 2):
        manager.save(number, state(number)).wait()
    (path,) = tmp_path.glob(file)
    damage(path)
    if restarted:
        manager.close()
        manager = CheckpointManager(tmp_path, incremental=incremental)

    broken = [number for number in (1, 2) if number not in whole]
    assert sorted(manager.listing().broken) == broken
    last = whole[-1] if whole else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        latest = manager.latest()
        assert (latest.number if latest else 0) == last
        if whole:
            assert same(manager.restore(), state(last))
        else:
            with pytest.raises(tensorkeep.NotACheckpointError, match="contains no steps"):
                manager.restore()
    skipped = [f"step {number} is skipped" for number in broken if number > last]
    assert [str(warning.message).partition(":")[0] for warning in caught] == 2 * skipped
    for number in broken:
        with pytest.raises(tensorkeep.CorruptCheckpointError, match=r"model\.(safetensors|tensorkeep)"):
            manager.restore(number)

    report = manager.save(3, state(3)).wait()
    assert report.base is None or int(report.base[-6:]) in whole
    if 2 in broken and not restarted:
        assert report.base is not None or "model." in (report.base_refused or "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(manager.restore(), state(3))
    assert tensorkeep.verify(tmp_path / "step-000003").ok
    manager.close()
    record_property("cases", 1)
