"""A save is interrupted at each of its file-system operations: the old or the new checkpoint is there, complete."""

import errno
import importlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from faults import injection as faults
from faults.conftest import Choose, copy_tree, every, some, swept
from forked import ended, start
from tensorkeep.testing.disk import names_in
from tensorkeep.testing.equality import same
from tiers import exhaustive

OLD = {"model": {"w": torch.arange(3000.0), "b": torch.zeros(7)}, "step": 1}
NEW = {"model": {"w": torch.arange(3000.0) * 2, "b": torch.ones(7)}, "step": 2}


Save = Callable[[Path, object], object]
Kind = tuple[Save, str]


def saves(**options: Any) -> Save:
    return lambda path, state: tensorkeep.save(state, path, overwrite=True, **options)


def background(path: Path, state: object) -> None:
    tensorkeep.save_async(state, path, overwrite=True, threads=2).wait()


def incremental(path: Path, state: object) -> None:
    base = path if path.exists() else None
    options = {"incremental": True, "base": base, "delta": True}
    tensorkeep.save(state, path, overwrite=True, compression="lossless", threads=2, **options)


def tensorstore(path: Path, state: object, *, format: str) -> None:
    pytest.importorskip("tensorstore")
    tensorkeep.save(state, path, format=format, overwrite=True)


KINDS: dict[str, Kind] = {
    "native": (saves(threads=2), "ckpt"),
    "lossless": (saves(compression="lossless", threads=2), "ckpt"),
    "background": (background, "ckpt"),
    "incremental": (incremental, "ckpt"),
    "sharded": (saves(shard_bytes=4096, threads=2), "ckpt"),
    "safetensors": (saves(format="safetensors", threads=2), "ckpt.safetensors"),
    "torch": (saves(format="torch"), "ckpt.pt"),
    "dcp": (saves(format="dcp", thread_count=2), "ckpt"),
    "t5x": (partial(tensorstore, format="t5x"), "ckpt"),
    "tensorstore": (partial(tensorstore, format="tensorstore"), "ckpt"),
}
# TensorStore writes in threads of its own, unseen; the folder, the sidecar, syncing and renaming are seen. It aborts in
# a process that was forked after it was used.
FORKED = {name: kind for name, kind in KINDS.items() if name not in ("t5x", "tensorstore")}
# Ctrl-C interrupts the wait for a background save, not the save.
IN_THE_CALL = {name: kind for name, kind in KINDS.items() if name != "background"}
REPLACE = {"fresh": False, "replacing": True}
DEATHS = {"before": faults.die, "after": faults.die_after}
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EROFS": errno.EROFS}


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


def operations(kind: Kind, folder: Path, *, replace: bool) -> list[str]:
    """Return the names of the file-system operations of a save."""
    save, name = kind
    folder.mkdir()
    if replace:
        save(folder / name, OLD)
    with faults.broken() as seen:
        save(folder / name, NEW)
    assert len(seen.seen) > 5
    return seen.seen


def folders(kind: Kind, root: Path, chosen: Sequence[int], *, replace: bool) -> Iterator[tuple[int, Path]]:
    """Yield each chosen operation with a folder of its own, which has the checkpoint to replace."""
    save, name = kind
    if replace:
        save(root / name, OLD)
    for index in chosen:
        folder = root / str(index)
        folder.mkdir()
        if replace:
            copy_tree(root / name, folder / name)
        yield index, folder


def allowed(replace: bool) -> set[str]:
    """Return what the path may hold after an interrupted save."""
    return {"old", "new"} if replace else {"nothing", "new"}


def check_next_save(kind: Kind, folder: Path) -> None:
    """Assert that the next save at that path succeeds and leaves no other files."""
    save, name = kind
    save(folder / name, NEW)
    assert holds(folder / name) == "new"
    assert names_in(folder) == [name]


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "replace", "action", "choose"), swept(FORKED, REPLACE, DEATHS))
def test_killed_at_any_operation(
    tmp_path: Path, kind: Kind, replace: bool, action: faults.Action, choose: Choose, record_property: Any
) -> None:
    save, name = kind
    met = set()
    chosen = choose(len(operations(kind, tmp_path / "count", replace=replace)))
    for index, folder in folders(kind, tmp_path, chosen, replace=replace):

        def work(folder: Path = folder, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                save(folder / name, NEW)

        assert faults.in_child(work) == signal.SIGKILL
        met.add(holds(folder / name))
        check_next_save(kind, folder)
    assert met == allowed(replace)
    record_property("cases", len(chosen))


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("name", "replace", "chosen"),
    [("tensorstore", True, "some"), *exhaustive(*product(("tensorstore", "t5x"), (False, True), ("every",)))],
)
def test_killed_at_any_operation_beside_threads(
    tmp_path: Path, name: str, replace: bool, chosen: str, record_property: Any
) -> None:
    pytest.importorskip("tensorstore")
    # In a process that imports TensorStore and uses it only in its children.
    process = start(kill_everywhere, name, replace, tmp_path, chosen, output=tmp_path / "output")
    code, output = ended(process), (tmp_path / "output").read_text()
    assert code == 0, output
    assert set(output.split()) == allowed(replace)
    record_property("cases", len(output.split()))


def kill_everywhere(name: str, replace: bool, root: Path, chosen: str) -> None:
    """Kill a save at some of its operations, or at every one, and print what the folder holds after each."""
    importlib.import_module("tensorstore")
    kind = save, file = KINDS[name]
    total = root / "total"

    def count() -> None:
        total.write_text(str(len(operations(kind, root / "count", replace=replace))))

    assert faults.in_child(count) == 0
    for index in {"some": some, "every": every}[chosen](int(total.read_text())):
        folder = root / str(index)
        folder.mkdir()

        def work(folder: Path = folder, index: int = index) -> None:
            if replace:
                save(folder / file, OLD)
            with faults.broken(fail_at=index, action=faults.die):
                save(folder / file, NEW)

        def look(folder: Path = folder) -> None:
            folder.with_suffix(".found").write_text(holds(folder / file))
            check_next_save(kind, folder)

        assert faults.in_child(work) == signal.SIGKILL
        assert faults.in_child(look) == 0, f"after operation {index}"
        print(folder.with_suffix(".found").read_text(), flush=True)


@pytest.mark.parametrize(("kind", "replace", "number", "choose"), swept(KINDS, REPLACE, ERRORS))
def test_an_error_at_any_operation_is_raised(
    tmp_path: Path, kind: Kind, replace: bool, number: int, choose: Choose, record_property: Any
) -> None:
    save, name = kind
    raised = 0
    chosen = choose(len(operations(kind, tmp_path / "count", replace=replace)))
    for index, folder in folders(kind, tmp_path, chosen, replace=replace):
        with faults.broken(fail_at=index, action=faults.raise_error(number)):
            try:
                save(folder / name, NEW)
            except tensorkeep.StoreError as error:
                raised += 1
                assert os.strerror(number) in error.message
                assert error.path is not None and error.path.startswith(str(folder))
                assert error.remedy
                # If syncing the folder fails after the rename, the new checkpoint is visible.
                assert holds(folder / name) in allowed(replace)
            else:
                # Only the removal of the replaced checkpoint may fail without an error, because the new one is durable.
                assert holds(folder / name) == "new"
        check_next_save(kind, folder)
    assert raised
    record_property("cases", len(chosen))


@pytest.mark.parametrize(("kind", "choose"), swept(KINDS))
def test_short_writes_are_continued(tmp_path: Path, kind: Kind, choose: Choose, record_property: Any) -> None:
    save, name = kind
    seen = operations(kind, tmp_path / "count", replace=False)
    writes = [index for index, operation in enumerate(seen) if operation == "pwrite"]
    chosen = [writes[place] for place in choose(len(writes))]
    for index in chosen:
        path = tmp_path / str(index) / name
        with faults.broken(fail_at=index, action=faults.write_short):
            save(path, NEW)
        assert holds(path) == "new"
    record_property("cases", len(chosen))


@pytest.mark.parametrize(("kind", "replace", "choose"), swept(IN_THE_CALL, REPLACE))
def test_ctrl_c_at_any_operation(
    tmp_path: Path, kind: Kind, replace: bool, choose: Choose, record_property: Any
) -> None:
    save, name = kind
    stopped = 0
    chosen = choose(len(operations(kind, tmp_path / "count", replace=replace)))
    for index, folder in folders(kind, tmp_path, chosen, replace=replace):
        with faults.broken(fail_at=index, action=faults.interrupt):
            try:
                save(folder / name, NEW)
            except KeyboardInterrupt:
                stopped += 1
        assert holds(folder / name) in allowed(replace)
        check_next_save(kind, folder)
    assert stopped
    record_property("cases", len(chosen))
