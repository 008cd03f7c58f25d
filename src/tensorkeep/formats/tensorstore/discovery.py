"""Detecting directories of TensorStore arrays, and listing the arrays without opening any.

Directories of arrays that belong to another format (Orbax, T5X) are left to that format.
"""

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorkeep.errors import NotACheckpointError, UnsupportedError
from tensorkeep.formats import sidecar
from tensorkeep.formats.probe import file_mode, first_bytes, folders_in, names_in
from tensorkeep.formats.tensorstore.arrays import KnownArray
from tensorkeep.formats.tensorstore.library import ArrayDirectory
from tensorkeep.formats.tensorstore.listing import (
    MAX_METADATA_BYTES,
    check_metadata_size,
    link_error,
    linked_mode,
    list_array,
    scan_folder,
)
from tensorkeep.formats.tensorstore.specs import MARK, METADATA_FILE
from tensorkeep.paths import StorePath

_OTHER_FORMATS = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"))
"""Files of Orbax's items and steps, and of T5X."""
_MANIFEST = "manifest.ocdbt"
_MANIFEST_START = bytes.fromhex("0cdb3a2a")
_ZARR3 = METADATA_FILE[3]

_MAX_ARRAYS = 200_000
_MAX_DEPTH = 64
_BATCH = 256


def recognises(path: Path) -> bool:
    """Return whether a directory holds TensorStore arrays, from names and first bytes only."""
    if not stat.S_ISDIR(file_mode(path)):
        return False
    if sidecar.lies_in(path, "tensorstore"):
        return True
    names = names_in(path)
    if not _OTHER_FORMATS.isdisjoint(names):
        return False
    return is_database(path) or _is_node(path) or _holds_only_nodes(path)


def is_database(path: Path) -> bool:
    """Return whether a directory is an OCDBT database."""
    return first_bytes(path / _MANIFEST, 4) == _MANIFEST_START


def check_is_no_part(path: Path) -> None:
    """Raise UnsupportedError if a directory's name is that of one process's part, or of an unfinished save, of Orbax.

    The part is a database, too, and its arrays look full: what other processes wrote is read as the fill value.
    """
    if re.fullmatch(r"ocdbt\.process_\d+", path.name):
        whole = path.absolute().parent if not isinstance(path, StorePath) else path.parent
        raise UnsupportedError(
            "is one process's part of a database", path=path, remedy=f"give the path of the whole: {whole}"
        )
    if ".orbax-checkpoint-tmp" in path.name:
        raise UnsupportedError(
            "is a save of Orbax that was not finished", path=path, remedy="take another step, or save it again"
        )


def has_mark(directory: ArrayDirectory) -> bool:
    """Return whether the attributes of the group mention a sidecar of Tensorkeep."""
    names, mark = (".zattrs", _ZARR3), MARK.encode()
    if directory.kvstore == "file":
        root = directory.path if directory.in_store else Path(directory.root)
        return any(mark in (first_bytes(root / name, 4096) or b"") for name in names)
    with directory.reading():
        store = directory.open_store()
        return any(mark in directory.wait(store.read(name)).value for name in names)


def find_arrays(directory: ArrayDirectory) -> list[KnownArray]:
    """Return all arrays; the key of the directory itself is empty.

    Raises NotACheckpointError if no array is found; UnsupportedError if there are more than 200,000 arrays, they are
    nested more than 64 deep, have too much metadata, are one process's part, or hold a link to a folder; StoreError
    if a folder cannot be listed.
    """
    check_is_no_part(directory.path)
    if directory.kvstore == "file" and not directory.in_store:
        arrays = list(_find_in_folders(directory))
    else:
        arrays = _find_by_keys(directory)
    if not arrays:
        raise NotACheckpointError("holds no array of TensorStore", path=directory.path)
    return arrays


def _is_node(path: Path) -> bool:
    """Return whether a directory is a zarr array or group."""
    if any(first_bytes(path / name, 1) == b"{" for name in (METADATA_FILE[2], ".zgroup")):
        return True
    content = _zarr3_content(path)
    # Opening reports metadata that is too large.
    return content is not None and (len(content) > MAX_METADATA_BYTES or _node_type(content) in ("array", "group"))


def _zarr3_content(path: Path) -> bytes | None:
    start = first_bytes(path / _ZARR3, 65536)
    return start if start is None or len(start) < 65536 else first_bytes(path / _ZARR3, MAX_METADATA_BYTES + 1)


def _node_type(content: bytes) -> str | None:
    """Return ``"array"`` or ``"group"`` from zarr v3 metadata; None if it is malformed.

    The metadata of a group may contain that of its arrays.
    """
    try:
        # msgspec refuses NaN, which zarr-python writes into attributes.
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kind = found.get("node_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def _version_at(folder: Path, files: set[str], shown: Path) -> int | None:
    """Return the version of zarr of the array in a folder; None if it holds no array.

    Malformed metadata counts as an array's, so that opening reports it.
    """
    if METADATA_FILE[2] in files:
        return 2
    if _ZARR3 not in files:
        return None
    content = _zarr3_content(folder) or b""
    check_metadata_size(len(content), shown / _ZARR3)
    return None if _node_type(content) == "group" else 3


def _holds_only_nodes(path: Path) -> bool:
    folders = [path / name for name in folders_in(path) if not name.startswith(".")]
    return bool(folders) and all(not sidecar.lies_in(folder, "tensorstore") and _is_node(folder) for folder in folders)


def _find_in_folders(directory: ArrayDirectory) -> Iterator[KnownArray]:
    count = 0
    waiting = [Path()]
    while waiting:
        inside = waiting.pop()
        folder, shown = Path(directory.root, inside), directory.path / inside
        if len(inside.parts) > _MAX_DEPTH:
            raise UnsupportedError(f"its folders are nested more than {_MAX_DEPTH} deep", path=directory.path)
        entries = scan_folder(str(folder), shown)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        version = _version_at(folder, {entry.name for entry in entries}.difference(folders), shown)
        if version is not None:
            key = "" if inside == Path() else str(inside)
            count += 1
            _check_count(count, directory)
            yield KnownArray(key, version, sum(list_array(directory, key).values()))
            continue
        # The target of a link is not searched, so its arrays would be missing.
        linked = next((entry.name for entry in entries if stat.S_ISDIR(linked_mode(entry))), None)
        if linked is not None:
            raise link_error(shown / linked)
        waiting += [inside / name for name in reversed(folders)]


def _check_count(count: int, directory: ArrayDirectory) -> None:
    if count > _MAX_ARRAYS:
        raise UnsupportedError(f"holds more than {_MAX_ARRAYS:,} arrays", path=directory.path)


def _find_by_keys(directory: ArrayDirectory) -> list[KnownArray]:
    """Return the arrays in a database, or below a prefix of an object store."""
    files = list_array(directory, "")
    with directory.reading():
        store = directory.open_store()
        if directory.kvstore == "file":
            listed = list(files) or _listed_by_web_server(directory)
        else:
            listed = [key.decode(errors="surrogateescape") for key in sorted(directory.wait(store.list()))]
    found: dict[str, int] = {}
    for text in listed:
        folder, _, name = text.rpartition("/")
        version = next((version for version, file in METADATA_FILE.items() if file == name), None)
        if version is not None:
            found[folder] = min(version, found.get(folder, version))
            _check_count(len(found), directory)
            if folder.count("/") >= _MAX_DEPTH:
                raise UnsupportedError(f"its keys are nested more than {_MAX_DEPTH} deep", path=directory.path)
    groups = _groups(directory, store, [key for key, version in found.items() if version == 3])
    sizes = {key: sum(list_array(directory, key).values()) if directory.kvstore == "file" else 0 for key in found}
    return [KnownArray(key, version, sizes[key]) for key, version in found.items() if key not in groups]


def _listed_by_web_server(directory: ArrayDirectory) -> list[str]:
    """Return the metadata files of an array at the URL itself: a web server does not list the arrays of a group."""
    names = [name for name in METADATA_FILE.values() if first_bytes(directory.path / name, 1) is not None]
    if names == [_ZARR3] and _node_type(_zarr3_content(directory.path) or b"") == "group":
        raise UnsupportedError(
            "is a group of arrays, which a web server does not list", path=directory.path, remedy="give one array's URL"
        )
    return names


def _groups(directory: ArrayDirectory, store: Any, keys: list[str]) -> set[str]:
    """Return which of some keys of zarr v3 in a database are groups."""
    groups = set()
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        with directory.reading():
            futures = {key: store.read(f"{key}/{_ZARR3}".lstrip("/")) for key in batch}
            contents = {key: directory.wait(future).value for key, future in futures.items()}
        for key, content in contents.items():
            check_metadata_size(len(content), directory.path / key / _ZARR3)
            if _node_type(content) == "group":
                groups.add(key)
    return groups
