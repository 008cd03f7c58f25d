"""Directories of arrays: held open while they are used, listed, and looked through for what others wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import CorruptCheckpointError, HoldfastError, NotACheckpointError, UnsupportedError
from holdfast.formats.tensorstore_arrays import discovery
from holdfast.formats.tensorstore_arrays import sidecar as sidecars
from holdfast.formats.tensorstore_arrays.opened import Wanted
from holdfast.formats.tensorstore_arrays.specs import Place
from holdfast.io.files import store_error


@contextmanager
def held(path: Path) -> Iterator[str]:
    """Hold a directory open and give a path of it that TensorStore takes, whatever characters are in its name."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpointError("there is no such directory", path=path) from error
    except OSError as error:
        raise store_error(error, path, "open the directory") from error
    try:
        yield f"/proc/self/fd/{fd}/"
    finally:
        os.close(fd)


def files_below(path: Path) -> dict[str, int]:
    """Return the size of every file below a directory, by its path from there."""
    # Chunks of 64 elements make tens of thousands of files: no `Path` for each.
    found = {}
    for folder, _, files in os.walk(path):
        inside = folder[len(str(path)) + 1 :]
        for name in files:
            found[f"{inside}/{name}" if inside else name] = os.lstat(f"{folder}/{name}").st_size
    return found


def foreign_arrays(path: Path, root: str) -> tuple[Place, dict[str, Wanted]]:
    """Return the arrays that others wrote, by name: a key with dots for slashes."""
    if discovery.was_ours(path, root):
        raise CorruptCheckpointError(
            "is missing or damaged, and without it nobody knows what state the arrays are",
            path=path / sidecars.FILE_NAME,
            remedy="take another checkpoint or copy; the arrays themselves can be read with TensorStore or zarr",
        )
    if discovery.is_database(Path(root)):
        place = Place(root, "ocdbt")
        keys = discovery.find_in_database(path, place)
    else:
        place = Place(root)
        try:
            keys = discovery.find_arrays(Path(root))
        except HoldfastError as error:
            raise type(error)(error.message, path=path, remedy=error.remedy) from error
    wanted: dict[str, Wanted] = {}
    for key, zarr in keys.items():
        # The name of what is a single array itself is all that there is.
        name = key.replace("/", ".") or path.absolute().name or "array"
        if name in wanted:
            raise UnsupportedError(f"holds two arrays that would be called {name!r}", path=path, name=name)
        wanted[name] = Wanted(key, zarr)
    return place, wanted
