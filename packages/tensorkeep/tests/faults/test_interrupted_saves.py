"""A save is interrupted at each of its file-system operations: the old or the new checkpoint is there, complete."""

import errno
import importlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from fault_cases import Choose, copy_tree, every, some, swept
from faults import injection as faults
from forked import ended, start
from interrupts import interrupted_at
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in
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


def folders(kind: Kind, root: Path, chosen: Choose, *, replace: bool) -> Iterator[tuple[int, Path]]:
    """Yield each chosen operation of a save with a folder of its own, which has the checkpoint to replace."""
    save, name = kind
    if replace:
        save(root / name, OLD)
    for index in chosen(len(operations(kind, root / "count", replace=replace))):
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
    assert (holds(folder / name), names_in(folder)) == ("new", [name])


@pytest.mark.integration
@pytest.mark.parametrize(("kind", "replace", "action", "choose"), swept(FORKED, REPLACE, DEATHS))
def test_killed_at_any_operation(tmp_path: Path, kind: Kind, replace: bool, action: Any, chosen: Choose) -> None:
    save, name = kind
    met = set()
    for index, folder in folders(kind, tmp_path, chosen, replace=replace):

        def work(folder: Path = folder, index: int = index) -> None:
            with faults.broken(fail_at=index, action=action):
                save(folder / name, NEW)

        assert faults.in_child(work) == signal.SIGKILL
        met.add(holds(folder / name))
        check_next_save(kind, folder)
    assert met == allowed(replace)


@pytest.mark.integration
@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize(
    ("name", "replace", "chosen"),
    [("tensorstore", True, "some"), *exhaustive(*product(("tensorstore", "t5x"), (False, True), ("every",)))],
)
def test_killed_beside_threads(tmp_path: Path, name: str, replace: bool, chosen: str, record_property: Any) -> None:
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
def test_an_error_at_any_operation(tmp_path: Path, kind: Kind, replace: bool, number: int, chosen: Choose) -> None:
    save, name = kind
    raised = 0
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


@pytest.mark.parametrize(("kind", "choose"), swept(KINDS))
def test_short_writes_are_continued(tmp_path: Path, kind: Kind, chosen: Choose) -> None:
    save, name = kind
    seen = operations(kind, tmp_path / "count", replace=False)
    writes = [index for index, operation in enumerate(seen) if operation == "pwrite"]
    for place in chosen(len(writes)):
        path = tmp_path / str(place) / name
        with faults.broken(fail_at=writes[place], action=faults.write_short):
            save(path, NEW)
        assert holds(path) == "new"


def managed(path: Path, state: object, *, asynchronous: bool) -> None:
    with tensorkeep.CheckpointManager(path, asynchronous=asynchronous, threads=2, keep_last=1) as manager:
        manager.save(1, state, overwrite=True)


MANAGED: dict[str, Kind] = {str(on): (partial(managed, asynchronous=on), "runs") for on in (False, True)}


@pytest.mark.parametrize("stride", [499, *exhaustive(3)])
@pytest.mark.parametrize("kind", [*KINDS.values(), *MANAGED.values()], ids=[*KINDS, *MANAGED])
def test_a_handler_that_raises_at_any_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, stride: int
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # it may raise in the callback of a weak reference
    save, name = kind
    for state in (OLD, NEW, OLD):
        save(tmp_path / name, state)  # the libraries of some formats open files when they are first used
    for place in itertools.count(stride // 3, stride):
        late = TimeoutError("as of an alarm")  # an OSError that is none of the operating system
        came = interrupted_at(place, lambda: save(tmp_path / name, NEW), late)
        late.__traceback__ = None
        for thread in [each for each in threading.enumerate() if each.name.startswith("tensorkeep")]:
            thread.join(60)
        # Its own files only: those of earlier tests are closed meanwhile.
        opened = [str(each.resolve()) for each in Path("/proc/self/fd").iterdir()]
        assert not [each for each in opened if each.startswith(str(tmp_path.resolve()))]
        assert names_in(tmp_path) == [name]
        inside = names_in(tmp_path / name) if kind in MANAGED.values() else [holds(tmp_path / name)]
        assert inside in (["step-000001"], ["old"], ["new"])
        if not came:
            break
    assert place > 500
