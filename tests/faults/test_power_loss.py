"""Power is lost at any instant: durable checkpoints are complete, and nothing incomplete is visible."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults import power_loss
from faults.conftest import Choose
from faults.test_interrupted_managers import PARAMETERS, States, Work, check, prepare
from tensorkeep.testing.equality import same


@pytest.mark.parametrize(("work", "allowed", "done"), PARAMETERS)
def test_power_is_lost_while_a_manager_works(
    tmp_path: Path, work: Work, allowed: States, done: States, choose: Choose, record_property: Any
) -> None:
    root = tmp_path / "run"
    prepare(root, work)
    with power_loss.recorded(root) as recording:
        work(root)
    assert len(recording.events) >= 2
    crashes = list(recording.crashes())
    chosen = choose(len(crashes))
    for index in chosen:
        description, write_out = crashes[index]
        place = tmp_path / "case"
        write_out(place)
        returned = description.startswith(f"after {len(recording.events)} of")
        try:
            check(place, done if returned else allowed)
        except AssertionError as error:
            raise AssertionError(f"{description}: {error}") from error
        shutil.rmtree(place)
    record_property("cases", len(chosen))


def test_a_durable_step_survives(tmp_path: Path) -> None:
    """Once `save` has returned, no power loss removes the checkpoint."""
    root = tmp_path / "run"
    root.mkdir()
    with power_loss.recorded(root) as recording:
        tensorkeep.save({"w": torch.arange(3000.0)}, root / "c")
    last = [case for case in recording.crashes() if f"after {len(recording.events)} of" in case[0]]
    assert len(last) == 7
    for number, (_, write_out) in enumerate(last):
        write_out(tmp_path / str(number))
        assert torch.equal(tensorkeep.load(tmp_path / str(number) / "c")["w"], torch.arange(3000.0))


def test_a_base_copied_without_syncing_becomes_durable_with_the_step_that_links_to_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = {"frozen": torch.arange(3000.0), "w": torch.zeros(1000)}
    tensorkeep.save(state, root / "a", incremental=True)
    state["w"] = torch.ones(1000)
    with power_loss.recorded(root) as recording:
        copy_without_syncing(root / "a", root / "copy")
        tensorkeep.save(state, root / "b", base=root / "copy")
    assert (root / "b" / "from-copy-model.tensorkeep").exists()
    last = [case for case in recording.crashes() if f"after {len(recording.events)} of" in case[0]]
    for number, (_, write_out) in enumerate(last):
        write_out(tmp_path / str(number))
        assert same(tensorkeep.load(tmp_path / str(number) / "b"), state)


def copy_without_syncing(source: Path, target: Path) -> None:
    """Copy a folder as ``cp -r`` and ``rsync`` do."""
    os.mkdir(target)
    for file in sorted(source.iterdir()):
        fd = os.open(target / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.pwrite(fd, file.read_bytes(), 0)
        os.close(fd)


def test_the_recorder_finds_a_writer_that_does_not_sync(tmp_path: Path) -> None:
    """Shows that the check can fail."""
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
