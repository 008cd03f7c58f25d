"""Saves whose coordinator died: those that were complete are finished, others are removed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tensorkeep
from simulated_ranks import SimulatedSave, by_dimension
from tensorkeep.formats.base import WriteSettings
from tensorkeep.formats.native.sharded import finish_or_clear, finish_saves
from tensorkeep.formats.native.writer import NativeOptions
from tensorkeep.storage.buffers import BufferPool

STATE = {"w": torch.arange(40.0).reshape(10, 4), "step": 3}


class Interrupted(SimulatedSave):
    """A save whose coordinator copies the staging folder aside when all ranks have written, and is then gone."""

    abandoned: Path

    def publish(self) -> None:
        # A name of the same form, which no process has locked.
        path = self.commit.path
        self.abandoned = path.with_name(path.name.replace(".tensorkeep-tmp", "0.tensorkeep-tmp"))
        shutil.copytree(path, self.abandoned)
        super().publish()


def interrupted(path: Path, *, overwrite: bool = False) -> Path:
    """Return the staging folder of a save that was complete except for its root; nothing is at the path."""
    settings = WriteSettings(pool=BufferPool(), options=NativeOptions(), overwrite=overwrite)
    save = Interrupted(path, STATE, 2, by_dimension(2), settings)
    save.run()
    shutil.rmtree(path)
    return save.abandoned


@pytest.mark.parametrize("root", [None, "cut sho"], ids=["without its root", "its root was written already"])
def test_a_complete_save_is_finished(tmp_path: Path, root: str | None) -> None:
    temporary = interrupted(tmp_path / "c")
    assert (temporary / "plan.json").exists()
    if root is not None:
        (temporary / "manifest.json").write_text(root)
    assert finish_saves(tmp_path) == [tmp_path / "c"]
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "plan.json").exists()
    assert torch.equal(tensorkeep.load(tmp_path / "c")["w"], STATE["w"])
    assert tensorkeep.verify(tmp_path / "c").ok


DAMAGE: dict[str, Callable[[Path], object]] = {
    "fragment missing": lambda temporary: (temporary / "rank-00001.json").unlink(),
    "fragment damaged": lambda temporary: (temporary / "rank-00001.json").write_text("{}"),
    "data missing": lambda temporary: (temporary / "model-rank-00000.safetensors").unlink(),
    "data cut short": lambda temporary: (temporary / "model-rank-00000.safetensors").write_bytes(b"short"),
    "one rank twice": lambda temporary: shutil.copy(temporary / "rank-00000.json", temporary / "rank-00001.json"),
}


def test_an_incomplete_save_is_removed(tmp_path: Path) -> None:
    for label, damage in DAMAGE.items():
        temporary = interrupted(tmp_path / "c")
        damage(temporary)
        assert finish_or_clear(temporary) is None, label
        assert list(tmp_path.iterdir()) == [], label


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_at_the_destination_stays_unless_the_save_was_to_replace_it(tmp_path: Path, overwrite: bool) -> None:
    if overwrite:
        tensorkeep.save({"w": torch.zeros(1)}, tmp_path / "c")
    interrupted(tmp_path / "c", overwrite=overwrite)
    tensorkeep.save({"w": torch.zeros(1)}, tmp_path / "elsewhere")
    (tmp_path / "elsewhere").rename(tmp_path / "c")
    assert finish_saves(tmp_path) == [tmp_path / "c"] * overwrite
    assert torch.equal(tensorkeep.load(tmp_path / "c")["w"], STATE["w"] if overwrite else torch.zeros(1))


def test_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    settings = WriteSettings(pool=BufferPool(), options=NativeOptions())

    class Watched(SimulatedSave):
        def publish(self) -> None:
            assert finish_or_clear(self.commit.path) is None
            assert finish_saves(tmp_path) == []
            super().publish()

    Watched(tmp_path / "c", STATE, 2, by_dimension(2), settings).run()
    assert tensorkeep.verify(tmp_path / "c").ok


def test_folders_that_are_not_such_saves_are_left_alone(tmp_path: Path) -> None:
    temporary = interrupted(tmp_path / "c")
    # The plan of another destination, a link, a folder without a plan.
    other = temporary.with_name(temporary.name.replace(".c.", ".d."))
    temporary.rename(other)
    (tmp_path / temporary.name).symlink_to(other)
    plain = tmp_path / ".e.01234567.01234567.tensorkeep-tmp"
    plain.mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert finish_saves(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
