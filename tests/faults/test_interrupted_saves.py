"""A save is interrupted at each of its file-system operations: the old or the new checkpoint is there, complete."""

import errno
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults import injection as faults
from faults.conftest import Choose, every, sample
from forked import ended, start
from tensorkeep.testing.equality import same

OLD = {"model": {"w": torch.arange(3000.0), "b": torch.zeros(7)}, "step": 1}
NEW = {"model": {"w": torch.arange(3000.0) * 2, "b": torch.ones(7)}, "step": 2}


def native(path: Path, state: object) -> None:
    tensorkeep.save(state, path, overwrite=True, threads=2)


def lossless(path: Path, state: object) -> None:
    tensorkeep.save(state, path, overwrite=True, compression="lossless", threads=2)


def background(path: Path, state: object) -> None:
    tensorkeep.save_async(state, path, overwrite=True, threads=2).wait()


def incremental(path: Path, state: object) -> None:
    base = path if path.exists() else None
    options = {"incremental": True, "base": base, "delta": True}
    tensorkeep.save(state, path, overwrite=True, compression="lossless", threads=2, **options)


def sharded(path: Path, state: object) -> None:
    tensorkeep.save(state, path, overwrite=True, shard_bytes=4096, threads=2)


def safetensors(path: Path, state: object) -> None:
    tensorkeep.save(state, path, format="safetensors", overwrite=True, threads=2)


def torch_file(path: Path, state: object) -> None:
    tensorkeep.save(state, path, format="torch", overwrite=True)


def dcp(path: Path, state: object) -> None:
    tensorkeep.save(state, path, format="dcp", overwrite=True, thread_count=2)


def t5x(path: Path, state: object) -> None:
    tensorkeep.save(state, path, format="t5x", overwrite=True)


def tensorstore(path: Path, state: object) -> None:
    tensorkeep.save(state, path, format="tensorstore", overwrite=True)


Save = Callable[[Path, object], None]
SAVES: dict[str, tuple[Save, str]] = {
    "native": (native, "ckpt"),
    "lossless": (lossless, "ckpt"),
    "background": (background, "ckpt"),
    "incremental": (incremental, "ckpt"),
    "sharded": (sharded, "ckpt"),
    "safetensors": (safetensors, "ckpt.safetensors"),
    "torch": (torch_file, "ckpt.pt"),
    "dcp": (dcp, "ckpt"),
    "t5x": (t5x, "ckpt"),
    "tensorstore": (tensorstore, "ckpt"),
}
# TensorStore writes in threads of its own, unseen; the folder, the sidecar, syncing and renaming are seen.
THREADED = ("t5x", "tensorstore")
"""Formats whose library aborts in a process that was forked after it was used."""

needs_tensorstore = pytest.mark.skipif(find_spec("tensorstore") is None, reason="TensorStore is not installed")
KINDS = [
    pytest.param(*value, id=name, marks=needs_tensorstore if name in THREADED else ()) for name, value in SAVES.items()
]
# Ctrl-C interrupts the wait for a background save, not the save.
IN_THE_CALL = [kind for kind in KINDS if kind.id != "background"]
FORKED = [pytest.param(*value, id=name) for name, value in SAVES.items() if name not in THREADED]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def holds(path: Path) -> str:
    """Verify the checkpoint at a path and return its state (none, old or new); others fail the test."""
    if not os.path.lexists(path):
        return "nothing"
    assert tensorkeep.verify(path).ok
    found = tensorkeep.load(path)
    if same(found, OLD):
        return "old"
    assert same(found, NEW)
    return "new"


def operations(save: Save, folder: Path, name: str, *, replace: bool) -> int:
    """Count the file-system operations of a save."""
    folder.mkdir()
    if replace:
        save(folder / name, OLD)
    count = faults.count_operations(lambda: save(folder / name, NEW))
    assert count > 5
    return count


def folders(save: Save, name: str, root: Path, chosen: Sequence[int], *, replace: bool) -> Iterator[tuple[int, Path]]:
    """Yield each chosen operation with a folder of its own, which has the checkpoint to replace."""
    for index in chosen:
        folder = root / str(index)
        folder.mkdir()
        if replace:
            save(folder / name, OLD)
        yield index, folder


@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(("save", "name"), FORKED)
@pytest.mark.parametrize("action", [faults.die, faults.die_after], ids=["before", "after"])
def test_killed_at_any_operation(
    tmp_path: Path, save: Save, name: str, action: faults.Action, replace: bool, choose: Choose, record_property: Any
) -> None:
    expected = {"old", "new"} if replace else {"nothing", "new"}
    met = set()
    count = operations(save, tmp_path / "count", name, replace=replace)
    chosen = choose(count)
    for index, folder in folders(save, name, tmp_path, chosen, replace=replace):

        def work(folder: Path = folder, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                save(folder / name, NEW)

        assert faults.in_child(work) == signal.SIGKILL
        met.add(holds(folder / name))
        # The next save at that path succeeds and leaves no other files.
        save(folder / name, NEW)
        assert holds(folder / name) == "new"
        assert names(folder) == [name]
    assert met == expected
    record_property("cases", len(chosen))


@needs_tensorstore
@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [
        ("tensorstore", "sample"),
        pytest.param("tensorstore", "every", marks=pytest.mark.slow),
        pytest.param("t5x", "every", marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_operation_beside_threads(
    tmp_path: Path, kind: str, chosen: str, replace: bool, record_property: Any
) -> None:
    # In a process that imports TensorStore and uses it only in its children.
    process = start(kill_everywhere, kind, replace, tmp_path, chosen, output=tmp_path / "output")
    code, output = ended(process, 300), (tmp_path / "output").read_text()
    assert code == 0, output
    assert set(output.split()) == ({"old", "new"} if replace else {"nothing", "new"})
    assert len(output.split()) > 3
    record_property("cases", len(output.split()))


def kill_everywhere(kind: str, replace: bool, root: Path, chosen: str) -> None:
    """Kill a save at a sample of its operations, or at every one, and print what the folder holds after each."""
    importlib.import_module("tensorstore")
    save, name = SAVES[kind]
    total = root / "total"

    def count() -> None:
        total.write_text(str(operations(save, root / "count", name, replace=replace)))

    assert faults.in_child(count) == 0
    for index in {"sample": sample, "every": every}[chosen](int(total.read_text())):
        folder = root / str(index)
        folder.mkdir()

        def work(folder: Path = folder, index: int = index) -> None:
            if replace:
                save(folder / name, OLD)
            with faults.broken(fail_at=index, action=faults.die):
                save(folder / name, NEW)

        def look(folder: Path = folder) -> None:
            folder.with_suffix(".found").write_text(holds(folder / name))
            save(folder / name, NEW)
            assert holds(folder / name) == "new"
            assert names(folder) == [name]

        assert faults.in_child(work) == signal.SIGKILL
        assert faults.in_child(look) == 0, f"after operation {index}"
        print(folder.with_suffix(".found").read_text(), flush=True)


@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(("save", "name"), KINDS)
@pytest.mark.parametrize(
    "number",
    [
        errno.ENOSPC,
        pytest.param(errno.EIO, marks=pytest.mark.slow),
        pytest.param(errno.EROFS, marks=pytest.mark.slow),
    ],
    ids=errno.errorcode.get,
)
def test_an_error_at_any_operation_is_raised(
    tmp_path: Path, save: Save, name: str, number: int, replace: bool, choose: Choose, record_property: Any
) -> None:
    raised = 0
    chosen = choose(operations(save, tmp_path / "count", name, replace=replace))
    for index, folder in folders(save, name, tmp_path, chosen, replace=replace):
        with faults.broken(fail_at=index, action=faults.raise_error(number)):
            try:
                save(folder / name, NEW)
            except tensorkeep.StoreError as error:
                raised += 1
                assert os.strerror(number) in error.message
                assert error.path is not None and error.path.startswith(str(folder))
                assert error.remedy
                # If syncing the folder fails after the rename, the new checkpoint is visible.
                assert holds(folder / name) in (("old", "new") if replace else ("nothing", "new"))
            else:
                # Only the removal of the replaced checkpoint may fail without an error, because the new one is durable.
                assert holds(folder / name) == "new"
        save(folder / name, NEW)
        assert names(folder) == [name]
    assert raised > len(chosen) / 3
    record_property("cases", len(chosen))


@pytest.mark.parametrize(("save", "name"), KINDS)
def test_short_writes_are_continued(
    tmp_path: Path, save: Save, name: str, choose: Choose, record_property: Any
) -> None:
    chosen = choose(operations(save, tmp_path / "count", name, replace=False))
    for index in chosen:
        path = tmp_path / str(index) / name
        with faults.broken(fail_at=index, action=faults.write_short):
            save(path, NEW)
        assert holds(path) == "new"
    record_property("cases", len(chosen))


@pytest.mark.parametrize("replace", [False, True], ids=["fresh", "replacing"])
@pytest.mark.parametrize(("save", "name"), IN_THE_CALL)
def test_ctrl_c_at_any_operation(
    tmp_path: Path, save: Save, name: str, replace: bool, choose: Choose, record_property: Any
) -> None:
    stopped = 0
    chosen = choose(operations(save, tmp_path / "count", name, replace=replace))
    for index, folder in folders(save, name, tmp_path, chosen, replace=replace):
        with faults.broken(fail_at=index, action=faults.interrupt):
            try:
                save(folder / name, NEW)
            except KeyboardInterrupt:
                stopped += 1
        assert holds(folder / name) in (("old", "new") if replace else ("nothing", "new"))
        save(folder / name, NEW)
        assert names(folder) == [name]
    assert stopped > len(chosen) / 3
    record_property("cases", len(chosen))
