"""What Tensorkeep keeps beside the files of a format that is not its own: one small JSON file.

Other libraries' formats have a place for tensors, and none for nested states, for tensors that share storage, for the
user's metadata, or for a checksum of their own bookkeeping. ``tensorkeep.json`` has; other tools do not look at it. It
carries a checksum of itself (see ``formats/sealed.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.blockfile.plan import Structure
from tensorkeep.formats.blockfile.records import AliasRecord
from tensorkeep.formats.structure import check_structure
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import write_small
from tensorkeep.state.aliases import Alias
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.state.source import Source
from tensorkeep.state.tree import Flat

FILE_NAME = "tensorkeep.json"
VERSION = 1

_MOST_DIMENSIONS = 64
_PIECE = 4 * 1024**2

_REWRITTEN = "if another tool wrote here since, remove tensorkeep.json; otherwise take another checkpoint or copy"


class TensorNote(msgspec.Struct, frozen=True):
    """What a stored tensor really is, whatever the format had to store it as."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def true_dtype(self) -> DType:
        """The element type."""
        return BY_NAME[self.dtype]


class FileNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file of the checkpoint: its bytes, and the xxh3-64 of all of them where the format has no checksum itself."""

    bytes: int
    xxh3_64: str = ""


class Sidecar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file's body.

    Attributes
    ----------
    version : int
    format : str
        The format that it lies beside.
    structure : Structure
        Skeleton, views of stored tensors, parts.
    tensors : dict of str to TensorNote
        Every stored tensor.
    files : dict of str to FileNote
        Every other file, by its path in the checkpoint.
    metadata : dict
        The user's own.
    places : dict of str to tuple of str
        The keys that lead to each stored tensor, in formats that nest them.
    """

    version: int
    format: str
    structure: Structure
    tensors: dict[str, TensorNote]
    files: dict[str, FileNote]
    metadata: dict[str, Any]
    places: dict[str, tuple[str, ...]] = {}

    @property
    def aliases(self) -> dict[str, Alias]:
        """The tensors that are views of stored ones."""
        return _aliases(self.structure)

    def flat(self, leaves: Mapping[str, Source]) -> Flat[Source]:
        """Return the state, with these leaves in its order."""
        ordered = {name: leaves[name] for name in self.tensors}
        return Flat(self.structure.skeleton, ordered, self.aliases, self.structure.parts)


def describe(flat: Flat[Source]) -> tuple[Structure, dict[str, TensorNote]]:
    """Return what a sidecar says of a state."""
    aliases = {
        name: AliasRecord(alias.of, alias.offset_elements, alias.shape, alias.strides, flat.parts[name][0])
        for name, alias in flat.aliases.items()
    }
    notes = {name: TensorNote(source.dtype.name, tuple(source.shape)) for name, source in flat.leaves.items()}
    return Structure(flat.skeleton, aliases, flat.parts), notes


def note_file(path: Path, *, hashed: bool) -> FileNote:
    """Return the note of a file that was written."""
    if not hashed:
        return FileNote(path.stat().st_size)
    content = path.read_bytes()
    return FileNote(len(content), xxhash.xxh3_64_hexdigest(content))


def write(directory: Path, sidecar: Sidecar) -> int:
    """Write the file, durably; return its bytes."""
    content = sealed.seal(sidecar)
    write_small(directory / FILE_NAME, content)
    return len(content)


def read(directory: Directory, format: str) -> Sidecar:
    """Return a directory's sidecar, checked in itself and against the files that it lists.

    Raises
    ------
    NotACheckpointError
        If there is none.
    CorruptCheckpointError
        If it is damaged, or a file that it lists is missing or another.
    UnsupportedError
        If a later version wrote it.
    """
    path = directory.path / FILE_NAME
    sidecar = _convert(sealed.read(directory, FILE_NAME), path)
    if sidecar.format != format:
        raise CorruptCheckpointError(f"lies beside a checkpoint of the format {sidecar.format!r}", path=path)
    for name, note in sidecar.files.items():
        _check_file(directory, name, note)
    return sidecar


def _convert(body: dict[str, Any], path: Path) -> Sidecar:
    version = body.get("version")
    if version != VERSION:
        raise UnsupportedError(f"is of version {version}", path=path, remedy="install a later Tensorkeep")
    try:
        sidecar = msgspec.convert(body, Sidecar)
        _check(sidecar)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"is malformed ({error})", path=path) from error
    return sidecar


def _check(sidecar: Sidecar) -> None:
    tensors = {}
    for name, note in sidecar.tensors.items():
        if note.dtype not in BY_NAME:
            raise ValueError(f"{name!r} has the unknown dtype {note.dtype!r}")
        if len(note.shape) > _MOST_DIMENSIONS or any(length < 0 for length in note.shape):
            raise ValueError(f"{name!r} has an impossible shape")
        tensors[name] = _Stored(note.true_dtype, note.shape)
    structure = sidecar.structure
    check_structure(structure.skeleton, tensors, _aliases(structure), structure.parts)


class _Stored(msgspec.Struct, frozen=True):
    dtype: DType
    shape: tuple[int, ...]


def _aliases(structure: Structure) -> dict[str, Alias]:
    return {
        name: Alias(record.of, record.offset, record.shape, record.strides)
        for name, record in structure.aliases.items()
    }


def _check_file(directory: Directory, name: str, note: FileNote) -> None:
    path = directory.path / name
    folder, _, last = name.rpartition("/")
    if any(part in ("", ".", "..") or "\0" in part for part in name.split("/")):
        raise CorruptCheckpointError(f"lists the file {name!r}, which does not lie beside it", path=directory.path)
    try:
        if folder:
            # By what is held: its name may be another directory's by now.
            with Directory(Path(directory.held_path) / folder) as inner:
                size, digest = _look_at(inner, last, note)
        else:
            size, digest = _look_at(directory, last, note)
    except NotACheckpointError as error:
        raise CorruptCheckpointError("the file is missing", path=path, remedy="take another copy") from error
    except TensorkeepError as error:
        raise type(error)(error.message, path=path, remedy=error.remedy) from error
    if size != note.bytes:
        raise CorruptCheckpointError(f"has {size:,} bytes, not {note.bytes:,}", path=path, remedy=_REWRITTEN)
    if note.xxh3_64 and digest != note.xxh3_64:
        raise CorruptCheckpointError("is not what was written: its checksum is wrong", path=path, remedy=_REWRITTEN)


def _look_at(directory: Directory, name: str, note: FileNote) -> tuple[int, str]:
    """Return a file's size, and its checksum where that is known and the size is right."""
    with directory.open(name, follow_links=False) as file:
        if not note.xxh3_64 or file.size != note.bytes:
            return file.size, ""
        found = xxhash.xxh3_64()
        for start in range(0, file.size, _PIECE):
            found.update(file.read(start, min(_PIECE, file.size - start)))
        return file.size, found.hexdigest()
