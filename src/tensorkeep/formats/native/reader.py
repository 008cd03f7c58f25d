"""Reading a native checkpoint, trusting nothing in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from tensorkeep.errors import CorruptCheckpointError, DestinationExistsError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.base import OpenSettings, Problem, Reader, StepRecord, StoredLeaf
from tensorkeep.formats.blockfile.records import WIDE_DIGESTS
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.details import about
from tensorkeep.formats.native.open_files import OpenFiles, missing, wrong_size
from tensorkeep.formats.native.space import occupied_bytes
from tensorkeep.formats.probe import first_bytes
from tensorkeep.io.directory import Directory, read_directory
from tensorkeep.io.files import Bytes, store_error
from tensorkeep.io.source_file import SourceFile
from tensorkeep.state.tree import Flat

_HASH_BYTES = 1024**2
_OUR_NAMES = (manifests.FILE_NAME, ".safetensors", ".safetensors.index.json")


class NativeReader(Reader):
    """An open native checkpoint; what it opens is described in `OpenFiles`."""

    format = "native"
    verifiable = "xxh3-64 of every block"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._opened = OpenFiles(path, settings)
        manifest = self._manifest = self._opened.manifest
        try:
            self.tensors = {leaf.name: self._opened.tensor(leaf) for leaf in manifest.leaves}
            self._set_state(self._flat(), path / manifests.FILE_NAME)
            # Manifests are remembered, and this is the caller's.
            self.metadata = msgspec.json.decode(msgspec.json.encode(manifest.metadata))
        except BaseException as error:
            self._opened.close()
            if isinstance(error, RecursionError):
                raise CorruptCheckpointError("is nested too deeply", path=path / manifests.FILE_NAME) from error
            raise
        if WIDE_DIGESTS in manifest.features:
            self.verifiable = "xxh3-128 of every block"
        if any(block.bases for tensor in self.tensors.values() for block in tensor.blocks):
            self.buffers = 3
        self.step = manifest.step
        self.details = about(manifest, [*self._opened.statuses, self._opened.manifest_status])

    def _flat(self) -> Flat[StoredLeaf]:
        manifest = self._manifest
        leaves = {
            name: StoredLeaf(
                self,
                name,
                tensor.dtype,
                tensor.shape,
                stored_bytes=tensor.stored_bytes,
                codec=tensor.codec,
                file=tensor.file.path.name,
            )
            for name, tensor in self.tensors.items()
        }
        aliases = {name: record.alias() for name, record in manifest.aliases.items()}
        return Flat(manifest.skeleton, leaves, aliases, manifest.parts())

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._opened.blocks.read(self.tensors[name], start, stop, out)

    def block_bytes(self, name: str) -> int:
        return self._manifest.block_bytes

    def audit(self) -> Iterator[Problem]:
        for record, file in zip(self._manifest.files, self._opened.files, strict=True):
            if _head_digest(file, record.head_bytes) != record.head:
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def close(self) -> None:
        self._opened.close()


def _head_digest(file: SourceFile, count: int) -> str:
    hasher = xxhash.xxh3_64()
    piece = np.empty(min(count, _HASH_BYTES), np.uint8)
    for at in range(0, count, _HASH_BYTES):
        part = piece[: count - at]
        file.read_into(at, part)
        hasher.update(part)
    return hasher.hexdigest()


def is_native(path: Path) -> bool:
    """Say whether a path is a native checkpoint, whole or damaged, by the first bytes of its manifest.

    Raises
    ------
    StoreError
        If the operating system does not let one look.
    """
    start = first_bytes(path / manifests.FILE_NAME, 4096) or b""
    return start.startswith(sealed.OPENING) or b'"format":"tensorkeep"' in start


def foreign_names(path: Path) -> list[str]:
    """Return what lies in the folder of a native checkpoint, whole or damaged, and is no part of it.

    Raises
    ------
    NotACheckpointError, StoreError, OSError
        If one cannot look.
    """
    try:
        with Directory(path) as directory:
            listed = {manifests.FILE_NAME, *(file.name for file in manifests.read(directory).files)}
        return sorted(entry.name for entry in path.iterdir() if entry.name not in listed)
    except (CorruptCheckpointError, UnsupportedError):
        # What a damaged manifest lists is not known.
        return sorted(entry.name for entry in path.iterdir() if not entry.name.endswith(_OUR_NAMES))


def is_replaceable(path: Path) -> bool:
    """Say whether a path is a native checkpoint and nothing else.

    Raises
    ------
    DestinationExistsError
        If it holds files that are no part of the checkpoint, which nobody asked to remove.
    """
    if not is_native(path):
        return False
    foreign = foreign_names(path)
    if foreign:
        raise DestinationExistsError(
            f"holds {foreign[0]!r}, which is no part of the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True


def look(path: Path) -> tuple[StepRecord | None, int, int]:
    """Look at a checkpoint without reading a tensor: its files must be there, as long as its manifest says.

    Returns
    -------
    tuple of (StepRecord or None, int, int)
        Which step of a run it is, the bytes of its files, and the bytes of disk that those of them occupy which nothing
        else has a link to.

    Raises
    ------
    NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
    """
    return read_directory(path, _look_at)


def _look_at(directory: Directory) -> tuple[StepRecord | None, int, int]:
    manifest = manifests.read(directory)
    nbytes = own = 0
    sizes: dict[str, int | None] = {manifests.FILE_NAME: None, **{file.name: file.bytes for file in manifest.files}}
    for name, size in sizes.items():
        path = directory.path / name
        try:
            status = os.stat(f"{directory.fd_path}/{name}", follow_symlinks=False)
        except FileNotFoundError as error:
            raise missing(path) from error
        except OSError as error:
            raise store_error(error, path, "look at the file") from error
        if size not in (None, status.st_size):
            raise wrong_size(path, status.st_size, size or 0)
        nbytes += status.st_size
        own += occupied_bytes(status) if status.st_nlink == 1 else 0
    directory.close()
    return manifest.step, nbytes, own
