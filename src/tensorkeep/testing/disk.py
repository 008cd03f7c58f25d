"""Contents of files and folders, and a system call that runs out of space."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def content(path: Path) -> dict[str, bytes]:
    """Return the contents of all files at or below a path, by name."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in sorted(files)}


def names_in(folder: Path) -> list[str]:
    """Return the names of all entries of a folder, hidden and temporary ones included."""
    return sorted(entry.name for entry in folder.iterdir())


class FailingDisk:
    """A system call that counts its calls and raises ENOSPC from a chosen call on."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.calls = 0
        self._call = call
        self._fatal: int | None = None

    def fail_at(self, number: int) -> None:
        self.calls, self._fatal = 0, number

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self._fatal is not None and self.calls >= self._fatal:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._call(*args)
