"""Which directories hold TensorStore's arrays, and where in them the arrays lie; no array is opened for it.

Directories that hold arrays and are a format of their own (Orbax, T5X) are left to that.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import NotACheckpointError, UnsupportedError
from holdfast.formats.first_bytes import file_mode, first_bytes, names_in
from holdfast.formats.tensorstore_arrays import sidecar
from holdfast.formats.tensorstore_arrays.failures import reading, tensorstore
from holdfast.formats.tensorstore_arrays.specs import METADATA_FILE, Place, context

_OTHERS = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"))
"""Files of Orbax's items and steps, and of T5X."""
_MANIFEST = "manifest.ocdbt"
_MANIFEST_START = bytes.fromhex("0cdb3a2a")
_GROUP = ".zgroup"
_ZARR3 = METADATA_FILE[3]

_MOST_ARRAYS = 200_000
_MOST_DEPTH = 64
_MOST_METADATA = 16 * 1024**2

Keys = dict[str, int]
"""The version of zarr of each array, by its key: its path in the directory, empty for the directory itself."""


def recognises(path: Path) -> bool:
    """Say whether a directory holds TensorStore's arrays, by looking at names and first bytes only."""
    if not stat.S_ISDIR(file_mode(path)):
        return False
    if sidecar.is_ours(path):
        return True
    names = names_in(path)
    if not _OTHERS.isdisjoint(names):
        return False
    return is_database(path) or _is_node(path) or _holds_only_nodes(path, names)


def is_database(path: Path) -> bool:
    """Say whether a directory is an OCDBT database."""
    return first_bytes(path / _MANIFEST, 4) == _MANIFEST_START


def was_ours(path: Path, root: str) -> bool:
    """Say whether the attributes of a directory's or a database's group say that our own file belongs to it."""
    mark = sidecar.MARK.encode()
    if not is_database(Path(root)):
        return any(mark in (first_bytes(Path(root, name), 4096) or b"") for name in (".zattrs", _ZARR3))
    place = Place(root, "ocdbt")
    with reading(path, place.root):
        store = tensorstore().KvStore.open(place.store(), context=context()).result()
        return any(mark in store.read(name).result().value for name in (".zattrs", _ZARR3))


def _is_node(path: Path) -> bool:
    """Say whether a directory is an array or a group of zarr."""
    return _zarr_of(path) is not None or first_bytes(path / _GROUP, 1) == b"{" or _has_zarr3(path, b'"group"')


def _zarr_of(path: Path) -> int | None:
    """Return the version of zarr of the array that a directory is; None if it is none."""
    if first_bytes(path / METADATA_FILE[2], 1) == b"{":
        return 2
    return 3 if _has_zarr3(path, b'"array"') else None


def _has_zarr3(path: Path, kind: bytes) -> bool:
    # As much as the metadata of any array takes; what kind a node is may stand at its end.
    start = first_bytes(path / _ZARR3, 65536) or b""
    return start.lstrip().startswith(b"{") and kind in start and b'"node_type"' in start


def _holds_only_nodes(path: Path, names: list[str]) -> bool:
    folders = [path / name for name in names if not name.startswith(".") and stat.S_ISDIR(file_mode(path / name))]
    return bool(folders) and all(not sidecar.is_ours(folder) and _is_node(folder) for folder in folders)


def find_arrays(path: Path) -> Keys:
    """Return the arrays that lie in a directory, at any depth, in the order of their names.

    Raises
    ------
    NotACheckpointError
        If there is none.
    UnsupportedError
        If they are too many, too deep, or their metadata is impossibly large.
    """
    found = dict(_in_directory(path))
    if not found:
        raise NotACheckpointError("holds no array of TensorStore", path=path)
    return found


def _in_directory(path: Path) -> Iterator[tuple[str, int]]:
    count = 0
    for folder, folders, files in os.walk(path):
        here = Path(folder)
        folders.sort()
        if len(here.relative_to(path).parts) > _MOST_DEPTH:
            raise UnsupportedError(f"its folders are nested more than {_MOST_DEPTH} deep", path=path)
        version = _zarr_of(here) if not {METADATA_FILE[2], _ZARR3}.isdisjoint(files) else None
        if version is None:
            continue
        folders.clear()  # they hold its chunks
        size = (here / METADATA_FILE[version]).stat().st_size
        count += 1
        if size > _MOST_METADATA or count > _MOST_ARRAYS:
            raise UnsupportedError(f"has {count:,} arrays, or metadata of {size:,} bytes: more than is read", path=path)
        key = str(here.relative_to(path))
        yield "" if key == "." else key, version


def find_in_database(path: Path, place: Place) -> Keys:
    """Return the arrays of an OCDBT database; see `find_arrays`."""
    with reading(path, place.root):
        store = tensorstore().KvStore.open(place.store(), context=context()).result()
        listed = sorted(store.list().result())
    found = {}
    for key in listed:
        text = key.decode(errors="surrogateescape")
        for version, file in METADATA_FILE.items():
            if text == file or text.endswith(f"/{file}"):
                found[text[: -len(file)].rstrip("/")] = version
    if version_3 := [key for key, version in found.items() if version == 3]:
        with reading(path, place.root):
            futures = {key: store.read(f"{key}/{_ZARR3}".lstrip("/")) for key in version_3}
            found = {k: v for k, v in found.items() if v == 2 or b'"array"' in futures[k].result().value}
    if not found:
        raise NotACheckpointError("the database holds no array", path=path)
    return found
