"""The folder that a run works in: on the disk that is measured, one run at a time, removed when it is over."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from tensorkeep.bench.checkpoint.measure import remove
from tensorkeep.errors import BusyError, StoreError

NAME = ".tensorkeep-bench"


class Scratch:
    """A context manager that gives an empty folder below ``directory``.

    What a run that was killed left there is removed first.

    Raises
    ------
    BusyError
        If another run works there.
    StoreError
        If nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._fd = -1

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._clear()
        except BlockingIOError as error:
            self._close()
            raise BusyError("another bench runs here", path=self.path, remedy="wait for it, or give --dir") from error
        except OSError as error:
            self._close()
            raise StoreError(f"cannot work here: {error.strerror}", path=self.path, remedy="give --dir") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._clear()
            self.path.rmdir()
        finally:
            self._close()

    def _clear(self) -> None:
        for found in self.path.iterdir():
            remove(found)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
