"""Which directories hold TensorStore's arrays, and where in them the arrays lie; no array is opened for it.

Directories that hold arrays and are a format of their own (Orbax, T5X) are left to that.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats.probe import file_mode, first_bytes, names_in
from tensorkeep.formats.tensorstore import sidecar
from tensorkeep.formats.tensorstore.failures import reading, tensorstore
from tensorkeep.formats.tensorstore.specs import METADATA_FILE, Place, context
from tensorkeep.formats.tensorstore.walking import MOST_METADATA, check_folders, check_size, walk

_OTHERS = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"))
"""Files of Orbax's items and steps, and of T5X."""
_MANIFEST = "manifest.ocdbt"
_MANIFEST_START = bytes.fromhex("0cdb3a2a")
_GROUP = ".zgroup"
_ZARR3 = METADATA_FILE[3]

_MOST_ARRAYS = 200_000
_MOST_DEPTH = 64
_AT_ONCE = 256

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
    if any(first_bytes(path / name, 1) == b"{" for name in (METADATA_FILE[2], _GROUP)):
        return True
    content = _zarr3_content(path)
    # Opening says what is wrong with one that is too large.
    return content is not None and (len(content) > MOST_METADATA or _node_type(content) in ("array", "group"))


def _zarr3_content(path: Path) -> bytes | None:
    start = first_bytes(path / _ZARR3, 65536)
    return start if start is None or len(start) < 65536 else first_bytes(path / _ZARR3, MOST_METADATA + 1)


class _Node(msgspec.Struct):
    node_type: str


def _node_type(content: bytes) -> str | None:
    """Return what the metadata of zarr v3 says that it describes; None if it says nothing.

    A group's may hold all that its arrays' say.
    """
    try:
        return msgspec.json.decode(content, type=_Node).node_type
    except RecursionError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        # zarr-python writes numbers that are none (NaN) into attributes, which is no JSON.
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kind = found.get("node_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def _version_at(folder: Path, files: list[str], shown: Path) -> int | None:
    """Return the version of zarr of the array in a folder; None if there is none.

    What has metadata that nobody understands counts as an array, so that opening it says what is wrong.
    """
    if METADATA_FILE[2] in files:
        return 2
    if _ZARR3 not in files:
        return None
    content = _zarr3_content(folder) or b""
    check_size(len(content), shown / _ZARR3)
    return None if _node_type(content) == "group" else 3


def _holds_only_nodes(path: Path, names: list[str]) -> bool:
    folders = [path / name for name in names if not name.startswith(".") and stat.S_ISDIR(file_mode(path / name))]
    return bool(folders) and all(not sidecar.is_ours(folder) and _is_node(folder) for folder in folders)


def find_arrays(path: Path, shown: Path) -> Keys:
    """Return the arrays that lie in a directory, at any depth, in the order of their names.

    Parameters
    ----------
    path : Path
    shown : Path
        What errors call it.

    Raises
    ------
    NotACheckpointError
        If there is none.
    CorruptCheckpointError
        If one is, or holds, a link.
    UnsupportedError
        If they are too many, too deep, or their metadata is impossibly large.
    StoreError
        If a folder cannot be listed.
    """
    found = dict(_in_directory(path, shown))
    if not found:
        raise NotACheckpointError("holds no array of TensorStore", path=shown)
    check_folders(f"{path}/", found, shown)
    return found


def _in_directory(path: Path, shown: Path) -> Iterator[tuple[str, int]]:
    count = 0
    for folder, folders, files in walk(path, shown):
        here = Path(folder)
        inside = here.relative_to(path)
        folders.sort()
        if len(inside.parts) > _MOST_DEPTH:
            raise UnsupportedError(f"its folders are nested more than {_MOST_DEPTH} deep", path=shown)
        version = _version_at(here, files, shown / inside)
        if version is None:
            _refuse_linked(here, folders, shown / inside)
            continue
        folders.clear()  # they hold its chunks
        count += 1
        _check_count(count, shown)
        yield "" if not inside.parts else str(inside), version


def _refuse_linked(here: Path, folders: list[str], shown: Path) -> None:
    """Refuse a link where an array or a group could be; it is not followed, so what it leads to would be missing."""
    linked = next((name for name in folders if os.path.islink(here / name)), None)
    if linked is not None:
        raise CorruptCheckpointError("is a symbolic link, which is not followed", path=shown / linked)


def _check_count(count: int, shown: Path) -> None:
    if count > _MOST_ARRAYS:
        raise UnsupportedError(f"holds more than {_MOST_ARRAYS:,} arrays", path=shown)


def find_in_database(path: Path, place: Place) -> Keys:
    """Return the arrays of an OCDBT database; see `find_arrays`."""
    check_folders(place.root, [""], path)
    with reading(path, place.root):
        store = tensorstore().KvStore.open(place.store(), context=context()).result()
        listed = sorted(store.list().result())
    found: Keys = {}
    for key in listed:
        text = key.decode(errors="surrogateescape")
        for version, file in METADATA_FILE.items():
            if text == file or text.endswith(f"/{file}"):
                array = text[: -len(file)].rstrip("/")
                found[array] = min(version, found.get(array, version))
                _check_count(len(found), path)
                if array.count("/") >= _MOST_DEPTH:
                    raise UnsupportedError(f"its keys are nested more than {_MOST_DEPTH} deep", path=path)
    groups = _groups(path, place, store, [key for key, version in found.items() if version == 3])
    found = {key: version for key, version in found.items() if key not in groups}
    if not found:
        raise NotACheckpointError("the database holds no array", path=path)
    return found


def _groups(path: Path, place: Place, store: Any, keys: list[str]) -> set[str]:
    """Return which of some keys of zarr v3 in a database are groups."""
    groups = set()
    for start in range(0, len(keys), _AT_ONCE):
        some = keys[start : start + _AT_ONCE]
        with reading(path, place.root):
            futures = {key: store.read(f"{key}/{_ZARR3}".lstrip("/")) for key in some}
            contents = {key: future.result().value for key, future in futures.items()}
        for key, content in contents.items():
            check_size(len(content), path / key / _ZARR3)
            if _node_type(content) == "group":
                groups.add(key)
    return groups
