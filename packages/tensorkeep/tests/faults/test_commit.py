"""The commit: what becomes durable, what may be replaced, destinations that refuse a save, and other writers."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.formats.base import FORMATS
from tensorkeep.storage import commit as commit_module
from tensorkeep.storage.commit import SUFFIX, Commit, prefix, remove_abandoned
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import content, names_in

STATE = {"w": torch.arange(100_000.0)}
OTHER = {"w": torch.zeros(2)}


def another_writer(place: Path) -> Commit:
    return Commit(place, directory=True, overwrite=False, replaceable=lambda path: True)


def left_behind(destination: Path) -> Path:
    return destination.with_name(f"{prefix(destination)}00000000{SUFFIX}")


# What becomes durable, and where


def test_each_new_parent_folder_is_synced(tmp_path: Path) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    with mock.patch.object(os, "fsync", fsync):
        tensorkeep.save(STATE, tmp_path / "runs" / "exp" / "ckpt")
    assert [*synced[:2], synced[-1]] == [str(tmp_path / place) for place in ("", "runs", "runs/exp")]


def test_dot_dot_after_a_link_resolves_as_in_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "away")
    monkeypatch.chdir(tmp_path / "here")
    tensorkeep.save(STATE, "link/../ckpt")
    assert same(tensorkeep.load("link/../ckpt"), STATE)
    assert names_in(tmp_path / "far") == ["away", "ckpt"]


def test_a_place_that_cannot_be_created_is_refused_and_a_name_that_is_not_text_is_not(tmp_path: Path) -> None:
    with mock.patch.object(os, "pwrite", side_effect=AssertionError), pytest.raises(tensorkeep.StoreError) as caught:
        tensorkeep.save(STATE, tmp_path / ("a" * 300))
    assert "too long" in caught.value.message
    assert caught.value.remedy == "choose a shorter name"
    assert names_in(tmp_path) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(tensorkeep.StoreError):
        tensorkeep.save(STATE, tmp_path / "file" / "ckpt")
    place = tmp_path / os.fsdecode(b"out\xff")
    tensorkeep.save(STATE, place)
    assert same(tensorkeep.load(place), STATE)


@pytest.mark.integration
@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_full_or_read_only_disk_is_reported_and_loses_nothing(small_disk: Path, compression: str) -> None:
    tensorkeep.save(STATE, small_disk / "ckpt")
    big = {"w": torch.randint(0, 255, (4_000_000,), dtype=torch.uint8)}
    with pytest.raises(tensorkeep.StoreError, match=r"No space left.*\n.*free some space"):
        tensorkeep.save(big, small_disk / "ckpt", overwrite=True, compression=compression)
    assert names_in(small_disk) == ["ckpt"]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(tensorkeep.StoreError, match="Read-only file system"):
        tensorkeep.save(STATE, small_disk / "other", compression=compression)
    assert names_in(small_disk) == ["ckpt"]
    assert same(tensorkeep.load(small_disk / "ckpt"), STATE)


@pytest.mark.integration
def test_a_base_on_another_file_system(small_disk: Path, tmp_path: Path) -> None:
    tensorkeep.save(STATE, small_disk / "base", incremental=True)
    report = tensorkeep.save(STATE, tmp_path / "ckpt", base=small_disk / "base")
    assert report.base is None
    assert f"cannot be linked: {os.strerror(errno.EXDEV)}" in (report.base_refused or "")
    assert names_in(tmp_path / "ckpt") == ["manifest.json", "model.safetensors"]
    assert same(tensorkeep.load(tmp_path / "ckpt"), STATE)


def test_file_systems_without_direct_io_or_links_hold_checkpoints(tmp_path: Path) -> None:
    real = {"open": os.open, "pwrite": os.pwrite}

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real["open"](path, flags, mode)

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real["pwrite"](fd, data, offset)

    for name, refuses in (("open", open_), ("pwrite", pwrite)):
        with case(name):
            with mock.patch.object(os, name, refuses):
                assert not tensorkeep.save(STATE, tmp_path / name).direct_io
            assert same(tensorkeep.load(tmp_path / name), STATE)
    assert tensorkeep.save(STATE, tmp_path / "direct").direct_io
    for number in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        with case(errno.errorcode[number]):
            with mock.patch.object(os, "link", side_effect=OSError(number, "no links")):
                tensorkeep.save(STATE, tmp_path / f"{number}.safetensors", format="safetensors")
            assert same(tensorkeep.load(tmp_path / f"{number}.safetensors"), STATE)


# What may be replaced


def home(place: Path) -> None:
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")


def link(place: Path, format: str) -> None:
    old = place.with_name(f"a{place.name}")
    tensorkeep.save(STATE, old, format=format)
    place.symlink_to(old)


def with_notes(place: Path, *, damaged: bool) -> None:
    tensorkeep.save(STATE, place)
    if damaged:
        (place / "manifest.json").write_bytes((place / "manifest.json").read_bytes()[:-9])
    (place / "notes.txt").write_text("important")


@pytest.mark.parametrize(
    ("name", "make", "options", "message"),
    [
        ("ckpt", partial(tensorkeep.save, STATE), {"overwrite": False}, "exists already"),
        ("home", home, {}, "not replaced"),
        ("note.txt", lambda place: place.write_text("hello"), {}, "not replaced"),
        ("latest", partial(link, format="native"), {}, "symbolic link"),
        ("l.safetensors", partial(link, format="safetensors"), {"format": "safetensors"}, "symbolic link"),
        ("noted", partial(with_notes, damaged=False), {}, r"notes\.txt"),
        ("noted and damaged", partial(with_notes, damaged=True), {}, r"notes\.txt"),
    ],
)
def test_what_is_not_replaced(tmp_path: Path, name: str, make: Any, options: Any, message: str) -> None:
    make(tmp_path / name)
    before = content(tmp_path)
    with pytest.raises(tensorkeep.DestinationExistsError, match=message):
        tensorkeep.save(OTHER, tmp_path / name, **{"overwrite": True, **options})
    assert content(tmp_path) == before
    if "notes" in message:
        (tmp_path / name / "notes.txt").unlink()
        tensorkeep.save(OTHER, tmp_path / name, overwrite=True)
        assert same(tensorkeep.load(tmp_path / name), OTHER)


def test_a_folder_that_cannot_be_emptied_is_not_replaced(tmp_path: Path) -> None:
    """Such as the checkpoint of another user, which could not be removed after the exchange."""
    tensorkeep.save(STATE, tmp_path / "ckpt")
    refuses = mock.patch.object(os, "access", return_value=False)
    with refuses, pytest.raises(tensorkeep.StoreError, match="does not let you remove"):
        tensorkeep.save(OTHER, tmp_path / "ckpt", overwrite=True)
    assert same(tensorkeep.load(tmp_path / "ckpt"), STATE)
    assert names_in(tmp_path) == ["ckpt"]


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


def test_on_a_file_system_without_exchanges_runs_are_saved_and_folders_are_not_replaced(tmp_path: Path) -> None:
    """Such as NFS."""
    network = mock.Mock(renameat2=mock.Mock(return_value=-1))
    with (
        mock.patch.object(commit_module, "libc", return_value=network),
        mock.patch.object(commit_module.ctypes, "get_errno", return_value=errno.EINVAL),
    ):
        with tensorkeep.CheckpointManager(tmp_path / "run", keep_last=2, incremental=True) as manager:
            for step in range(1, 5):
                manager.save(step, STATE)
        assert [step.number for step in manager.steps()] == [3, 4]
        assert same(manager.restore(), STATE)
        with pytest.raises(tensorkeep.StoreError, match="cannot exchange"):
            tensorkeep.save(OTHER, tmp_path / "run/step-000004", overwrite=True)
        assert same(tensorkeep.load(tmp_path / "run"), STATE)
        for state in (STATE, OTHER):
            tensorkeep.save(state, tmp_path / "file.safetensors", overwrite=True)
    assert same(tensorkeep.load(tmp_path / "file.safetensors"), OTHER)


# Other writers, and what they leave


def test_a_destination_that_changed_meanwhile_is_checked_again(tmp_path: Path) -> None:
    place, replaced = tmp_path / "ckpt", tmp_path / "replaced"
    refused = pytest.raises(tensorkeep.DestinationExistsError, match="created here during the save")
    with refused, another_writer(place) as commit:
        place.mkdir()
        commit.publish()
    tensorkeep.save(STATE, replaced)
    with (
        pytest.raises(tensorkeep.DestinationExistsError, match="not replaced"),
        Commit(replaced, directory=True, overwrite=True, replaceable=FORMATS.get("native").recognises) as commit,
    ):
        replaced.rename(tmp_path / "aside")
        home(replaced)
        commit.publish()
    assert (replaced / "thesis.txt").exists()
    assert names_in(tmp_path) == ["aside", "ckpt", "replaced"]


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with another_writer(place):
        with pytest.raises(tensorkeep.BusyError, match="another process is saving here"):
            tensorkeep.save(STATE, place)
        # Another checkpoint in the same folder, whose name begins alike, is not touched.
        tensorkeep.save(STATE, tmp_path / "ckpt.2")
    assert names_in(tmp_path) == ["ckpt.2"]


def test_of_two_writers_that_start_together_one_saves(tmp_path: Path) -> None:
    """Each sees the other's temporary after its own check; exactly one of them saves."""
    place = tmp_path / "ckpt"
    real = commit_module.remove_stale
    rivals: list[Commit] = []

    def look(destination: Path, *, besides: Path | None = None) -> list[Path]:
        removed = real(destination, besides=besides)
        if besides is None and not rivals:
            rivals.append(another_writer(place))
            rivals[0].__enter__()
        return removed

    with mock.patch.object(commit_module, "remove_stale", look), pytest.raises(tensorkeep.BusyError):
        tensorkeep.save(STATE, place)
    rivals[0].__exit__(None, None, None)
    assert names_in(tmp_path) == []


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
    assert (len(made), names_in(tmp_path)) == (2, ["ckpt"])


def test_temporaries_of_dead_writers_are_removed_and_no_files_with_similar_names(tmp_path: Path) -> None:
    """The lock of a writer ended with its process."""
    place = tmp_path / "ckpt"
    left = left_behind(place)

    def half() -> None:
        left.mkdir()
        (left / "model.safetensors").write_bytes(b"half")

    def exchanged() -> None:
        left.symlink_to(tmp_path)

    for leave in (half, exchanged, partial(left.write_text, "a file with such a name")):
        with case(leave):
            leave()
            tensorkeep.save(STATE, place, overwrite=True)
            assert names_in(tmp_path) == ["ckpt"]
    (tmp_path / ".notes.tensorkeep-tmp").write_text("mine")
    with tensorkeep.CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
    assert names_in(tmp_path) == [".notes.tensorkeep-tmp", "ckpt", "step-000001"]


@pytest.mark.integration
def test_a_forked_child_neither_keeps_the_lock_nor_removes_anything(tmp_path: Path) -> None:
    ready, go = os.pipe(), os.pipe()
    with another_writer(tmp_path / "ckpt") as commit:
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
    assert names_in(tmp_path) == ["ckpt"]


@pytest.fixture
def locks_that_nobody_sees() -> Iterator[None]:
    """Simulate the locks of a network file system, seen from another host."""
    with mock.patch.object(commit_module.fcntl, "flock"):
        yield


@pytest.mark.usefixtures("locks_that_nobody_sees")
def test_a_temporary_is_removed_before_it_is_visible_or_not_at_all(tmp_path: Path) -> None:
    refused = pytest.raises(tensorkeep.StoreError, match="cannot make the checkpoint visible")
    with refused, another_writer(tmp_path / "ckpt") as commit:
        remove_abandoned(tmp_path)
        commit.publish()
    assert names_in(tmp_path) == []
    with another_writer(tmp_path / "ckpt") as commit:
        (commit.path / "file").write_text("whole")
        real = commit_module.sync_directory

        def publish_meanwhile(folder: Path) -> None:
            with mock.patch.object(commit_module, "sync_directory", real):
                commit.publish()

        with mock.patch.object(commit_module, "sync_directory", publish_meanwhile):
            remove_abandoned(tmp_path)
    assert ((tmp_path / "ckpt" / "file").read_text(), names_in(tmp_path)) == ("whole", ["ckpt"])


def test_temporaries_of_another_user_do_not_block_saves_to_other_paths(tmp_path: Path) -> None:
    real = commit_module._open_directory

    def open_directory(path: Path) -> int:
        if path.name.endswith(f"00000000{SUFFIX}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path)

    left = left_behind(tmp_path / "step-000001")
    left.mkdir()
    with mock.patch.object(commit_module, "_open_directory", open_directory):
        with tensorkeep.CheckpointManager(tmp_path) as manager:
            manager.save(2, STATE)
        assert names_in(tmp_path) == [left.name, "step-000002"]
        with pytest.raises(tensorkeep.StoreError, match="another save left here: Permission denied") as error:
            tensorkeep.save(STATE, tmp_path / "step-000001")
    assert error.value.path == str(left)
