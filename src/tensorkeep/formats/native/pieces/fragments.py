"""Reading the fragments of a checkpoint that many ranks wrote, and checking that they fit together."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.blockfile.plan import block_count, block_starts
from tensorkeep.formats.checksummed_json import Content
from tensorkeep.formats.native.pieces.records import (
    FRAGMENT_FORMAT,
    FRAGMENT_VERSION,
    BoxRecord,
    Fragment,
    FragmentFiles,
    Root,
    TensorRecord,
)
from tensorkeep.formats.native.records import FEATURES, FileRecord
from tensorkeep.formats.native.rules import StoredRules, check_references
from tensorkeep.formats.tiling import find_flaw
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.storage.base import Directory
from tensorkeep.structs import json_decoder

Body = TypeVar("Body", Fragment, FragmentFiles)


class _Kind(msgspec.Struct):
    """The fields that say whether this release can read a fragment."""

    format: str = ""
    version: int = 0
    features: list[str] = []


_DECODER = json_decoder(Content[Fragment])
_FILES_DECODER = json_decoder(Content[FragmentFiles])
_KIND_DECODER = json_decoder(Content[_Kind])

PlacedBox = tuple[int, BoxRecord]
"""The rank that stored a box, and its record."""


class Fragments(NamedTuple):
    """The fragments of a checkpoint in the order of the ranks, and the boxes of each tensor."""

    fragments: list[Fragment]
    boxes: dict[str, list[PlacedBox]]


def read_fragments(directory: Directory, root: Root) -> Fragments:
    """Read all fragments, and check that their boxes tile each tensor of the root.

    Raises CorruptCheckpointError with file, tensor and offsets if one is missing, damaged, of another save, or breaks a
    rule; UnsupportedError if a later version wrote it.
    """
    fragments = [_read(directory, root, rank, _DECODER) for rank in range(root.ranks)]
    return join(root, fragments, directory.path)


def read_files(directory: Directory, root: Root) -> list[FileRecord]:
    """Return the data files that the fragments list, without decoding their boxes; raises the errors of the above."""
    found: dict[str, FileRecord] = {}
    for rank in range(root.ranks):
        fragment = _read(directory, root, rank, _FILES_DECODER)
        check_references(fragment.files, fragment.features, directory.path / root.fragments[rank].name)
        for file in fragment.files:
            found.setdefault(file.name, file)
    return list(found.values())


def _read(directory: Directory, root: Root, rank: int, decoder: msgspec.json.Decoder[Content[Body]]) -> Body:
    record = root.fragments[rank]
    path = directory.path / record.name
    content = read_content(directory, record.name)
    if (len(content), checksummed_json.digest(content, wide=True)) != (record.bytes, record.digest):
        raise CorruptCheckpointError(
            "is not the fragment that the manifest lists",
            path=path,
            remedy="a fragment of another save, or a later change: take another copy",
        )
    return parse(content, path, root.save, root.ranks, rank, decoder)


def read_content(directory: Directory, name: str) -> bytes:
    """Return the bytes of a fragment whose own checksum is right; CorruptCheckpointError if it is missing."""
    try:
        return checksummed_json.read_content(directory, name)
    except NotACheckpointError as error:
        raise CorruptCheckpointError(
            "the manifest lists this fragment, but it is missing", path=directory.path / name
        ) from error


def parse(
    content: bytes,
    path: Path,
    save: str,
    ranks: int,
    rank: int,
    decoder: msgspec.json.Decoder[Content[Body]],
) -> Body:
    """Return the fragment of one rank of a save; the tensors of its boxes are still to be checked."""
    try:
        fragment = decoder.decode(content).body
    except (msgspec.DecodeError, RecursionError) as error:
        _check_kind(content, path)
        raise CorruptCheckpointError(f"is not a fragment ({error})", path=path) from error
    _check_version(fragment, path)
    if fragment.save != save:
        raise CorruptCheckpointError("is a fragment of another save", path=path)
    if fragment.rank != rank:
        raise CorruptCheckpointError(f"is the fragment of rank {fragment.rank}, not of rank {rank}", path=path)
    if fragment.ranks != ranks:
        raise CorruptCheckpointError(f"was written by one of {fragment.ranks} ranks, not of {ranks}", path=path)
    return fragment


def parse_fragment(content: bytes, path: Path, save: str, ranks: int, rank: int) -> Fragment:
    """Return a fragment with its boxes; see `parse`."""
    return parse(content, path, save, ranks, rank, _DECODER)


def _check_kind(content: bytes, path: Path) -> None:
    """Refuse a later version before looking at fields that it may have changed."""
    try:
        kind = _KIND_DECODER.decode(content).body
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptCheckpointError(f"is not a fragment ({error})", path=path) from error
    _check_version(kind, path)


def _check_version(found: Fragment | FragmentFiles | _Kind, path: Path) -> None:
    if found.format != FRAGMENT_FORMAT:
        raise CorruptCheckpointError("is not a fragment of a Tensorkeep checkpoint", path=path)
    unknown = [name for name in found.features if name not in FEATURES]
    if found.version != FRAGMENT_VERSION or unknown:
        what = f"features {unknown}" if unknown else f"version {found.version}"
        raise UnsupportedError(
            f"was written in {what} of fragments, this release reads version {FRAGMENT_VERSION}",
            path=path,
            remedy="install a later Tensorkeep",
        )


def join(root: Root, fragments: Sequence[Fragment], folder: Path) -> Fragments:
    """Check the boxes of fragments against the tensors of the root, and return them by tensor.

    Raises CorruptCheckpointError for the first rule that is broken.
    """
    tensors = {leaf.name: leaf for leaf in root.leaves}
    boxes: dict[str, list[PlacedBox]] = {leaf.name: [] for leaf in root.leaves}
    owners: dict[str, tuple[FileRecord, str]] = {}
    reserved = {"manifest.json", *(record.name for record in root.fragments)}
    for rank, fragment in enumerate(fragments):
        path = folder / root.fragments[rank].name
        _check_names(fragment, path, owners, reserved)
        check_fragment(fragment, path, tensors)
        for box in fragment.boxes:
            boxes[fragment.leaves[box.leaf]].append((rank, box))
    check_tiling(
        tensors.values(), {n: [(b.offsets, b.sizes, r) for r, b in found] for n, found in boxes.items()}, folder
    )
    return Fragments(list(fragments), boxes)


def _check_names(fragment: Fragment, path: Path, owners: dict[str, tuple[FileRecord, str]], reserved: set[str]) -> None:
    """Check that no data file is listed by two ranks, unless both link the same file of an earlier save."""
    for file in fragment.files:
        if file.name.casefold() in reserved:
            raise CorruptCheckpointError(f"lists {file.name} as a data file", path=path)
        other, by = owners.setdefault(file.name.casefold(), (file, path.name))
        if by != path.name and (other != file or not file.origin):
            raise CorruptCheckpointError(f"lists the file {file.name}, which {by} lists as well", path=path)


def check_fragment(fragment: Fragment, path: Path, tensors: Mapping[str, TensorRecord]) -> None:
    """Check the rules of one fragment: its files, and the boxes that it has of tensors of the state."""
    rules = StoredRules(path, fragment.files, fragment.features)
    rules.check_files()
    rules.check_unique("leaf", fragment.leaves)
    known: list[tuple[TensorRecord, int]] = []
    for name in fragment.leaves:
        if name not in tensors:
            raise rules.corrupt("has boxes here, but the manifest does not list it", name)
        known.append((tensors[name], BY_NAME[tensors[name].dtype].itemsize))
    for box in fragment.boxes:
        if box.leaf >= len(known):
            raise rules.corrupt(f"has a box of tensor {box.leaf}, which is not listed")
        tensor, itemsize = known[box.leaf]
        check_box(tensor, box.offsets, box.sizes, path)
        cut = tensor.shape, box.offsets, box.sizes, itemsize, fragment.grid
        count = block_count(*cut)
        starts = (0,) if count == 1 else block_starts(*cut) if count == len(box.blocks) else ()
        rules.check_stored(box, tensor.name, prod(box.sizes) * itemsize, count, starts)
    rules.check_coverage((box, fragment.leaves[box.leaf]) for box in fragment.boxes)


def check_box(tensor: TensorRecord, offsets: Sequence[int], sizes: Sequence[int], path: Path) -> None:
    """Check that a box has elements and lies within its tensor."""
    if len(offsets) == len(sizes) == len(tensor.shape):
        for offset, size, length in zip(offsets, sizes, tensor.shape, strict=True):
            if size <= 0 or offset + size > length:
                break
        else:
            return
    raise CorruptCheckpointError(
        f"cannot have a box of {list(sizes)} at {list(offsets)}: its shape is {list(tensor.shape)}",
        path=path,
        name=tensor.name,
    )


def check_tiling(
    tensors: Iterable[TensorRecord],
    boxes: Mapping[str, Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]],
    path: Path,
) -> None:
    """Check that the boxes (offsets, sizes, rank) of each tensor tile it; they lie within it already."""
    for tensor in tensors:
        found = boxes[tensor.name]
        try:
            flaw = find_flaw(tensor.shape, ((offsets, sizes) for offsets, sizes, _ in found))
        except OverflowError as error:
            raise CorruptCheckpointError(str(error), path=path, name=tensor.name) from error
        except ValueError as error:
            raise UnsupportedError(str(error), path=path, name=tensor.name) from error
        if flaw is None:
            continue
        if flaw.is_gap:
            problem = f"no rank has its element {list(flaw.offsets)}"
        else:
            ranks = [rank for offsets, sizes, rank in found if _contains(offsets, sizes, flaw.offsets)]
            problem = f"more than one box has its element {list(flaw.offsets)}: ranks {_listed(ranks)}"
        raise CorruptCheckpointError(problem, path=path, name=tensor.name)


def _contains(offsets: Sequence[int], sizes: Sequence[int], element: Sequence[int]) -> bool:
    return all(o <= at < o + size for o, size, at in zip(offsets, sizes, element, strict=True))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
