"""Destinations that refuse a save: full, read-only, occupied, busy, without O_DIRECT."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.io.commit import Commit
from tensorkeep.io.temporaries import SUFFIX
from tensorkeep.testing.equality import same

STATE = {"w": torch.arange(100_000.0)}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_full_disk_is_reported_and_loses_nothing(small_disk: Path, compression: str) -> None:
    tensorkeep.save(STATE, small_disk / "ckpt")
    big = {"w": torch.randint(0, 255, (4_000_000,), dtype=torch.uint8)}
    with pytest.raises(tensorkeep.StoreError, match="No space left") as caught:
        tensorkeep.save(big, small_disk / "ckpt", overwrite=True, compression=compression)
    assert "free some space" in str(caught.value)
    assert names(small_disk) == ["ckpt"]
    assert same(tensorkeep.load(small_disk / "ckpt"), STATE)


def test_a_read_only_folder_is_reported(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(tensorkeep.StoreError, match="Read-only file system"):
        tensorkeep.save(STATE, small_disk / "ckpt")
    assert names(small_disk) == []


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_without_direct_io_the_page_cache_is_used(tmp_path: Path, refuses: str) -> None:
    real = {"open": os.open, "pwrite": os.pwrite}

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if refuses == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real["open"](path, flags, mode)

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if refuses == "pwrite" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real["pwrite"](fd, data, offset)

    with mock.patch.object(os, "open", open_), mock.patch.object(os, "pwrite", pwrite):
        report = tensorkeep.save(STATE, tmp_path / "ckpt")
    assert not report.direct_io
    assert same(tensorkeep.load(tmp_path / "ckpt"), STATE)
    assert tensorkeep.save(STATE, tmp_path / "direct").direct_io


def test_an_existing_checkpoint_is_not_replaced_by_default(tmp_path: Path) -> None:
    tensorkeep.save(STATE, tmp_path / "ckpt")
    with pytest.raises(tensorkeep.DestinationExistsError, match="exists already"):
        tensorkeep.save({"w": torch.zeros(3)}, tmp_path / "ckpt")
    assert same(tensorkeep.load(tmp_path / "ckpt"), STATE)


def test_only_a_checkpoint_is_ever_replaced(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    note = tmp_path / "note.txt"
    note.write_text("hello")
    for place in (home, note):
        with pytest.raises(tensorkeep.DestinationExistsError, match="not replaced"):
            tensorkeep.save(STATE, place, overwrite=True)
    assert (home / "thesis.txt").read_text() == "years of work"
    assert note.read_text() == "hello"


def test_a_destination_that_appears_during_the_save_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with (
        pytest.raises(tensorkeep.DestinationExistsError, match="created here during the save"),
        Commit(place, directory=True, overwrite=False, replaceable=lambda path: True) as commit,
    ):
        place.mkdir()
        commit.publish()
    assert names(tmp_path) == ["ckpt"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with Commit(place, directory=True, overwrite=False, replaceable=lambda path: True):
        with pytest.raises(tensorkeep.BusyError, match="another process is saving here"):
            tensorkeep.save(STATE, place)
        # Another checkpoint in the same folder, whose name begins alike, is not touched.
        tensorkeep.save(STATE, tmp_path / "ckpt.2")
    assert names(tmp_path) == ["ckpt.2"]


def test_only_temporaries_of_dead_writers_are_removed(tmp_path: Path) -> None:
    with Commit(tmp_path / "ckpt", directory=True, overwrite=False, replaceable=lambda path: True) as commit:
        (commit.path / "model.safetensors").write_bytes(b"half")
        left = commit.path.with_name(
            commit.path.name.replace(commit.path.name[-len(SUFFIX) - 8 : -len(SUFFIX)], "0" * 8)
        )
        commit.path.rename(left)
    # The lock ended with the writer's process; the next save removes its temporaries.
    assert left.exists()
    tensorkeep.save(STATE, tmp_path / "ckpt")
    assert names(tmp_path) == ["ckpt"]


def test_a_file_in_place_of_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(tensorkeep.StoreError):
        tensorkeep.save(STATE, tmp_path / "file" / "ckpt")


def test_a_base_on_another_file_system(small_disk: Path, tmp_path: Path) -> None:
    tensorkeep.save(STATE, small_disk / "base", incremental=True)
    report = tensorkeep.save(STATE, tmp_path / "ckpt", base=small_disk / "base")
    assert report.base is None
    assert f"cannot be linked: {os.strerror(errno.EXDEV)}" in (report.base_refused or "")
    assert names(tmp_path / "ckpt") == ["manifest.json", "model.safetensors"]
    assert same(tensorkeep.load(tmp_path / "ckpt"), STATE)
