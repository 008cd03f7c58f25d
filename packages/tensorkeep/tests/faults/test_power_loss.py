"""Power is lost after a save: its checkpoint is durable. `test_interrupted_managers` loses it at any instant."""

import os
from pathlib import Path

import torch

import tensorkeep
from faults import power_loss
from tensorkeep.testing.equality import same


def after_it_returned(recording: power_loss.Recording, folder: Path) -> list[Path]:
    """Write out what the disk may hold if power is lost after all that was recorded."""
    crashes = [crash for crash in recording.crashes() if crash.returned]
    assert len(crashes) == 7
    for crash in crashes:
        crash.write_out(folder / crash.policy)
    return [folder / crash.policy for crash in crashes]


def test_a_durable_step_survives(tmp_path: Path) -> None:
    """Once `save` has returned, no power loss removes the checkpoint."""
    root = tmp_path / "run"
    root.mkdir()
    with power_loss.recorded(root) as recording:
        tensorkeep.save({"w": torch.arange(3000.0)}, root / "c")
    for disk in after_it_returned(recording, tmp_path):
        assert torch.equal(tensorkeep.load(disk / "c")["w"], torch.arange(3000.0))


def test_a_base_copied_without_syncing_becomes_durable_with_the_step_that_links_to_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    state = {"frozen": torch.arange(3000.0), "w": torch.zeros(1000)}
    tensorkeep.save(state, root / "a", incremental=True)
    state["w"] = torch.ones(1000)
    with power_loss.recorded(root) as recording:
        copy_without_syncing(root / "a", root / "copy")
        tensorkeep.save(state, root / "b", base=root / "copy")
    assert (root / "b" / "from-copy-model.tensorkeep").exists()
    for disk in after_it_returned(recording, tmp_path):
        assert same(tensorkeep.load(disk / "b"), state)


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
    disks = after_it_returned(recording, tmp_path)
    found = {(file.name, file.read_bytes()) for disk in disks for file in disk.iterdir()}
    assert {("b", b""), ("b", b"x" * 1024), ("b", b"x" * 2048)} <= found
