"""Saves that are interrupted at their file-system operations; used by the tests of each package's formats."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tensorkeep
from fault_cases import Choose, copy_tree
from faults import injection as faults
from interrupts import interrupted_at
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in

OLD = {"model": {"w": torch.arange(3000.0), "b": torch.zeros(7)}, "step": 1}
NEW = {"model": {"w": torch.arange(3000.0) * 2, "b": torch.ones(7)}, "step": 2}
Save = Callable[[Path, object], object]
Kind = tuple[Save, str]


def saves(**options: Any) -> Save:
    return lambda path, state: tensorkeep.save(state, path, overwrite=True, **options)


REPLACE = {"fresh": False, "replacing": True}
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


def check_errors(tmp_path: Path, kind: Kind, replace: bool, number: int, chosen: Choose) -> None:
    """Check that the caller hears of an error at any operation, and that nothing half-made is visible."""
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


def check_short_writes(tmp_path: Path, kind: Kind, chosen: Choose) -> None:
    """Check that a write of fewer bytes than asked for is continued."""
    save, name = kind
    seen = operations(kind, tmp_path / "count", replace=False)
    writes = [index for index, operation in enumerate(seen) if operation == "pwrite"]
    for place in chosen(len(writes)):
        path = tmp_path / str(place) / name
        with faults.broken(fail_at=writes[place], action=faults.write_short):
            save(path, NEW)
        assert holds(path) == "new"


def check_handlers(tmp_path: Path, kind: Kind, stride: int, content: Callable[[Path], list[str]]) -> None:
    """Check that a signal handler that raises in the middle of a save leaves no file open and nothing half-made."""
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
        assert content(tmp_path / name) in (["step-000001"], ["old"], ["new"])
        if not came:
            break
    assert place > 500
