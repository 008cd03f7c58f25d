"""Reading and validating ``manifest.json``, which is untrusted.

The manifest carries a checksum of itself (see ``formats/sealed.py``). It is written last: a checkpoint exists if and
only if it has a valid manifest. The format is specified in ``docs/reference/native-format.md``.
"""

import re
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.blockfile.header import MAX_HEADER_BYTES
from tensorkeep.formats.blockfile.plan import BlockRecord
from tensorkeep.formats.native.records import (
    FEATURES,
    PLACES,
    VERSION,
    BaseRecord,
    Count,
    FileRecord,
    LeafRecord,
    Manifest,
)
from tensorkeep.formats.write import StepRecord
from tensorkeep.io.directory import Directory
from tensorkeep.state.dtypes import BY_NAME

FILE_NAME = sealed.MANIFEST_NAME

_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")

Body = TypeVar("Body")


class TensorOutline(msgspec.Struct, frozen=True):
    """What the raw bytes of a stored tensor follow from."""

    dtype: str
    shape: tuple[Count, ...]


class Outline(msgspec.Struct, frozen=True):
    """The part of a manifest that describes the checkpoint as a whole, without its blocks."""

    format: str
    version: int
    features: list[str]
    compression: str
    files: list[FileRecord]
    leaves: list[TensorOutline]
    step: StepRecord | None = None

    @property
    def state_bytes(self) -> int:
        """Raw bytes of all stored tensors."""
        return sum(prod(leaf.shape) * BY_NAME[leaf.dtype].itemsize for leaf in self.leaves)


class _Content(msgspec.Struct, Generic[Body]):
    body: Body


# Made once: the first use of a type by msgspec costs as much as checking a small manifest.
_MANIFEST_DECODER = msgspec.json.Decoder(_Content[Manifest])
_OUTLINE_DECODER = msgspec.json.Decoder(_Content[Outline])


def read(directory: Directory) -> Manifest:
    """Read the manifest of a checkpoint and check its rules.

    Raises NotACheckpointError if it does not exist; CorruptCheckpointError if it is damaged or breaks a rule;
    UnsupportedError if a later version wrote it.
    """
    return parse(_content(directory), directory.path / FILE_NAME)


def read_outline(directory: Directory) -> Outline:
    """Read the outline of a manifest: its checksum is checked, its blocks are not decoded, which takes the most time.

    Raises the errors of `read`.
    """
    path = directory.path / FILE_NAME
    outline = _decoded(_OUTLINE_DECODER, _content(directory), path)
    for leaf in outline.leaves:
        _check_dtype(leaf.dtype, path)
    return outline


def parse(content: bytes, path: Path) -> Manifest:
    """Return the manifest in the bytes of a file that was read, or that will be written.

    Raises CorruptCheckpointError if it breaks a rule; UnsupportedError if a later version wrote it.
    """
    manifest = _decoded(_MANIFEST_DECODER, content, path)
    _Rules(manifest, path).check()
    return manifest


def _decoded(decoder: msgspec.json.Decoder[_Content[Body]], content: bytes, path: Path) -> Body:
    """Return the records of a manifest, whose types and ranges are checked, and whose version this release reads."""
    try:
        body = decoder.decode(content).body
    except (msgspec.DecodeError, RecursionError) as error:
        # A later version may have changed any field.
        _check_version(sealed.body_of(content, path), path)
        raise CorruptCheckpointError(f"is not a manifest ({error})", path=path) from error
    _check_version({name: getattr(body, name) for name in ("format", "version", "features")}, path)
    return body


def _content(directory: Directory) -> bytes:
    try:
        return sealed.read_content(directory, FILE_NAME)
    except NotACheckpointError as error:
        raise NotACheckpointError("holds no manifest, so it is not a checkpoint", path=directory.path) from error


def _check_version(body: dict[str, Any], path: Path) -> None:
    """Refuse a later version before looking at fields that it may have changed."""
    if body.get("format") != "tensorkeep":
        raise CorruptCheckpointError("is not the manifest of a Tensorkeep checkpoint", path=path)
    version, features = body.get("version"), body.get("features")
    unknown = [name for name in features if name not in FEATURES] if isinstance(features, list) else features
    if version != VERSION or unknown:
        what = f"version {version}" if version != VERSION else f"features {unknown}"
        raise UnsupportedError(
            f"was written in {what} of the format, this release reads version {VERSION}",
            path=path,
            remedy="install a later Tensorkeep",
        )


def _check_dtype(dtype: str, path: Path, name: str | None = None) -> None:
    if dtype not in BY_NAME:
        raise UnsupportedError(f"has dtype {dtype!r}, which this release does not know", path=path, name=name)


class _Rules:
    """The rules that types and ranges of the records do not express; the first broken one raises."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self.manifest = manifest
        self.path = path

    def check(self) -> None:
        self._check_files()
        self._check_unique("leaf", [*(leaf.name for leaf in self.manifest.leaves), *self.manifest.aliases])
        for leaf in self.manifest.leaves:
            self._check_leaf(leaf)
        self._check_coverage()

    def _corrupt(self, message: str, name: str | None = None, block: int | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self.path, name=name, block=block)

    def _check_unique(self, what: str, names: Sequence[str]) -> None:
        if len(set(names)) < len(names):
            raise self._corrupt(f"the {what} {Counter(names).most_common(1)[0][0]!r} occurs twice")

    def _check_files(self) -> None:
        self._check_unique("file", [file.name.casefold() for file in self.manifest.files])
        for file in self.manifest.files:
            if file.origin and PLACES not in self.manifest.features:
                raise self._corrupt(f"file {file.name} is of an earlier save, which needs the feature {PLACES!r}")
            # An index has a head and no blocks.
            most = sealed.MAX_BYTES if file.head_bytes == file.bytes else MAX_HEADER_BYTES + 8
            if file.head_bytes > min(file.bytes, most):
                raise self._corrupt(f"file {file.name} cannot have a head of {file.head_bytes:,} bytes")

    def _check_leaf(self, leaf: LeafRecord) -> None:
        _check_dtype(leaf.dtype, self.path, leaf.name)
        self._check_file_numbers([leaf.file], leaf.name)
        nbytes, block_bytes = leaf.nbytes, self.manifest.block_bytes
        count = -(-nbytes // block_bytes)
        if len(leaf.blocks) != count:
            raise self._corrupt(f"{nbytes:,} bytes are not {len(leaf.blocks)} blocks", leaf.name)
        if leaf.places and PLACES not in self.manifest.features:
            raise self._corrupt(f"has blocks with places, which need the feature {PLACES!r}", leaf.name)
        if leaf.places and len(leaf.places) != count:
            raise self._corrupt(f"has {len(leaf.places)} places for {count} blocks", leaf.name)
        for index, block in enumerate(leaf.blocks):
            self._check_block(block, min(block_bytes, nbytes - index * block_bytes), leaf.name, index)
        for index, place in enumerate(leaf.places):
            for base in place.bases:
                self._check_block(base, min(block_bytes, nbytes - index * block_bytes), leaf.name, index)
            self._check_file_numbers(place.files, leaf.name, index)

    def _check_file_numbers(self, numbers: list[int], name: str, block: int | None = None) -> None:
        if max(numbers) >= len(self.manifest.files):
            raise self._corrupt(f"is in file {max(numbers)}, which is not listed", name, block)

    def _check_block(self, block: BlockRecord | BaseRecord, raw_bytes: int, name: str, index: int) -> None:
        # A plain block is just its raw bytes. A coded one is never longer, except for the padding to the next page.
        plain = block.codec == "raw" and not block.stored
        if not (block.length == raw_bytes if plain else 0 < block.length < raw_bytes + 2 * 4096):
            raise self._corrupt(f"{raw_bytes:,} bytes cannot be stored in {block.length:,}", name, index)
        if not (_DIGEST.fullmatch(block.raw) and (plain or _DIGEST.fullmatch(block.stored))):
            raise self._corrupt("has no checksum", name, index)

    def _check_coverage(self) -> None:
        """Check that blocks do not overlap, and fill the files of this save behind their heads without gaps."""
        ends = [file.head_bytes for file in self.manifest.files]
        ranges = sorted((*stored, leaf.name) for leaf in self.manifest.leaves for stored in leaf.ranges())
        for number, start, length, name in ranges:
            file = self.manifest.files[number]
            if start < ends[number] or (start > ends[number] and not file.origin):
                raise self._corrupt(f"its bytes begin at {start:,}, not at {ends[number]:,}", name)
            ends[number] = start + length
        for file, end in zip(self.manifest.files, ends, strict=True):
            if end > file.bytes or (end < file.bytes and not file.origin):
                raise self._corrupt(f"the tensors of file {file.name} end at byte {end:,}, the file at {file.bytes:,}")
