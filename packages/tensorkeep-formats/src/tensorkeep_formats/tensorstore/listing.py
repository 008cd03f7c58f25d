"""Finds the arrays of a directory, an OCDBT database or an object store, without opening an array."""

import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorkeep.errors import NotACheckpointError, UnsupportedError
from tensorkeep.ext.formats import sidecar
from tensorkeep.ext.storage import file_mode, first_bytes, folders_in, names_in, store_errors, sync_directory
from tensorkeep_formats.tensorstore.library import ArrayDirectory
from tensorkeep_formats.tensorstore.specs import MARK, METADATA_FILE, Shape, StoredType

MAX_METADATA_BYTES = 16 * 1024**2
_METADATA_FILES = frozenset(METADATA_FILE.values())
# Files of Orbax's items and steps, and of T5X: these directories belong to other formats.
_OTHER_FORMATS = frozenset(("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"))
_MANIFEST = "manifest.ocdbt"
_MANIFEST_START = bytes.fromhex("0cdb3a2a")
_ZARR3 = METADATA_FILE[3]
_MAX_ARRAYS = 200_000
_MAX_DEPTH = 64
_BATCH = 256


@dataclass(frozen=True, slots=True)
class KnownArray:
    """What is known of an array before it is opened; with a sidecar, it must have ``types`` and ``shape``."""

    key: str
    zarr: int
    stored_bytes: int
    types: StoredType | None = None
    shape: Shape | None = None


def recognises(path: Path) -> bool:
    if not stat.S_ISDIR(file_mode(path)):
        return False
    if sidecar.lies_in(path, "tensorstore"):
        return True
    if not _OTHER_FORMATS.isdisjoint(names_in(path)):
        return False
    return is_database(path) or _is_node(path) or _holds_only_nodes(path)


def is_database(path: Path) -> bool:
    return first_bytes(path / _MANIFEST, 4) == _MANIFEST_START


def _holds_only_nodes(path: Path) -> bool:
    folders = [path / name for name in folders_in(path) if not name.startswith(".")]
    return bool(folders) and all(not sidecar.lies_in(folder, "tensorstore") and _is_node(folder) for folder in folders)


def _is_node(path: Path) -> bool:
    if any(first_bytes(path / name, 1) == b"{" for name in (METADATA_FILE[2], ".zgroup")):
        return True
    content = _zarr3_content(path)
    # Opening the array reports metadata that is too large.
    return content is not None and (len(content) > MAX_METADATA_BYTES or _node_type(content) in ("array", "group"))


def _zarr3_content(path: Path) -> bytes | None:
    start = first_bytes(path / _ZARR3, 65536)
    # Most metadata is small: one short read, and a second only for a long file.
    return start if start is None or len(start) < 65536 else first_bytes(path / _ZARR3, MAX_METADATA_BYTES + 1)


def _node_type(content: bytes) -> str | None:
    """Return ``"array"`` or ``"group"`` from zarr v3 metadata; None if it is malformed."""
    try:
        # msgspec would refuse NaN, which zarr-python writes into attributes.
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    kind = found.get("node_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def has_mark(directory: ArrayDirectory) -> bool:
    names, mark = (".zattrs", _ZARR3), MARK.encode()
    if directory.kvstore == "file":
        root = directory.path if directory.in_store else Path(directory.root)
        return any(mark in (first_bytes(root / name, 4096) or b"") for name in names)
    with directory.reading():
        store = directory.open_store()
        return any(mark in directory.wait(store.read(name)).value for name in names)


def find_arrays(directory: ArrayDirectory) -> list[KnownArray]:
    """Return all arrays, at least one; the key of the directory itself is empty."""
    _check_is_whole(directory.path)
    if directory.kvstore == "file" and not directory.in_store:
        arrays = list(_find_in_folders(directory))
    else:
        arrays = _find_by_keys(directory)
    if not arrays:
        raise NotACheckpointError("holds no array of TensorStore", path=directory.path)
    return arrays


def _check_is_whole(path: Path) -> None:
    # The part of one process is a database as well. Its arrays look full: chunks that other processes wrote read as the
    # fill value.
    if re.fullmatch(r"ocdbt\.process_\d+", path.name):
        whole = path.parent if path.parent.name else path.absolute().parent
        raise UnsupportedError(
            "is one process's part of a database", path=path, remedy=f"give the path of the whole: {whole}"
        )
    if ".orbax-checkpoint-tmp" in path.name:
        raise UnsupportedError(
            "is a save of Orbax that was not finished", path=path, remedy="take another step, or save it again"
        )


def _find_in_folders(directory: ArrayDirectory) -> Iterator[KnownArray]:
    count = 0
    waiting = [Path()]
    while waiting:
        inside = waiting.pop()
        folder, shown = Path(directory.root, inside), directory.path / inside
        if len(inside.parts) > _MAX_DEPTH:
            raise UnsupportedError(f"its folders are nested more than {_MAX_DEPTH} deep", path=directory.path)
        entries = _scan_folder(str(folder), shown)
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        version = _version_at(folder, {entry.name for entry in entries}.difference(folders), shown)
        if version is not None:
            key = "" if inside == Path() else str(inside)
            count += 1
            _check_count(count, directory)
            yield KnownArray(key, version, sum(list_array(directory, key).values()))
            continue
        # The target of a link is not searched, so its arrays would be missing.
        linked = next((entry.name for entry in entries if stat.S_ISDIR(_linked_mode(entry))), None)
        if linked is not None:
            raise _link_error(shown / linked)
        waiting += [inside / name for name in reversed(folders)]


def _version_at(folder: Path, files: set[str], shown: Path) -> int | None:
    if METADATA_FILE[2] in files:
        return 2
    if _ZARR3 not in files:
        return None
    content = _zarr3_content(folder) or b""
    _check_metadata_size(len(content), shown / _ZARR3)
    # Malformed metadata counts as an array, so that opening the array reports it.
    return None if _node_type(content) == "group" else 3


def _find_by_keys(directory: ArrayDirectory) -> list[KnownArray]:
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
            # An array with both metadata files counts as zarr v2, as in a directory.
            found[folder] = min(version, found.get(folder, version))
            _check_count(len(found), directory)
            if folder.count("/") >= _MAX_DEPTH:
                raise UnsupportedError(f"its keys are nested more than {_MAX_DEPTH} deep", path=directory.path)
    groups = _groups(directory, store, [key for key, version in found.items() if version == 3])
    sizes = {key: sum(list_array(directory, key).values()) if directory.kvstore == "file" else 0 for key in found}
    return [KnownArray(key, version, sizes[key]) for key, version in found.items() if key not in groups]


def _listed_by_web_server(directory: ArrayDirectory) -> list[str]:
    # A web server does not list the arrays of a group: only an array at the URL itself can be read.
    names = [name for name in METADATA_FILE.values() if first_bytes(directory.path / name, 1) is not None]
    if names == [_ZARR3] and _node_type(_zarr3_content(directory.path) or b"") == "group":
        raise UnsupportedError(
            "is a group of arrays, which a web server does not list", path=directory.path, remedy="give one array's URL"
        )
    return names


def _groups(directory: ArrayDirectory, store: Any, keys: list[str]) -> set[str]:
    # The metadata of a zarr v3 group may contain the metadata of its arrays.
    groups = set()
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        with directory.reading():
            # In batches: requests of many keys run at the same time, with bounded memory.
            futures = {key: store.read(f"{key}/{_ZARR3}".lstrip("/")) for key in batch}
            contents = {key: directory.wait(future).value for key, future in futures.items()}
        for key, content in contents.items():
            _check_metadata_size(len(content), directory.path / key / _ZARR3)
            if _node_type(content) == "group":
                groups.add(key)
    return groups


def list_array(directory: ArrayDirectory, key: str) -> dict[str, int]:
    """Return the sizes of an array's files by relative path, like `list_tree`; empty if the array is missing."""
    if directory.listing is not None:
        found = directory.listing.below(key)
        for name, size in found.items():
            if name.rpartition("/")[2] in _METADATA_FILES:
                _check_metadata_size(size, directory.path / name)
        return found
    top = directory.root + key
    # The checkpoint itself may be reached through a link, an array may not.
    if key and os.path.islink(top):
        raise _link_error(directory.path / key)
    return list_tree(top, directory.path / key)[0] if os.path.isdir(top) else {}


def list_tree(top: str, shown: Path) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of all files below a directory by relative path, and all folders with a slash, parents first."""
    files: dict[str, int] = {}
    folders = [""]
    for inside in folders:  # grows during the loop
        path = shown / inside
        for entry in _scan_folder(f"{top}/{inside}", path):
            # An array may have tens of thousands of chunks: a path is made for errors only.
            if entry.is_dir(follow_symlinks=False):
                folders.append(f"{inside}{entry.name}/")
            elif entry.is_file(follow_symlinks=False) or stat.S_ISREG(_linked_mode(entry)):
                with store_errors(path, f"read the size of {entry.name}"):
                    size = entry.stat().st_size
                if entry.name in _METADATA_FILES:
                    _check_metadata_size(size, path / entry.name)
                files[inside + entry.name] = size
            # Links to files are followed, because the cache of Hugging Face consists of links. Links to folders and
            # unreadable folders are refused: a skipped folder would mean missing arrays or chunks.
            elif entry.is_symlink():
                raise _link_error(path / entry.name)
            else:
                raise UnsupportedError("is neither a file nor a folder", path=path / entry.name, remedy="remove it")
    return files, folders


def sync_directories(path: Path) -> None:
    """Make all names in and below a directory durable; StoreError if that fails."""
    # Children first, so that no durable name leads to a folder without its own names.
    for folder in reversed(list_tree(str(path), path)[1]):
        with store_errors(path / folder, "make the directories durable"):
            sync_directory(path / folder)


def _scan_folder(folder: str, shown: Path) -> list[os.DirEntry[str]]:
    with store_errors(shown, "list the directory"), os.scandir(folder) as entries:
        # The order of `scandir` differs among file systems; the order of the state must not.
        return sorted(entries, key=lambda entry: entry.name)


def _linked_mode(entry: os.DirEntry[str]) -> int:
    # 0 for other entries, and for links to nothing or to themselves.
    return file_mode(Path(entry.path)) if entry.is_symlink() else 0


def _check_count(count: int, directory: ArrayDirectory) -> None:
    if count > _MAX_ARRAYS:
        raise UnsupportedError(f"holds more than {_MAX_ARRAYS:,} arrays", path=directory.path)


def _check_metadata_size(size: int, shown: Path) -> None:
    if size > MAX_METADATA_BYTES:
        limit = f"more than the {MAX_METADATA_BYTES:,} that are read"
        raise UnsupportedError(f"has {size:,} bytes of metadata, {limit}", path=shown)


def _link_error(shown: Path) -> UnsupportedError:
    return UnsupportedError(
        "is a symbolic link to a folder or to nothing, which is not followed",
        path=shown,
        remedy="copy the checkpoint with what its links point to: cp -rL FOLDER COPY",
    )
