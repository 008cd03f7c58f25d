"""Reading the manifest of a native checkpoint, which nobody vouches for: every rule that it must keep.

``manifest.json`` carries a checksum of itself (see ``formats/sealed.py``). It is written last: a checkpoint exists if
and only if a valid manifest does. The format is specified in ``docs/reference/native-format.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import sealed
from tensorkeep.formats.blockfile.header import MAX_HEADER_BYTES
from tensorkeep.formats.blockfile.records import (
    FEATURES,
    MAX_BLOCK_BYTES,
    MOST_BASES,
    PLACES,
    VERSION,
    BaseRecord,
    BlockRecord,
    FileRecord,
    LeafRecord,
    Manifest,
)
from tensorkeep.io.directory import Directory
from tensorkeep.state.dtypes import BY_NAME

FILE_NAME = "manifest.json"

_FILE_NAME = re.compile(r"[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}")
_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")
_MOMENTS = (-62_135_596_800, 253_402_300_799)
"""The years 1 to 9999, in seconds since 1970: what calendars know."""


def read(directory: Directory) -> Manifest:
    """Read the manifest of a checkpoint and check what it claims of its files.

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
    try:
        content = sealed.read_content(directory, FILE_NAME)
    except NotACheckpointError as error:
        raise NotACheckpointError("holds no manifest, so it is no checkpoint", path=directory.path) from error
    return _parsed(content, path) if len(content) > _SMALL else _recalled(_Content(content, path))


_SMALL = 256 * 1024
"""Bytes of a manifest, up to which it is remembered; how long a larger one takes is nothing beside its tensors."""


@dataclass(frozen=True)
class _Content:
    """What a manifest holds; where it lies matters to errors only, which nobody remembers."""

    content: bytes
    path: Path = field(compare=False)


@lru_cache(maxsize=8)
def _recalled(content: _Content) -> Manifest:
    # A manager looks at the same few steps with every save, while a run trains and wants the cores.
    return _parsed(content.content, content.path)


def _parsed(content: bytes, path: Path) -> Manifest:
    body = sealed.body_of(content, path)
    _check_version(body, path)
    try:
        manifest = msgspec.convert(body, Manifest)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CorruptCheckpointError(f"is not a manifest ({error})", path=path) from error
    check(manifest, path)
    return manifest


def check(manifest: Manifest, path: Path) -> None:
    """Hold a manifest to every rule, one that was read or one that is to be written.

    Raises
    ------
    CorruptCheckpointError, UnsupportedError
        Naming the path.
    """
    _Check(manifest, path).all()


def is_file_name(name: str) -> bool:
    """Say whether a data file may be called so: one plain name, no separator, no parent, nothing hidden."""
    return _FILE_NAME.fullmatch(name) is not None and name != FILE_NAME


def _check_version(body: dict[str, Any], path: Path) -> None:
    """Refuse what a later version wrote before looking at fields that it may have changed."""
    if body.get("format") != "tensorkeep":
        raise CorruptCheckpointError("is not the manifest of a tensorkeep checkpoint", path=path)
    version, features = body.get("version"), body.get("features")
    unknown = [name for name in features if name not in FEATURES] if isinstance(features, list) else features
    if version != VERSION or unknown:
        what = f"version {version}" if version != VERSION else f"features {unknown}"
        raise UnsupportedError(
            f"was written in {what} of the format, this release reads version {VERSION}",
            path=path,
            remedy="install a later Tensorkeep",
        )


class _Check:
    """Every rule that a manifest must keep; the first broken one raises."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self.manifest = manifest
        self.path = path

    def all(self) -> None:
        if not 1 <= self.manifest.block_bytes <= MAX_BLOCK_BYTES or self.manifest.block_bytes % 16:
            raise self._corrupt(f"block_bytes is {self.manifest.block_bytes}")
        self._step()
        self._files()
        self._unique("leaf", [leaf.name for leaf in self.manifest.leaves] + list(self.manifest.aliases))
        for leaf in self.manifest.leaves:
            self._leaf(leaf)
        self._coverage()

    def _corrupt(self, message: str, name: str | None = None, block: int | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self.path, name=name, block=block)

    def _unique(self, what: str, names: Sequence[str]) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise self._corrupt(f"the {what} {name!r} stands twice")
            seen.add(name)

    def _step(self) -> None:
        step = self.manifest.step
        if step is not None and not (step.number >= 0 and _MOMENTS[0] <= step.saved_at < _MOMENTS[1]):
            raise self._corrupt(f"says that it is step {step.number}, saved {step.saved_at:g} s after 1970")

    def _files(self) -> None:
        self._unique("file", [file.name.casefold() for file in self.manifest.files])
        for file in self.manifest.files:
            if not is_file_name(file.name):
                raise self._corrupt(f"names the file {file.name!r}, which cannot be part of a checkpoint")
            if file.origin and PLACES not in self.manifest.features:
                raise self._corrupt(f"file {file.name} is of an earlier save, which needs the feature {PLACES!r}")
            if not 0 <= file.head_bytes <= file.bytes:
                raise self._corrupt(f"the sizes of file {file.name} contradict each other")
            if file.head_bytes > _most_head_bytes(file):
                raise self._corrupt(f"file {file.name} claims a head of {file.head_bytes:,} bytes, which none has")

    def _leaf(self, leaf: LeafRecord) -> None:
        if leaf.dtype not in BY_NAME:
            raise UnsupportedError(f"has dtype {leaf.dtype!r}, which is not known here", path=self.path, name=leaf.name)
        if any(length < 0 for length in leaf.shape) or len(leaf.shape) > 64:
            raise self._corrupt(f"has shape {list(leaf.shape)}", leaf.name)
        if not 0 <= leaf.file < len(self.manifest.files):
            raise self._corrupt(f"lies in file {leaf.file}, which is not listed", leaf.name)
        nbytes, block_bytes = leaf.nbytes, self.manifest.block_bytes
        if len(leaf.blocks) != -(-nbytes // block_bytes):
            raise self._corrupt(f"{nbytes:,} bytes cannot lie in {len(leaf.blocks)} blocks", leaf.name)
        for index, block in enumerate(leaf.blocks):
            self._block(block, min(block_bytes, nbytes - index * block_bytes), leaf.name, index)
        if leaf.places:
            self._places(leaf)

    def _block(self, block: BlockRecord | BaseRecord, raw: int, name: str, index: int) -> None:
        # A coded block is never longer than the raw one, but for the padding to the next page.
        fits = block.length == raw if _is_plain(block) else 0 < block.length < raw + 2 * 4096
        if not fits:
            raise self._corrupt(f"{raw:,} bytes cannot be stored in {block.length:,}", name, index)
        if not (_is_digest(block.raw) and (_is_digest(block.stored) or _is_plain(block))):
            raise self._corrupt("has no checksum", name, index)

    def _places(self, leaf: LeafRecord) -> None:
        if PLACES not in self.manifest.features:
            raise self._corrupt(f"has blocks in places of their own, which needs the feature {PLACES!r}", leaf.name)
        if len(leaf.places) != len(leaf.blocks):
            raise self._corrupt(f"names {len(leaf.places)} places for {len(leaf.blocks)} blocks", leaf.name)
        for index, place in enumerate(leaf.places):
            raw = min(self.manifest.block_bytes, leaf.nbytes - index * self.manifest.block_bytes)
            if len(place.bases) > MOST_BASES or place.age < 0:
                raise self._corrupt(f"is made from {len(place.bases)} other blocks", leaf.name, index)
            for base in place.bases:
                self._block(base, raw, leaf.name, index)
            if not all(
                0 <= number < len(self.manifest.files) for number in (place.file, *(b.file for b in place.bases))
            ):
                raise self._corrupt("lies in a file that is not listed", leaf.name, index)

    def _coverage(self) -> None:
        """Hold that blocks do not overlap, and cover each file of this save behind its head without a hole."""
        ends = [file.head_bytes for file in self.manifest.files]
        for number, start, length, name in sorted(self._pieces()):
            file = self.manifest.files[number]
            if start < ends[number] or (start > ends[number] and not file.origin):
                raise self._corrupt(f"its bytes begin at {start:,}, not at {ends[number]:,}", name)
            ends[number] = start + length
        for file, end in zip(self.manifest.files, ends, strict=True):
            if end > file.bytes or (end < file.bytes and not file.origin):
                raise self._corrupt(f"the tensors of file {file.name} end at byte {end:,}, the file at {file.bytes:,}")

    def _pieces(self) -> Iterator[tuple[int, int, int, str]]:
        """Yield file, offset, length and tensor of all that is stored."""
        for leaf in self.manifest.leaves:
            if not leaf.places:
                yield leaf.file, leaf.offset, leaf.stored_bytes, leaf.name
                continue
            for block, place in leaf.located():
                yield place.file, place.offset, block.length, leaf.name
                for base in place.bases:
                    yield base.file, base.offset, base.length, leaf.name


def _most_head_bytes(file: FileRecord) -> int:
    # All of an index is its head.
    return sealed.MAX_BYTES if file.head_bytes == file.bytes else MAX_HEADER_BYTES + 8


def _is_plain(block: BlockRecord | BaseRecord) -> bool:
    """Say whether the block is just its raw bytes, so that it needs no second checksum."""
    return block.codec == "raw" and not block.stored


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(text) is not None
