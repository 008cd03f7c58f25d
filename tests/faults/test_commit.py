"""The commit: what becomes durable, what may be replaced, and concurrent writers."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.formats.base import FORMATS
from tensorkeep.io import commit as commit_module
from tensorkeep.io import temporaries
from tensorkeep.io.commit import Commit
from tensorkeep.io.temporaries import SUFFIX
from tensorkeep.testing.equality import same

STATE = {"w": torch.arange(1000.0)}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_each_new_parent_folder_is_synced(tmp_path: Path) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    with mock.patch.object(os, "fsync", fsync):
        tensorkeep.save(STATE, tmp_path / "runs" / "exp" / "ckpt")
    assert synced[:2] == [str(tmp_path), str(tmp_path / "runs")]
    assert synced[-1] == str(tmp_path / "runs" / "exp")


@pytest.mark.parametrize(("format", "name"), [("native", "latest"), ("safetensors", "latest.safetensors")])
def test_a_link_is_not_replaced(tmp_path: Path, format: str, name: str) -> None:
    old = tmp_path / f"a{name}"
    tensorkeep.save(STATE, old, format=format)
    (tmp_path / name).symlink_to(old)
    with pytest.raises(tensorkeep.DestinationExistsError, match="symbolic link"):
        tensorkeep.save({"w": torch.zeros(1)}, tmp_path / name, format=format, overwrite=True)
    assert names(tmp_path) == [old.name, name]
    assert same(tensorkeep.load(tmp_path / name), STATE)


def test_a_link_left_by_an_exchange_is_removed(tmp_path: Path) -> None:
    with Commit(tmp_path / "ckpt", directory=True, overwrite=False, replaceable=lambda path: True) as commit:
        left = commit.path.with_name(commit.path.name.replace(SUFFIX, "0" + SUFFIX))
    left.symlink_to(tmp_path)
    tensorkeep.save(STATE, tmp_path / "ckpt")
    assert names(tmp_path) == ["ckpt"]


def test_dot_dot_after_a_link_resolves_as_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path / "here")
    tensorkeep.save(STATE, "link/../ckpt")
    assert same(tensorkeep.load("link/../ckpt"), STATE)
    assert names(tmp_path / "far") == ["away", "ckpt"]


def test_a_name_that_is_too_long_is_refused_before_writing(tmp_path: Path) -> None:
    with mock.patch.object(os, "pwrite", side_effect=AssertionError), pytest.raises(tensorkeep.StoreError) as caught:
        tensorkeep.save(STATE, tmp_path / ("a" * 300))
    assert "too long" in caught.value.message
    assert caught.value.remedy == "choose a shorter name"
    assert names(tmp_path) == []


def test_a_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"out\xff")
    tensorkeep.save(STATE, place)
    assert same(tensorkeep.load(place), STATE)


def test_of_two_writers_that_start_together_one_saves(tmp_path: Path) -> None:
    """Each sees the other's temporary after its own check; exactly one of them saves."""
    place = tmp_path / "ckpt"
    real = temporaries.remove_stale
    rivals: list[Commit] = []

    def look(destination: Path, *, besides: Path | None = None) -> list[Path]:
        removed = real(destination, besides=besides)
        if besides is None and not rivals:
            rivals.append(Commit(place, directory=True, overwrite=False, replaceable=lambda path: True))
            rivals[0].__enter__()
        return removed

    with mock.patch.object(commit_module, "remove_stale", look), pytest.raises(tensorkeep.BusyError):
        tensorkeep.save(STATE, place)
    rivals[0].__exit__(None, None, None)
    assert names(tmp_path) == []


def test_a_temporary_removed_by_another_writer_is_created_again(tmp_path: Path) -> None:
    real = os.mkdir
    made = []

    def mkdir(path: str, *rest: int) -> None:
        real(path, *rest)
        made.append(path)
        if len(made) == 1:
            os.rmdir(path)

    with mock.patch.object(os, "mkdir", mkdir):
        tensorkeep.save(STATE, tmp_path / "ckpt")
    assert len(made) == 2
    assert names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links(tmp_path: Path, number: int) -> None:
    place = tmp_path / "w.safetensors"
    with mock.patch.object(os, "link", side_effect=OSError(number, "no links")):
        tensorkeep.save(STATE, place, format="safetensors")
    assert same(tensorkeep.load(place), STATE)


def test_without_renameat2_flags_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    old_kernel = mock.Mock(renameat2=mock.Mock(return_value=-1))
    with (
        mock.patch.object(commit_module, "libc", return_value=old_kernel),
        mock.patch.object(commit_module.ctypes, "get_errno", return_value=errno.ENOSYS),
        pytest.raises(FileExistsError),
    ):
        commit_module._rename(tmp_path / "new", tmp_path / "old", commit_module._RENAME_NOREPLACE)
    assert (tmp_path / "old").read_text() == "old"


def test_a_forked_child_neither_keeps_the_lock_nor_removes_anything(tmp_path: Path) -> None:
    ready, go = os.pipe(), os.pipe()
    with Commit(tmp_path / "ckpt", directory=True, overwrite=False, replaceable=lambda path: True) as commit:
        child = os.fork()
        if child == 0:
            try:
                os.close(go[1])  # so that it ends with its parent
                commit.__exit__(None, None, None)
                os.write(ready[1], b"x")
                os.read(go[0], 1)
            finally:
                os._exit(0)
        os.close(ready[1])
        assert os.read(ready[0], 1) == b"x"
        assert commit.path.exists()
        left = commit.path.rename(commit.path.with_name(commit.path.name.replace(SUFFIX, "0" + SUFFIX)))
    # The writer has ended, its child is still running.
    assert left.exists()
    tensorkeep.save(STATE, tmp_path / "ckpt")
    os.write(go[1], b"x")
    os.waitpid(child, 0)
    assert names(tmp_path) == ["ckpt"]


@pytest.mark.parametrize("damaged", [False, True])
def test_foreign_files_in_a_checkpoint_are_kept(tmp_path: Path, damaged: bool) -> None:
    place = tmp_path / "ckpt"
    tensorkeep.save(STATE, place)
    if damaged:
        content = (place / "manifest.json").read_bytes()
        (place / "manifest.json").write_bytes(content[:-9])
    (place / "notes.txt").write_text("important")
    with pytest.raises(tensorkeep.DestinationExistsError, match=r"notes\.txt"):
        tensorkeep.save({"w": torch.zeros(2)}, place, overwrite=True)
    (place / "notes.txt").unlink()
    tensorkeep.save({"w": torch.zeros(2)}, place, overwrite=True)
    assert torch.equal(tensorkeep.load(place)["w"], torch.zeros(2))


def test_a_folder_that_cannot_be_emptied_is_not_replaced(tmp_path: Path) -> None:
    """Such as the checkpoint of another user, which could not be removed after the exchange."""
    tensorkeep.save(STATE, tmp_path / "ckpt")
    with (
        mock.patch.object(os, "access", return_value=False),
        pytest.raises(tensorkeep.StoreError, match="does not let you remove"),
    ):
        tensorkeep.save({"w": torch.zeros(1)}, tmp_path / "ckpt", overwrite=True)
    assert same(tensorkeep.load(tmp_path / "ckpt"), STATE)
    assert names(tmp_path) == ["ckpt"]


def test_a_destination_that_changed_meanwhile_is_checked_again(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    tensorkeep.save(STATE, place)
    with (
        pytest.raises(tensorkeep.DestinationExistsError, match="not replaced"),
        Commit(place, directory=True, overwrite=True, replaceable=FORMATS.get("native").recognises) as commit,
    ):
        place.rename(tmp_path / "aside")
        place.mkdir()
        (place / "thesis.txt").write_text("years of work")
        commit.publish()
    assert (place / "thesis.txt").exists()
