"""The scratch folder of a run: on the measured disk, locked by the run, removed after it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorkeep.bench.checkpoint.probes import remove
from tensorkeep.errors import BusyError, StoreError

NAME = ".tensorkeep-bench"


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Yield an empty folder below ``directory``; remove it at the end, and first those of killed runs.

    Raises BusyError if another run uses it; StoreError if it cannot be written to.
    """
    path = directory / NAME
    descriptor = -1
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear(path)
        except BlockingIOError as error:
            raise BusyError(
                "another bench is running in this folder", path=path, remedy="wait for it, or give --dir"
            ) from error
        except OSError as error:
            raise StoreError(f"cannot use this folder: {error.strerror}", path=path, remedy="give --dir") from error
        try:
            yield path
        finally:
            _clear(path)
            path.rmdir()
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _clear(path: Path) -> None:
    for found in path.iterdir():
        remove(found)
