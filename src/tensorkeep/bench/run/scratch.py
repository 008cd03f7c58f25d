"""The scratch folder of a run: on the measured disk, locked by the run, removed after it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorkeep.bench.checkpoint.probes import remove
from tensorkeep.errors import BusyError
from tensorkeep.storage.commit import FolderLock
from tensorkeep.storage.direct_io import store_errors

NAME = ".tensorkeep-bench"


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Yield an empty folder below ``directory``; remove it at the end, and first those of killed runs.

    Raises BusyError if another run uses it; StoreError if it cannot be written to.
    """
    path = directory / NAME
    try:
        lock = FolderLock(path)
    except BusyError as error:
        remedy = "wait for it, or give --dir"
        raise BusyError("another bench is running in this folder", path=path, remedy=remedy) from error
    with store_errors(path, "use this folder"):
        _clear(path)
    try:
        yield path
    finally:
        _clear(path)
        path.rmdir()
        lock.release()


def _clear(path: Path) -> None:
    for found in path.iterdir():
        remove(found)
