"""Reading and validating ``manifest.json``, which is untrusted.

The manifest carries a checksum of itself (see ``formats/checksummed_json.py``). It is written last: a checkpoint
exists if and
only if it has a valid manifest. The format is specified in ``docs/reference/native-format.md``.
"""

from math import prod
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import StepRecord
from tensorkeep.formats.checksummed_json import Body, Content
from tensorkeep.formats.native.pieces.records import FragmentRecord, Root, fragment_name, save_id
from tensorkeep.formats.native.records import FEATURES, PIECES, VERSION, Count, FileRecord, Manifest
from tensorkeep.formats.native.rules import StoredRules, check_dtype, check_references
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.storage.base import MANIFEST_NAME, Directory
from tensorkeep.storage.store_commit import object_name
from tensorkeep.structs import json_decoder

FILE_NAME = MANIFEST_NAME


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
    fragments: list[FragmentRecord] = []

    @property
    def state_bytes(self) -> int:
        """Raw bytes of all stored tensors."""
        return sum(prod(leaf.shape) * BY_NAME[leaf.dtype].itemsize for leaf in self.leaves)


class _Features(msgspec.Struct):
    features: list[str] = []


# Made once: the first use of a type by msgspec costs as much as checking a small manifest.
_MANIFEST_DECODER = json_decoder(Content[Manifest])
_ROOT_DECODER = json_decoder(Content[Root])
_FEATURES_DECODER = json_decoder(Content[_Features])
_OUTLINE_DECODER = json_decoder(Content[Outline])


def read(directory: Directory) -> Manifest | Root:
    """Read the manifest of a checkpoint and check its rules; those of the fragments are still to be read.

    Raises NotACheckpointError if it does not exist; CorruptCheckpointError if it is damaged or breaks a rule;
    UnsupportedError if a later version wrote it.
    """
    return parse(_content(directory), directory.path / FILE_NAME)


def read_outline(directory: Directory, name: str = FILE_NAME) -> Outline:
    """Read the outline of a manifest: its checksum is checked, its blocks are not decoded, which takes the most time.

    Raises the errors of `read`.
    """
    path = directory.path / name
    outline = _decoded(_OUTLINE_DECODER, _content(directory, name), path)
    check_references(outline.files, outline.features, path)
    for leaf in outline.leaves:
        check_dtype(leaf.dtype, path)
    return outline


def parse(content: bytes, path: Path) -> Manifest | Root:
    """Return the manifest in the bytes of a file that was read, or that will be written.

    Raises CorruptCheckpointError if it breaks a rule; UnsupportedError if a later version wrote it.
    """
    try:
        manifest = _decoded(_MANIFEST_DECODER, content, path)
    except CorruptCheckpointError:
        # The tensors of a root have no blocks: their fragments have.
        if not _is_root(content):
            raise
        return parse_root(content, path)
    if PIECES in manifest.features:  # a state without tensors
        return parse_root(content, path)
    _Rules(manifest, path).check()
    return manifest


def _is_root(content: bytes) -> bool:
    try:
        return PIECES in _FEATURES_DECODER.decode(content).body.features
    except (msgspec.DecodeError, RecursionError):
        return False


def read_root(directory: Directory, name: str = FILE_NAME) -> Root:
    """Read the manifest of a checkpoint of many ranks; raises the errors of `read`."""
    return parse_root(_content(directory, name), directory.path / name)


def parse_root(content: bytes, path: Path, *, with_fragments: bool = True) -> Root:
    """Return the manifest of a checkpoint of many ranks; without its fragments before these are written.

    Raises the errors of `parse`.
    """
    root = _decoded(_ROOT_DECODER, content, path)
    _check_root(root, path, with_fragments=with_fragments)
    return root


def _decoded(decoder: msgspec.json.Decoder[Content[Body]], content: bytes, path: Path) -> Body:
    """Return the records of a manifest, whose types and ranges are checked, and whose version this release reads."""
    try:
        body = decoder.decode(content).body
    except (msgspec.DecodeError, RecursionError) as error:
        # A later version may have changed any field.
        _check_version(checksummed_json.body_of(content, path), path)
        raise CorruptCheckpointError(f"is not a manifest ({error})", path=path) from error
    _check_version({name: getattr(body, name) for name in ("format", "version", "features")}, path)
    return body


def _content(directory: Directory, name: str = FILE_NAME) -> bytes:
    try:
        return checksummed_json.read_content(directory, name)
    except NotACheckpointError as error:
        raise NotACheckpointError("holds no manifest, so it is not a checkpoint", path=directory.path) from error


def _check_version(body: dict[str, Any], path: Path) -> None:
    """Refuse a later version before looking at fields that it may have changed."""
    if body.get("format") != "tensorkeep":
        raise CorruptCheckpointError("is not the manifest of a Tensorkeep checkpoint", path=path)
    version, features = body.get("version"), body.get("features")
    unknown = [name for name in features if name not in (*FEATURES, PIECES)] if isinstance(features, list) else features
    if version != VERSION or unknown:
        what = f"version {version}" if version != VERSION else f"features {unknown}"
        raise UnsupportedError(
            f"was written in {what} of the format, this release reads version {VERSION}",
            path=path,
            remedy="install a later Tensorkeep",
        )


def _check_root(root: Root, path: Path, *, with_fragments: bool = True) -> None:
    """Check the rules of a root that concern no fragment's content."""
    rules = StoredRules(path, [], root.features)
    if PIECES not in root.features:
        raise rules.corrupt(f"has fragments, which need the feature {PIECES!r}")
    rules.check_unique("leaf", [*(leaf.name for leaf in root.leaves), *root.aliases])
    for leaf in root.leaves:
        check_dtype(leaf.dtype, path, leaf.name)
    expected = [fragment_name(rank) for rank in range(root.ranks)] if with_fragments else []
    if len(root.fragments) != len(expected):
        raise rules.corrupt(f"lists {len(root.fragments)} fragments for {len(expected)} ranks")
    for fragment, name in zip(root.fragments, expected, strict=True):
        if fragment.name not in (name, object_name(name, save_id(root.save))):
            raise rules.corrupt(f"lists the fragment {fragment.name!r} where {name} belongs")


class _Rules(StoredRules):
    """The rules of a manifest that types and ranges of the records do not express; the first broken one raises."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        super().__init__(path, manifest.files, manifest.features)
        self.manifest = manifest

    def check(self) -> None:
        self.check_files()
        leaves = self.manifest.leaves
        self.check_unique("leaf", [*(leaf.name for leaf in leaves), *self.manifest.aliases])
        for leaf in leaves:
            check_dtype(leaf.dtype, self.path, leaf.name)
            nbytes = leaf.nbytes
            # Not the length of the range: a damaged file may have any shape.
            count = -(-nbytes // self.manifest.block_bytes)
            self.check_stored(leaf, leaf.name, nbytes, count, range(0, nbytes, self.manifest.block_bytes))
        self.check_coverage((leaf, leaf.name) for leaf in leaves)
