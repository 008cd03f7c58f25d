"""The file beside the arrays that says what state they are, and what each array's metadata file must be.

``tensorkeep.json`` carries a checksum of itself (see ``formats/sealed.py``) and is written last. Every array's own
metadata is covered by a checksum in it, so that no chunk is ever read by the wrong rules.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.probe import first_bytes
from tensorkeep.formats.structure import Structure, check_structure
from tensorkeep.formats.tensorstore.stored_types import StoredType, is_possible
from tensorkeep.io.directory import Directory
from tensorkeep.state.aliases import Alias
from tensorkeep.state.dtypes import BY_NAME, DType

FILE_NAME = "tensorkeep.json"
FORMAT = "tensorkeep-tensorstore"
VERSION = 1


class ArrayRecord(msgspec.Struct, frozen=True):
    """One array: its key, what its elements are in the state and in the files, and the xxh3-64 of its metadata."""

    key: str
    dtype: str
    stored: str
    shape: tuple[int, ...]
    stored_bytes: int
    metadata: str

    @property
    def types(self) -> StoredType:
        """The dtypes, which `read` has checked."""
        return StoredType(BY_NAME[self.dtype], BY_NAME[self.stored])


class Sidecar(msgspec.Struct, frozen=True):
    """What the file says.

    Attributes
    ----------
    format, version, writer
        Which format this is, and who wrote it.
    zarr, kvstore
        Of all arrays.
    settings : dict
        The options that were given, as `info` shows them.
    arrays : dict of str to ArrayRecord
        By name.
    structure : Structure
        Skeleton, views of other tensors, parts.
    files : dict of str to int
        Every file of the database and its size; empty where arrays lie in directories.
    metadata : dict
        The user's own.
    """

    format: str
    version: int
    writer: str
    zarr: int
    kvstore: str
    settings: dict[str, Any]
    arrays: dict[str, ArrayRecord]
    structure: Structure
    files: dict[str, int]
    metadata: dict[str, Any]

    @property
    def stored(self) -> dict[str, Stored]:
        """What each stored tensor is in the state."""
        return {name: Stored(record.types.dtype, record.shape) for name, record in self.arrays.items()}

    @property
    def aliases(self) -> dict[str, Alias]:
        """The tensors that are views of stored ones."""
        return {name: record.alias() for name, record in self.structure.aliases.items()}


class Stored(msgspec.Struct, frozen=True):
    """A stored tensor's dtype and shape in the state."""

    dtype: DType
    shape: tuple[int, ...]


def is_ours(path: Path) -> bool:
    """Say whether a directory holds such a file; other formats may have one of that name, too."""
    return b'"format":"%s"' % FORMAT.encode() in (first_bytes(path / FILE_NAME, 256) or b"")


def read(directory: Directory) -> Sidecar:
    """Read the file of a checkpoint and check what it claims.

    Raises
    ------
    NotACheckpointError
        If there is none.
    CorruptCheckpointError
        If it is damaged or breaks a rule.
    UnsupportedError
        If a later version wrote it.
    """
    path = directory.path / FILE_NAME
    sidecar = _convert(sealed.read(directory, FILE_NAME), path)
    if sidecar.zarr not in (2, 3) or sidecar.kvstore not in ("file", "ocdbt"):
        raise CorruptCheckpointError("names neither a version of zarr nor a key-value store that is known", path=path)
    keys = [record.key.casefold() for record in sidecar.arrays.values()]
    if len(set(keys)) != len(keys):
        raise CorruptCheckpointError("two tensors lie in one array", path=path)
    for name, record in sidecar.arrays.items():
        _check(name, record, path)
    try:
        check_structure(sidecar.structure.skeleton, sidecar.stored, sidecar.aliases, sidecar.structure.parts)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"what it says of the state is wrong: {error}", path=path) from error
    for file_name in sidecar.files:
        if not re.fullmatch(r"manifest\.ocdbt|d/[0-9a-f]{32}", file_name):
            raise CorruptCheckpointError(f"lists the file {file_name!r}, which no database has", path=path)
    return sidecar


def _convert(body: dict[str, Any], path: Path) -> Sidecar:
    if body.get("format") != FORMAT:
        raise CorruptCheckpointError("does not describe arrays of TensorStore", path=path)
    if body.get("version") != VERSION:
        raise UnsupportedError(
            f"was written in version {body.get('version')} of the format, this release reads version {VERSION}",
            path=path,
            remedy="install a later Tensorkeep",
        )
    try:
        return msgspec.convert(body, Sidecar)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptCheckpointError(f"is malformed ({error})", path=path) from error


def _check(name: str, record: ArrayRecord, path: Path) -> None:
    for dtype in (record.dtype, record.stored):
        if dtype not in BY_NAME:
            raise UnsupportedError(f"has dtype {dtype!r}, which is not known here", path=path, name=name)
    if not is_possible(record.types):
        raise CorruptCheckpointError(f"{record.dtype} is never stored as {record.stored}", path=path, name=name)
    # One plain name inside the directory: no separator, no parent, nothing hidden.
    if not is_key(record.key):
        raise CorruptCheckpointError(f"lies in {record.key!r}, which cannot be part of a checkpoint", path=path)
    if any(length < 0 for length in record.shape) or len(record.shape) > 32 or record.stored_bytes < 0:
        raise CorruptCheckpointError(f"has shape {list(record.shape)}", path=path, name=name)


def is_key(key: str) -> bool:
    """Say whether a name can be that of an array's directory."""
    return re.fullmatch(r"[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}", key) is not None and key not in RESERVED


MARK = '"tensorkeep":"tensorkeep.json"'
"""What the attributes of the group that the arrays form say, so that the loss of the file is noticed."""

GROUP_FILES = {
    2: {".zgroup": b'{"zarr_format":2}', ".zattrs": b"{%s}" % MARK.encode()},
    3: {"zarr.json": b'{"zarr_format":3,"node_type":"group","attributes":{%s}}' % MARK.encode()},
}
"""What makes a group of the directory, so that zarr-python opens all arrays at once; by version of zarr."""

RESERVED = frozenset((FILE_NAME, "zarr.json", "c", "d", "manifest.ocdbt", "checkpoint"))
"""Names beside which no array lies."""
