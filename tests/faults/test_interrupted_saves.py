"""Whatever happens at any instant of a save, the old checkpoint or the new one is there, whole."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.testing import faults
from holdfast.testing.equality import same

OLD = {"model": {"w": torch.arange(3000.0), "b": torch.zeros(7)}, "step": 1}
NEW = {"model": {"w": torch.arange(3000.0) * 2, "b": torch.ones(7)}, "step": 2}


def native(path: Path, state: object) -> None:
    holdfast.save(state, path, overwrite=True, threads=2)


def lossless(path: Path, state: object) -> None:
    holdfast.save(state, path, overwrite=True, compression="lossless", threads=2)


def sharded(path: Path, state: object) -> None:
    holdfast.save(state, path, overwrite=True, shard_bytes=4096, threads=2)


def safetensors(path: Path, state: object) -> None:
    holdfast.save(state, path, format="safetensors", overwrite=True, threads=2)


def torch_file(path: Path, state: object) -> None:
    holdfast.save(state, path, format="torch", overwrite=True)


Save = Callable[[Path, object], None]
SAVES: dict[str, tuple[Save, str]] = {
    "native": (native, "ckpt"),
    "lossless": (lossless, "ckpt"),
    "sharded": (sharded, "ckpt"),
    "safetensors": (safetensors, "ckpt.safetensors"),
    "torch": (torch_file, "ckpt.pt"),
}
KINDS = [pytest.param(*value, id=name) for name, value in SAVES.items()]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def holds(path: Path) -> str:
    """Say which state a path holds, having verified it: nothing, old or new. Anything else fails."""
    if not os.path.lexists(path):
        return "nothing"
    assert holdfast.verify(path).ok
    found = holdfast.load(path)
    if same(found, OLD):
        return "old"
    assert same(found, NEW)
    return "new"


def operations(save: Save, folder: Path, name: str, *, replace: bool) -> int:
    """Count what a save takes, so that every test below walks through all of it."""
    folder.mkdir()
    if replace:
        save(folder / name, OLD)
    count = faults.count_operations(lambda: save(folder / name, NEW))
    assert count > 5
    return count


@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(("save", "name"), KINDS)
@pytest.mark.parametrize("action", [faults.die, faults.die_after], ids=["before", "after"])
def test_killed_at_every_operation(tmp_path: Path, save: Save, name: str, action: faults.Action, replace: bool) -> None:
    expected = {"old", "new"} if replace else {"nothing", "new"}
    met = set()
    for index in range(operations(save, tmp_path / "count", name, replace=replace)):
        folder = tmp_path / str(index)
        folder.mkdir()
        if replace:
            save(folder / name, OLD)

        def work(folder: Path = folder, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                save(folder / name, NEW)

        assert faults.in_child(work) == signal.SIGKILL
        met.add(holds(folder / name))
        # The next save in that place works and leaves nothing but itself.
        save(folder / name, NEW)
        assert holds(folder / name) == "new"
        assert names(folder) == [name]
    assert met == expected


@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(("save", "name"), KINDS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=["ENOSPC", "EIO", "EROFS"])
def test_an_error_at_every_operation_is_heard(
    tmp_path: Path, save: Save, name: str, number: int, replace: bool
) -> None:
    heard = 0
    for index in range(operations(save, tmp_path / "count", name, replace=replace)):
        folder = tmp_path / str(index)
        folder.mkdir()
        if replace:
            save(folder / name, OLD)
        with faults.broken(fail_at=index, action=faults.raise_error(number)):
            try:
                save(folder / name, NEW)
            except holdfast.StoreError as error:
                heard += 1
                assert os.strerror(number) in error.message
                assert error.path is not None and error.path.startswith(str(folder))
                assert error.remedy
                # An error after the rename (syncing the folder) comes with the new one in place.
                assert holds(folder / name) in (("old", "new") if replace else ("nothing", "new"))
            else:
                # Only cleaning up may fail unheard: the checkpoint is there.
                assert holds(folder / name) == "new"
        save(folder / name, NEW)
        assert names(folder) == [name]
    assert heard > 4


@pytest.mark.parametrize(("save", "name"), KINDS)
def test_short_writes_are_continued(tmp_path: Path, save: Save, name: str) -> None:
    for index in range(operations(save, tmp_path / "count", name, replace=False)):
        path = tmp_path / str(index) / name
        with faults.broken(fail_at=index, action=faults.write_short):
            save(path, NEW)
        assert holds(path) == "new"


@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(("save", "name"), KINDS)
def test_ctrl_c_at_every_operation(tmp_path: Path, save: Save, name: str, replace: bool) -> None:
    stopped = 0
    for index in range(operations(save, tmp_path / "count", name, replace=replace)):
        folder = tmp_path / str(index)
        folder.mkdir()
        if replace:
            save(folder / name, OLD)
        with faults.broken(fail_at=index, action=faults.interrupt):
            try:
                save(folder / name, NEW)
            except KeyboardInterrupt:
                stopped += 1
        assert holds(folder / name) in (("old", "new") if replace else ("nothing", "new"))
        save(folder / name, NEW)
        assert names(folder) == [name]
    assert stopped > 4
