"""The JSON files of a native checkpoint (``docs/reference/native-format.md``). Nothing in them is trusted."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import MAX_BLOCK_BYTES, AliasRecord, PartKey, StepRecord
from tensorkeep.formats.blockfile.plan import BlockRecord, ByteCuts, Cuts, Grid, TensorBox
from tensorkeep.formats.boxes import find_flaw
from tensorkeep.formats.checksummed_json import Body, Content
from tensorkeep.formats.decoding import MAX_HEADER_BYTES, missing_as
from tensorkeep.paths import StorePath
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import MOST_DIMENSIONS, Source
from tensorkeep.state.tree import Flat, has_later_nodes
from tensorkeep.storage import storage_of
from tensorkeep.storage.base import MANIFEST_NAME, Directory
from tensorkeep.storage.store_commit import object_name
from tensorkeep.structs import json_decoder

# Written last: a checkpoint exists if and only if it has a valid manifest.
FILE_NAME = MANIFEST_NAME
VERSION = 1
FRAGMENT_FORMAT = "tensorkeep-fragment"
FRAGMENT_VERSION = 1

# Raw blocks have checksums of 128 bits, so that a later save can identify changed blocks.
WIDE_DIGESTS = "wide-digests"
# Blocks may be in files of earlier saves, or be differences from blocks there.
PLACES = "places"
# Files may be objects of other checkpoints of the same run, in an object store.
REFERENCES = "references"
# Many ranks wrote the checkpoint together: the manifest is a `Root`, and fragments list the blocks.
PIECES = "pieces"
# The skeleton has nodes that the first versions did not have: paths, dates, slices, deques.
LATER_VALUES = "later-values"
# The features that the records of stored blocks may use.
FEATURES = (WIDE_DIGESTS, PLACES, REFERENCES)

MAX_RANKS = 2**20
# The most base blocks of a difference: a longer chain in a hostile file would cost memory and time for every read.
MAX_BASES = 8

# Names of data files: one plain name, not hidden, not the manifest's; or, with `REFERENCES`, ``../NAME/FILE``. A name
# from an untrusted file must not lead out of the run.
_PLAIN_NAME = "[A-Za-z0-9_%-][A-Za-z0-9_%.-]{0,250}"
FILE_NAME_PATTERN = rf"^(\.\./{_PLAIN_NAME}/)?(?!{MANIFEST_NAME}\Z){_PLAIN_NAME}\Z"

# Files that a caller may attach: what ``from_pretrained`` and ``Trainer`` of Hugging Face read beside the weights. A
# closed list, so that a checkpoint with a damaged manifest, which lists nothing, can still be replaced.
ATTACHED_NAMES = (
    r"(?:(?:generation_|tokenizer_|preprocessor_|processor_)?config|trainer_state|tokenizer|special_tokens_map|added_tokens"
    r"|vocab)\.json|(?:vocab|merges)\.txt|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|chat_template\.jinja"
)

_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")

Count = Annotated[int, Meta(ge=0)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=MOST_DIMENSIONS)]


def fragment_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def save_id(save: str) -> str:
    """Return the id that names the objects of a save in a store: the save's name without the restart count.

    >>> save_id("0123456789abcdef-0")
    '0123456789abcdef'
    """
    return save.partition("-")[0]


class BaseRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    codec: str
    length: Count
    raw: str
    stored: str
    file: Count
    offset: Count


class BlockLocation(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The location of a block that does not follow the block before it, and the bases of a difference."""

    file: Count
    offset: Count
    # Empty for a block that is stored in full. Otherwise the raw block is the XOR of the decoded block and the raw
    # first base, which may itself be a difference from the second. The last base is stored in full.
    bases: Annotated[list[BaseRecord], Meta(max_length=MAX_BASES)] = []
    # How many saves in a row have stored the block as a difference.
    age: Count = 0

    @property
    def files(self) -> list[int]:
        return [self.file, *(base.file for base in self.bases)]

    def renumbered(self, numbers: Mapping[int, int] | Sequence[int]) -> "BlockLocation":
        return BlockLocation(numbers[self.file], self.offset, renumbered(self.bases, numbers), self.age)


def renumbered(bases: Sequence[BaseRecord], numbers: Mapping[int, int] | Sequence[int]) -> list[BaseRecord]:
    return [BaseRecord(b.codec, b.length, b.raw, b.stored, numbers[b.file], b.offset) for b in bases]


class StoredRecord:
    __slots__ = ()

    file: int
    offset: int
    blocks: list[BlockRecord]
    # Empty if the blocks follow one another from `offset` in `file`; otherwise the location of every block.
    places: list[BlockLocation]

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield file, offset and length of everything that is stored."""
        if not self.places:
            yield self.file, self.offset, sum([block.length for block in self.blocks])
        for block, place in zip(self.blocks, self.places, strict=False):
            yield place.file, place.offset, block.length
            yield from ((base.file, base.offset, base.length) for base in place.bases)

    def located(self) -> list[tuple[BlockRecord, BlockLocation]]:
        if self.places:
            return list(zip(self.blocks, self.places, strict=True))
        offsets = accumulate([block.length for block in self.blocks], initial=self.offset)
        return [(block, BlockLocation(self.file, at)) for block, at in zip(self.blocks, offsets, strict=False)]


class TensorDescription(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    part: str
    key: str
    dtype: str
    shape: Shape

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BY_NAME[self.dtype].itemsize


class ShardedTensor(TensorDescription, frozen=True, omit_defaults=True):
    # A hint for people: how the tensor was sharded.
    layout: str = ""


class LeafRecord(StoredRecord, TensorDescription, frozen=True, omit_defaults=True):
    """A tensor of a `Manifest`, and its blocks: ``block_bytes`` raw bytes each, the last one shorter."""

    file: Count
    offset: Count
    blocks: list[BlockRecord]
    places: list[BlockLocation] = []


class BoxRecord(StoredRecord, msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A box of a tensor from the element ``offsets``, and the blocks of its C-order bytes."""

    # An index into the names of the fragment.
    leaf: Count
    offsets: Shape
    sizes: Shape
    file: Count
    offset: Count
    blocks: list[BlockRecord]
    places: list[BlockLocation] = []


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file. Blocks follow its head without gaps or overlaps."""

    name: Annotated[str, Meta(pattern=FILE_NAME_PATTERN)]
    bytes: Count
    # `head` is the checksum of these first bytes. The head of an index is the whole file.
    head_bytes: Count
    head: str
    # The earlier save that wrote the file, if any. Blocks that are no longer used may then lie between the others.
    origin: str = ""


class FragmentHead(msgspec.Struct, frozen=True):
    format: str
    version: int
    features: list[str]
    save: str
    rank: Count
    ranks: Count


class Fragment(FragmentHead, frozen=True):
    """The boxes that one rank stored, and its data files."""

    # Whether a box may have no elements.
    may_be_empty: ClassVar[bool] = False

    # Where boxes are cut into blocks: see `Grid`.
    grid_bytes: Annotated[int, Meta(ge=16, le=MAX_BLOCK_BYTES, multiple_of=16)]
    grid_parts: Annotated[int, Meta(ge=1)]
    files: list[FileRecord]
    # The names of the boxes' tensors.
    leaves: list[str]
    boxes: list[BoxRecord]

    @property
    def cuts(self) -> Cuts:
        return Grid(self.grid_bytes, self.grid_parts)


class FullTensors(Fragment, frozen=True):
    """A `Manifest` seen as the fragment of its only rank: one box for each tensor, the full tensor."""

    may_be_empty = True

    @property
    def cuts(self) -> Cuts:
        return ByteCuts(self.grid_bytes)


class FragmentFiles(FragmentHead, frozen=True):
    """A fragment without its boxes, for callers that need the files only."""

    files: list[FileRecord]


# What a `Manifest` and a `Root` both record about the whole state.
class StateRecord:
    __slots__ = ()

    leaves: list[Any]
    aliases: dict[str, AliasRecord]

    def parts(self) -> dict[str, PartKey]:
        found = {leaf.name: (leaf.part, leaf.key) for leaf in self.leaves}
        found |= {name: (alias.part, alias.key) for name, alias in self.aliases.items() if alias.key}
        taken = set(found.values())
        for name, alias in self.aliases.items():
            # The first manifests of version 1 stored no key for aliases: it is made from the name.
            if not alias.key:
                key = name.removeprefix(f"{alias.part}.")
                while (alias.part, key) in taken:
                    key += "_"
                found[name] = (alias.part, key)
                taken.add(found[name])
        return found


def features_of_skeleton(skeleton: object) -> list[str]:
    return [LATER_VALUES] if has_later_nodes(skeleton) else []


def alias_records(flat: Flat[Source]) -> dict[str, AliasRecord]:
    return {name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()}


class Manifest(StateRecord, msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    version: int
    writer: str
    # What a reader must support besides the version.
    features: list[str]
    block_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES, multiple_of=16)]
    compression: str
    files: list[FileRecord]
    leaves: list[LeafRecord]
    aliases: dict[str, AliasRecord]
    skeleton: Any
    metadata: dict[str, Any]
    step: StepRecord | None = None

    def fragment(self) -> FullTensors:
        """Return the manifest as a fragment, so that one reader and one set of rules serve both kinds."""
        boxes = [
            BoxRecord(number, (0,) * len(leaf.shape), leaf.shape, leaf.file, leaf.offset, leaf.blocks, leaf.places)
            for number, leaf in enumerate(self.leaves)
        ]
        names = [leaf.name for leaf in self.leaves]
        return FullTensors(FRAGMENT_FORMAT, 1, self.features, "", 0, 1, self.block_bytes, 1, self.files, names, boxes)


class FragmentRecord(msgspec.Struct, frozen=True):
    name: str
    bytes: Count
    # The xxh3-128 of the bytes of the fragment's file.
    digest: str


class Root(StateRecord, msgspec.Struct, frozen=True, omit_defaults=True):
    format: str
    version: int
    writer: str
    features: list[str]
    compression: str
    # The random name of the save, which every fragment repeats.
    save: str
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    # One for each rank, in the order of the ranks.
    fragments: list[FragmentRecord]
    # Empty: the fragments list the data files.
    files: Annotated[list[FileRecord], Meta(max_length=0)]
    leaves: list[ShardedTensor]
    aliases: dict[str, AliasRecord]
    skeleton: Any
    metadata: dict[str, Any]
    step: StepRecord | None = None


class FragmentReport(msgspec.Struct, frozen=True):
    """A rank's report to rank 0 when its files are durable."""

    rank: int
    record: FragmentRecord
    files: list[str]
    leaves: list[str]
    # Index into `leaves`, offsets, sizes: rank 0 checks that they tile every tensor without reading files of other
    # hosts.
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
    stored_bytes: int = 0
    new_bytes: int = 0

    @classmethod
    def of_fragment(
        cls, fragment: Fragment, record: FragmentRecord, stored_bytes: int = 0, new_bytes: int = 0
    ) -> "FragmentReport":
        files = [file.name for file in fragment.files]
        boxes = [(box.leaf, box.offsets, box.sizes) for box in fragment.boxes]
        return cls(fragment.rank, record, files, fragment.leaves, boxes, stored_bytes, new_bytes)


class ShapeRecord(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[Count, ...]


class Outline(msgspec.Struct, frozen=True):
    """A manifest without its blocks, which take most of the time to decode."""

    format: str
    version: int
    features: list[str]
    compression: str
    files: list[FileRecord]
    leaves: list[ShapeRecord]
    step: StepRecord | None = None
    fragments: list[FragmentRecord] = []

    @property
    def state_bytes(self) -> int:
        return sum(prod(leaf.shape) * BY_NAME[leaf.dtype].itemsize for leaf in self.leaves)


# Decodes whatever a later version has changed, so that the error names the version.
class _Version(msgspec.Struct):
    format: str = ""
    version: int = 0
    features: list[str] = []


# Made once: the first use of a type by msgspec costs as much as checking a small manifest.
_MANIFEST_DECODER = json_decoder(Content[Manifest])
_ROOT_DECODER = json_decoder(Content[Root])
_OUTLINE_DECODER = json_decoder(Content[Outline])
_FRAGMENT_DECODER = json_decoder(Content[Fragment])
_FILES_DECODER = json_decoder(Content[FragmentFiles])
_VERSION_DECODER = json_decoder(Content[_Version])

FragmentT = TypeVar("FragmentT", Fragment, FragmentFiles)
# The rank that stored a box, and its record.
RankBox = tuple[int, BoxRecord]


class Fragments(NamedTuple):
    fragments: list[Fragment]
    boxes: dict[str, list[RankBox]]


# Manifests.


def read(directory: Directory) -> Manifest | Root:
    """Read the manifest of a checkpoint and check its rules, but not the fragments; NotACheckpointError without one."""
    return parse(_content(directory), directory.path / FILE_NAME)


def read_outline(directory: Directory, name: str = FILE_NAME) -> Outline:
    """Read a manifest's outline: the checksum is checked, the blocks are not decoded. Raises the errors of `read`."""
    path = directory.path / name
    outline = _decoded(_OUTLINE_DECODER, _content(directory, name), path)
    check_references(outline.files, outline.features, path)
    for leaf in outline.leaves:
        check_dtype(leaf.dtype, path)
    return outline


def parse(content: bytes, path: Path) -> Manifest | Root:
    """Return the manifest in the bytes of a file that was read, or that will be written."""
    try:
        manifest = _decoded(_MANIFEST_DECODER, content, path)
    except CorruptCheckpointError:
        # The tensors of a root have no blocks, so a root does not decode as a manifest.
        with suppress(msgspec.DecodeError, RecursionError):
            if PIECES in _VERSION_DECODER.decode(content).body.features:
                return parse_root(content, path)
        raise
    if PIECES in manifest.features:  # a state without tensors decodes as either
        return parse_root(content, path)
    _check_tensors(manifest, path)
    check_fragment(manifest.fragment(), path, {leaf.name: leaf for leaf in manifest.leaves})
    return manifest


def read_root(directory: Directory, name: str = FILE_NAME) -> Root:
    return parse_root(_content(directory, name), directory.path / name)


def parse_root(content: bytes, path: Path, *, with_fragments: bool = True) -> Root:
    """Return the manifest of many ranks; without fragments, before these are written. Raises as `parse`."""
    root = _decoded(_ROOT_DECODER, content, path)
    if PIECES not in root.features:
        raise CorruptCheckpointError(f"has fragments, which need the feature {PIECES!r}", path=path)
    _check_tensors(root, path)
    expected = [fragment_name(rank) for rank in range(root.ranks)] if with_fragments else []
    if len(root.fragments) != len(expected):
        raise CorruptCheckpointError(f"lists {len(root.fragments)} fragments for {len(expected)} ranks", path=path)
    for fragment, name in zip(root.fragments, expected, strict=True):
        if fragment.name not in (name, object_name(name, save_id(root.save))):
            raise CorruptCheckpointError(f"lists the fragment {fragment.name!r} where {name} belongs", path=path)
    return root


def _decoded(decoder: msgspec.json.Decoder[Content[Body]], content: bytes, path: Path) -> Body:
    """Return records with checked types and ranges, of a version that this release reads."""
    try:
        body = decoder.decode(content).body
    except (msgspec.DecodeError, RecursionError) as error:
        # Check the version first: a later version may have changed any field.
        _check_version(checksummed_json.body_of(content, path), path)
        raise CorruptCheckpointError(f"is not a manifest ({error})", path=path) from error
    _check_version({name: getattr(body, name) for name in ("format", "version", "features")}, path)
    return body


def _content(directory: Directory, name: str = FILE_NAME) -> bytes:
    with missing_as(NotACheckpointError("holds no manifest, so it is not a checkpoint", path=directory.path)):
        return checksummed_json.read_content(directory, name)


def _check_version(body: dict[str, Any], path: Path) -> None:
    if body.get("format") != "tensorkeep":
        raise CorruptCheckpointError("is not the manifest of a Tensorkeep checkpoint", path=path)
    version, features = body.get("version"), body.get("features")
    unknown = (
        [name for name in features if name not in (*FEATURES, PIECES, LATER_VALUES)]
        if isinstance(features, list)
        else features
    )
    if version != VERSION or unknown:
        what = f"version {version}" if version != VERSION else f"features {unknown}"
        raise _later_version(what, f"the format, this release reads version {VERSION}", path)


def _later_version(what: str, where: str, path: Path) -> UnsupportedError:
    return UnsupportedError(f"was written in {what} of {where}", path=path, remedy="install a later Tensorkeep")


def _check_tensors(manifest: Manifest | Root, path: Path) -> None:
    _check_unique("leaf", [*(leaf.name for leaf in manifest.leaves), *manifest.aliases], path)
    for leaf in manifest.leaves:
        check_dtype(leaf.dtype, path, leaf.name)


def check_dtype(dtype: str, path: Path, name: str | None = None) -> None:
    if dtype not in BY_NAME:
        raise UnsupportedError(f"has dtype {dtype!r}, which this release does not know", path=path, name=name)


def _check_unique(what: str, names: Sequence[str], path: Path) -> None:
    if len(set(names)) < len(names):
        raise CorruptCheckpointError(f"the {what} {Counter(names).most_common(1)[0][0]!r} occurs twice", path=path)


def check_references(files: Sequence[FileRecord], features: Sequence[str], path: Path) -> None:
    """Check that only a checkpoint in an object store, with the feature for it, names objects of others."""
    # On a disk, nothing would keep the file of a neighbour: its step may be deleted at any moment.
    if REFERENCES in features and not storage_of(path).remote:
        raise UnsupportedError(
            "shares objects with other checkpoints, which is read from an object store only",
            path=path,
            remedy="copy it to the disk with `tensorkeep convert`, which makes it complete",
        )
    for file in files:
        if "/" not in file.name:
            continue
        problem = None
        if REFERENCES not in features:
            problem = f"which needs the feature {REFERENCES!r}"
        elif not file.origin:
            problem = "and does not name that as its origin"
        elif not isinstance(path, StorePath) or "/" not in path.key:
            problem = "outside of the bucket"
        if problem:
            raise CorruptCheckpointError(f"file {file.name} is of another checkpoint, {problem}", path=path)


# Fragments.


def read_fragments(directory: Directory, manifest: Manifest | Root) -> Fragments:
    """Read all fragments, and check that their boxes tile each tensor; raises the errors of `parse`."""
    if isinstance(manifest, Root):
        fragments = [_read_fragment(directory, manifest, rank, _FRAGMENT_DECODER) for rank in range(manifest.ranks)]
        return join(manifest, fragments, directory.path)
    # One box is the full tensor, so there is nothing to tile.
    fragment = manifest.fragment()
    return Fragments([fragment], {name: [(0, box)] for name, box in zip(fragment.leaves, fragment.boxes, strict=True)})


def read_files(directory: Directory, root: Root) -> list[FileRecord]:
    """Return the data files in the fragments without decoding boxes; raises as `read_fragments`."""
    found: dict[str, FileRecord] = {}
    for rank in range(root.ranks):
        fragment = _read_fragment(directory, root, rank, _FILES_DECODER)
        check_references(fragment.files, fragment.features, directory.path / root.fragments[rank].name)
        for file in fragment.files:
            # Several ranks may list the same file of an earlier save.
            found.setdefault(file.name, file)
    return list(found.values())


def _read_fragment(
    directory: Directory, root: Root, rank: int, decoder: msgspec.json.Decoder[Content[FragmentT]]
) -> FragmentT:
    record = root.fragments[rank]
    # The manifest has size and checksum of every fragment, so that no fragment of another save can take its place.
    path = directory.path / record.name
    content = read_fragment_content(directory, record.name)
    if (len(content), checksummed_json.digest(content, wide=True)) != (record.bytes, record.digest):
        raise CorruptCheckpointError(
            "is not the fragment that the manifest lists",
            path=path,
            remedy="a fragment of another save, or a later change: take another copy",
        )
    return _parse_fragment(content, path, root.save, root.ranks, rank, decoder)


def read_fragment_content(directory: Directory, name: str) -> bytes:
    """Return the bytes of a fragment, which has the right checksum; CorruptCheckpointError if it is missing."""
    text = "the manifest lists this fragment, but it is missing"
    with missing_as(CorruptCheckpointError(text, path=directory.path / name)):
        return checksummed_json.read_content(directory, name)


def parse_fragment(content: bytes, path: Path, save: str, ranks: int, rank: int) -> Fragment:
    return _parse_fragment(content, path, save, ranks, rank, _FRAGMENT_DECODER)


def _parse_fragment(
    content: bytes, path: Path, save: str, ranks: int, rank: int, decoder: msgspec.json.Decoder[Content[FragmentT]]
) -> FragmentT:
    try:
        fragment = decoder.decode(content).body
    except (msgspec.DecodeError, RecursionError) as error:
        # Check the version first: a later version may have changed any field.
        with suppress(msgspec.DecodeError, RecursionError):
            _check_fragment_version(_VERSION_DECODER.decode(content).body, path)
        raise CorruptCheckpointError(f"is not a fragment ({error})", path=path) from error
    _check_fragment_version(fragment, path)
    if fragment.save != save:
        raise CorruptCheckpointError("is a fragment of another save", path=path)
    if fragment.rank != rank:
        raise CorruptCheckpointError(f"is the fragment of rank {fragment.rank}, not of rank {rank}", path=path)
    if fragment.ranks != ranks:
        raise CorruptCheckpointError(f"was written by one of {fragment.ranks} ranks, not of {ranks}", path=path)
    return fragment


def _check_fragment_version(found: Fragment | FragmentFiles | _Version, path: Path) -> None:
    if found.format != FRAGMENT_FORMAT:
        raise CorruptCheckpointError("is not a fragment of a Tensorkeep checkpoint", path=path)
    unknown = [name for name in found.features if name not in FEATURES]
    if found.version != FRAGMENT_VERSION or unknown:
        what = f"features {unknown}" if unknown else f"version {found.version}"
        raise _later_version(what, f"fragments, this release reads version {FRAGMENT_VERSION}", path)


def join(root: Root, fragments: Sequence[Fragment], folder: Path) -> Fragments:
    """Check fragments against the root, and return their boxes by tensor; CorruptCheckpointError for a broken rule."""
    tensors = {leaf.name: leaf for leaf in root.leaves}
    boxes: dict[str, list[RankBox]] = {leaf.name: [] for leaf in root.leaves}
    owners: dict[str, tuple[FileRecord, str]] = {}
    reserved = {FILE_NAME, *(record.name for record in root.fragments)}
    for rank, fragment in enumerate(fragments):
        path = folder / root.fragments[rank].name
        _check_owners(fragment, path, owners, reserved)
        check_fragment(fragment, path, tensors)
        for box in fragment.boxes:
            boxes[fragment.leaves[box.leaf]].append((rank, box))
    for name, found in boxes.items():
        check_tiling(tensors[name], [(box.offsets, box.sizes, rank) for rank, box in found], folder)
    return Fragments(list(fragments), boxes)


def _check_owners(
    fragment: Fragment, path: Path, owners: dict[str, tuple[FileRecord, str]], reserved: set[str]
) -> None:
    for file in fragment.files:
        # Compared without case: on some file systems, both names would be the same file.
        if file.name.casefold() in reserved:
            raise CorruptCheckpointError(f"lists {file.name} as a data file", path=path)
        other, by = owners.setdefault(file.name.casefold(), (file, path.name))
        # Two ranks may link the same file of an earlier save. A file of this save has one writer.
        if by != path.name and (other != file or not file.origin):
            raise CorruptCheckpointError(f"lists the file {file.name}, which {by} lists as well", path=path)


def check_fragment(fragment: Fragment, path: Path, tensors: Mapping[str, TensorDescription]) -> None:
    """Check the files of a fragment, its boxes and their blocks; CorruptCheckpointError for a broken rule."""
    rules = _BlockRules(path, fragment.files, fragment.features)
    rules.check_files()
    _check_unique("leaf", fragment.leaves, path)
    known: list[tuple[TensorDescription, int]] = []
    for name in fragment.leaves:
        if name not in tensors:
            raise rules.corrupt("has boxes here, but the manifest does not list it", name)
        known.append((tensors[name], BY_NAME[tensors[name].dtype].itemsize))
    for box in fragment.boxes:
        if box.leaf >= len(known):
            raise rules.corrupt(f"has a box of tensor {box.leaf}, which is not listed")
        tensor, itemsize = known[box.leaf]
        # A box of one process is the full tensor by construction, which may have no elements.
        if not fragment.may_be_empty:
            check_box(tensor, box.offsets, box.sizes, path)
        found = TensorBox(tensor.shape, box.offsets, box.sizes, itemsize)
        # Counted before anything is listed: damaged sizes may stand for more blocks than memory can hold.
        if fragment.cuts.block_count(found) != len(box.blocks):
            raise rules.corrupt(f"{found.nbytes:,} bytes are not {len(box.blocks)} blocks", tensor.name)
        starts = (0,) if len(box.blocks) == 1 else fragment.cuts.block_starts(found)
        rules.check_blocks(box, tensor.name, [stop - start for start, stop in pairwise((*starts, found.nbytes))])
    rules.check_coverage(fragment)


def check_box(tensor: TensorDescription, offsets: Sequence[int], sizes: Sequence[int], path: Path) -> None:
    if len(offsets) == len(sizes) == len(tensor.shape) and all(
        size > 0 and offset + size <= length for offset, size, length in zip(offsets, sizes, tensor.shape, strict=True)
    ):
        return
    raise CorruptCheckpointError(
        f"cannot have a box of {list(sizes)} at {list(offsets)}: its shape is {list(tensor.shape)}",
        path=path,
        name=tensor.name,
    )


def check_tiling(tensor: TensorDescription, boxes: Sequence[tuple[Shape, Shape, int]], path: Path) -> None:
    """Check that boxes (offsets, sizes, rank) tile a tensor; `check_box` has accepted every box."""
    try:
        flaw = find_flaw(tensor.shape, ((offsets, sizes) for offsets, sizes, _ in boxes))
    except OverflowError as error:
        raise CorruptCheckpointError(str(error), path=path, name=tensor.name) from error
    except ValueError as error:
        raise UnsupportedError(str(error), path=path, name=tensor.name) from error
    if flaw is None:
        return
    problem = f"no rank has its element {list(flaw.offsets)}"
    if not flaw.is_gap:
        ranks = [
            rank
            for offsets, sizes, rank in boxes
            if all(o <= at < o + size for o, size, at in zip(offsets, sizes, flaw.offsets, strict=True))
        ]
        listed = ", ".join(map(str, ranks[:5])) + (", ..." if len(ranks) > 5 else "")
        problem = f"more than one box has its element {list(flaw.offsets)}: ranks {listed}"
    raise CorruptCheckpointError(problem, path=path, name=tensor.name)


class _BlockRules:
    def __init__(self, path: Path, files: Sequence[FileRecord], features: Sequence[str]) -> None:
        self._path = path
        self._files = files
        self._features = features
        self._has_places = PLACES in features

    def corrupt(self, message: str, name: str | None = None, block: int | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self._path, name=name, block=block)

    def check_files(self) -> None:
        # Names differ by more than case: on some file systems, both would be the same file.
        check_references(self._files, self._features, self._path)
        _check_unique("file", [file.name.casefold() for file in self._files], self._path)
        for file in self._files:
            if file.origin and not self._has_places:
                raise self.corrupt(f"file {file.name} is of an earlier save, which needs the feature {PLACES!r}")
            # An index has a head and no blocks.
            most = checksummed_json.MAX_BYTES if file.head_bytes == file.bytes else MAX_HEADER_BYTES + 8
            if file.head_bytes > min(file.bytes, most):
                raise self.corrupt(f"file {file.name} cannot have a head of {file.head_bytes:,} bytes")

    def check_blocks(self, record: BoxRecord, name: str, lengths: Sequence[int]) -> None:
        # `lengths` are the raw lengths of the blocks. Numbers and counts come first: the loops below use them.
        self._check_file_numbers([record.file], name)
        if record.places and not self._has_places:
            raise self.corrupt(f"has blocks with places, which need the feature {PLACES!r}", name)
        if record.places and len(record.places) != len(lengths):
            raise self.corrupt(f"has {len(record.places)} places for {len(lengths)} blocks", name)
        for index, block in enumerate(record.blocks):
            self._check_block(block, lengths[index], name, index)
        for index, place in enumerate(record.places):
            for base in place.bases:
                self._check_block(base, lengths[index], name, index)
            self._check_file_numbers(place.files, name, index)

    def _check_file_numbers(self, numbers: list[int], name: str, block: int | None = None) -> None:
        if max(numbers) >= len(self._files):
            raise self.corrupt(f"is in file {max(numbers)}, which is not listed", name, block)

    def _check_block(self, block: BlockRecord | BaseRecord, raw_bytes: int, name: str, index: int) -> None:
        # A plain block is just its raw bytes. A coded one is never longer, except for the padding to the next page.
        plain = block.codec == "raw" and not block.stored
        if not (block.length == raw_bytes if plain else 0 < block.length < raw_bytes + 2 * 4096):
            raise self.corrupt(f"{raw_bytes:,} bytes cannot be stored in {block.length:,}", name, index)
        if not (_DIGEST.fullmatch(block.raw) and (plain or _DIGEST.fullmatch(block.stored))):
            raise self.corrupt("has no checksum", name, index)

    def check_coverage(self, fragment: Fragment) -> None:
        """Check that blocks do not overlap, and fill the files of this save behind their heads without gaps."""
        ends = [file.head_bytes for file in self._files]
        # Every byte of a file of this save belongs to its head or to one block, so every byte has a checksum.
        ranges = sorted((*each, fragment.leaves[box.leaf]) for box in fragment.boxes for each in box.ranges())
        for number, start, length, name in ranges:
            file = self._files[number]
            # Bytes that no block uses are allowed in an earlier file only: newer blocks have replaced them.
            if start < ends[number] or (start > ends[number] and not file.origin):
                raise self.corrupt(f"its bytes begin at {start:,}, not at {ends[number]:,}", name)
            ends[number] = start + length
        for file, end in zip(self._files, ends, strict=True):
            if end > file.bytes or (end < file.bytes and not file.origin):
                raise self.corrupt(f"the tensors of file {file.name} end at byte {end:,}, the file at {file.bytes:,}")
