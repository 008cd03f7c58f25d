"""Power is lost at any instant: what was durable is there, whole, and nothing half-made is visible."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.test_interrupted_managers import PARAMETERS, Work, check, prepare

import holdfast
from holdfast.testing import power_loss


@pytest.mark.parametrize(("work", "allowed"), PARAMETERS)
def test_power_is_lost_while_a_manager_works(
    tmp_path: Path, work: Work, allowed: dict[int, set[int]], record_property: Any
) -> None:
    root = tmp_path / "run"
    prepare(root, work)
    with power_loss.recorded(root) as recording:
        work(root)
    assert len(recording.events) >= 2
    cases = 0
    for description, write_out in recording.crashes():
        place = tmp_path / "case"
        write_out(place)
        try:
            check(place, allowed)
        except AssertionError as error:
            raise AssertionError(f"{description}: {error}") from error
        shutil.rmtree(place)
        cases += 1
    record_property("cases", cases)


def test_a_durable_step_survives(tmp_path: Path) -> None:
    """What a save has returned from is there whatever is lost."""
    root = tmp_path / "run"
    root.mkdir()
    with power_loss.recorded(root) as recording:
        holdfast.save({"w": torch.arange(3000.0)}, root / "c")
    last = [case for case in recording.crashes() if f"after {len(recording.events)} of" in case[0]]
    assert len(last) == 7
    for number, (_, write_out) in enumerate(last):
        write_out(tmp_path / str(number))
        assert torch.equal(holdfast.load(tmp_path / str(number) / "c")["w"], torch.arange(3000.0))


def test_the_recorder_tells_a_writer_that_does_not_sync(tmp_path: Path) -> None:
    """The check can fail."""
    root = tmp_path / "run"
    root.mkdir()
    with power_loss.recorded(root) as recording:
        fd = os.open(root / "a", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.pwrite(fd, b"x" * 2048, 0)
        os.close(fd)
        os.rename(root / "a", root / "b")
    found = set()
    for number, (_, write_out) in enumerate(recording.crashes()):
        write_out(tmp_path / str(number))
        found |= {(entry.name, entry.read_bytes()) for entry in (tmp_path / str(number)).iterdir()}
    assert {("b", b""), ("b", b"x" * 1024), ("b", b"x" * 2048)} <= found
