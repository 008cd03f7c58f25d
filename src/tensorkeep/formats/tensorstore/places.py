"""Directories of arrays: held open while they are used, and looked through for what we and others wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, NotFoundError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.probe import first_bytes
from tensorkeep.formats.tensorstore import discovery
from tensorkeep.formats.tensorstore import sidecar as sidecars
from tensorkeep.formats.tensorstore.failures import reading, tensorstore
from tensorkeep.formats.tensorstore.opened import Wanted
from tensorkeep.formats.tensorstore.sidecar import Sidecar
from tensorkeep.formats.tensorstore.specs import METADATA_FILE, Place, context
from tensorkeep.formats.tensorstore.walking import check_folders, files_below
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import store_error


@contextmanager
def held(path: Path) -> Iterator[str]:
    """Hold a directory open and give a path of it that TensorStore takes, whatever characters are in its name."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFoundError("there is no such directory", path=path) from error
    except OSError as error:
        raise store_error(error, path, "open the directory") from error
    try:
        yield f"/proc/self/fd/{fd}/"
    finally:
        os.close(fd)


def own_arrays(directory: Directory, root: str) -> tuple[Sidecar, Place, dict[str, Wanted]]:
    """Return what our own file says of a directory, checked against what lies there, and the arrays to open.

    Parameters
    ----------
    directory : Directory
        What is read, by the name that errors call it.
    root : str
        A path that stays its own, with a slash at its end.

    Raises
    ------
    CorruptCheckpointError, UnsupportedError, StoreError
    """
    found = sidecars.read(directory)
    place = Place(root, found.kvstore)
    wanted = {name: Wanted(record.key, found.zarr, record.types, record.shape) for name, record in found.arrays.items()}
    _check_files(found, directory.path, root)
    _check_metadata(found, directory.path, place)
    return found, place, wanted


def _check_files(found: Sidecar, path: Path, root: str) -> None:
    """Check that nothing is missing that no chunk's absence would tell, and that no link leads out."""
    if found.kvstore == "file":
        for name, content in sidecars.GROUP_FILES[found.zarr].items():
            if first_bytes(Path(root, name), len(content) + 1) != content:
                raise CorruptCheckpointError("is not as it was written", path=path / name)
        check_folders(root, (record.key for record in found.arrays.values()), path)
        return
    check_folders(root, [""], path)
    there = files_below(Path(root), path)
    for name, size in found.files.items():
        if there.get(name) != size:
            problem = "is missing" if name not in there else f"holds {there[name]:,} bytes, {size:,} were written"
            raise CorruptCheckpointError(problem, path=path / name)


def _check_metadata(found: Sidecar, path: Path, place: Place) -> None:
    """Check each array's metadata file against its checksum, before TensorStore goes by it."""
    if not found.arrays:
        return
    file = METADATA_FILE[found.zarr]
    with reading(path, place.root):
        store = tensorstore().KvStore.open(place.store(), context=context()).result()
        futures = {name: store.read(f"{record.key}/{file}") for name, record in found.arrays.items()}
    for name, future in futures.items():
        with reading(path, place.root, name):
            result = future.result()
        where = path / found.arrays[name].key / file
        if result.state == "missing":
            raise CorruptCheckpointError("the array's metadata is missing", path=where, name=name)
        if sealed.digest(result.value) != found.arrays[name].metadata:
            raise CorruptCheckpointError("the array's metadata is not what was written", path=where, name=name)


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
        keys = discovery.find_arrays(Path(root), path)
    wanted: dict[str, Wanted] = {}
    for key, zarr in keys.items():
        # The name of what is a single array itself is all that there is.
        name = key.replace("/", ".") or path.absolute().name or "array"
        if name in wanted:
            raise UnsupportedError(f"holds two arrays that would be called {name!r}", path=path, name=name)
        wanted[name] = Wanted(key, zarr)
    return place, wanted
