"""Incremental saves: unchanged blocks of an earlier checkpoint are reused, changed ones may be differences."""

import os
import random
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tensorkeep.closing import Closing
from tensorkeep.codecs import probe, zstd
from tensorkeep.codecs.base import CODECS, HashedInput
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, PathLike, StoreError, UnsupportedError
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.blockfile.header import SMALLEST_DIFFERENCE, Description, describe, describe_longest
from tensorkeep.formats.blockfile.plan import Block, BlockKey, BlockRecord, Cuts, FilePlan, TensorBox, coded_name
from tensorkeep.formats.blockfile.read import StoredBlock, digest_as, scratch_bytes
from tensorkeep.formats.blockfile.write import CompressedFile, EncodedBlock, WriteContext, encode
from tensorkeep.formats.boxes import box_of, intersection
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.manifest import BaseRecord, BlockLocation, FileRecord, Root, renumbered
from tensorkeep.formats.native.reader import OpenFiles, located
from tensorkeep.paths import StorePath, absolute, as_path
from tensorkeep.state.leaf import Bytes, Source
from tensorkeep.storage import storage_of
from tensorkeep.storage.buffers import round_up
from tensorkeep.storage.system_errors import close, store_errors

# A file is shared again only if at least this fraction of its bytes is still in use. Otherwise its blocks are written
# again: one block could keep a whole file alive for ever.
LEAST_LIVE = 0.5

# Files of earlier saves that one checkpoint may have, unless twice the number of its own files is more.
MOST_FILES = 64

# How many saves in a row store a block as a difference before one stores it in full again.
MAX_DIFFERENCES_IN_A_ROW = 7

# Differences to undo when a block is read: longer chains make files smaller and reads slower.
MAX_CHAIN_LENGTH = 1

NARROW_DIGESTS = "it was saved without incremental=True, so its checksums cannot identify changed blocks"

# A block of the earlier checkpoint, and where it is, in the file numbers of `OpenFiles`.
Located = tuple[BlockRecord, BlockLocation]

# The elements of a block: tensor, dtype, row, first byte in the row, bytes, offsets and sizes of the columns. Found by
# its elements, a block is reused although another number of ranks saved it.
Cell = tuple[str, str, int, int, int, tuple[int, ...], tuple[int, ...]]


class DifferenceBase(NamedTuple):
    records: list[BaseRecord]
    stored: StoredBlock
    # How many saves in a row have stored the block as a difference, this one included.
    age: int


class BaseCheckpoint(Closing):
    """An open earlier checkpoint that a save takes unchanged blocks from; a context manager.

    ``sources`` are the tensors or boxes of the new save. ``obstacle`` is the first reason why not everything was used.
    """

    def __init__(
        self, path: Path, settings: OpenSettings, sources: Iterable[Source], cuts: Cuts, *, delta: bool
    ) -> None:
        # The files stay open until the save ends: whatever replaces the base meanwhile, its blocks remain readable.
        self._opened = OpenFiles(path, settings)
        self._delta = delta
        self._sharing: SharedFiles | None = None
        self._usable_files: set[int] = set()
        self._used_files: set[int] = set()
        self._cells: dict[Cell, Located] = {}
        self.obstacle = self._incompatible(cuts)
        if self.obstacle is None:
            self._index(sources, cuts)
        codecs = {codec for block, place in self._cells.values() for codec in _codecs(block, place)}
        self._missing_codecs = codecs - set(CODECS.names())

    def _incompatible(self, cuts: Cuts) -> str | None:
        found = {fragment.cuts for fragment in self._opened.fragments}
        if {type(each) for each in found} != {type(cuts)}:
            if isinstance(self._opened.manifest, Root):
                return "many ranks saved it together, in other blocks than one process does"
            return "one process saved it, in other blocks than many ranks do"
        # Raw checksums of 64 bits detect damage, but two different blocks may have the same one.
        if not self._opened.has_wide_digests:
            return NARROW_DIGESTS
        if found != {cuts}:
            return "its tensors are cut in other places, as they are with another compression"
        return None

    def _index(self, sources: Iterable[Source], cuts: Cuts) -> None:
        wanted = defaultdict(list)
        tensors = {leaf.name: leaf for leaf in self._opened.manifest.leaves}
        for source in sources:
            own = TensorBox.of_source(source)
            found = tensors.get(source.name)
            if found is not None and found.dtype == source.dtype.name and cuts.cut_alike(found.shape, own.full):
                wanted[source.name].append(own)
        for name, boxes in wanted.items():
            sides = [box_of(own.offsets, own.sizes) for own in boxes]
            # A tensor that was reshaped has the same bytes, and so the same blocks.
            reshaped = tuple(tensors[name].shape) != boxes[0].full
            for rank, record in self._opened.boxes[name]:
                if reshaped:
                    box = boxes[0]
                elif all(intersection(box_of(record.offsets, record.sizes), own) is None for own in sides):
                    continue
                else:
                    box = boxes[0]._replace(offsets=record.offsets, sizes=record.sizes)
                starts = cuts.block_starts(box)
                for (block, place), start, stop in zip(
                    record.located(), starts, (*starts[1:], box.nbytes), strict=True
                ):
                    cell = _cell(name, tensors[name].dtype, box, start, stop)
                    self._cells[cell] = block, place.renumbered(self._opened.numbers[rank])

    def share_with(self, directory: Path, own_files: int, *, ranks: int = 1) -> bool:
        """Make the files with reusable blocks part of a new checkpoint; return whether there is any."""
        if self.obstacle is not None:
            return False
        remote = storage_of(directory).remote or storage_of(self._opened.path).remote
        sharing: SharedFiles = References(self._opened, directory)
        if not remote:
            sharing = Links(self._opened, directory, shared=ranks > 1)
        self._sharing = sharing
        live = self._live_bytes()
        candidates = {number for _, place in self._cells.values() for number in place.files}
        worthy = [number for number in _worth_keeping(self._opened.records, live) if number in candidates]
        # The files with the most bytes in use come first.
        kept = worthy[: max(MOST_FILES // ranks, 2 * own_files)]
        for number in sorted(kept):
            # Refused (another file system, too many links, a missing file), its blocks are simply written again.
            self._note(sharing.add(number))
        self._usable_files = set(sharing.names)
        if len(kept) < len(worthy):
            self._note(f"{len(worthy) - len(kept)} of its files would be too many, and are written again")
        for codec in sorted(self._missing_codecs):
            self._note(f"it holds blocks of codec {codec!r}, which is not installed")
        if live and not worthy:
            self._note(f"less than {LEAST_LIVE:.0%} of each of its files is still in use, so everything is written")
        return bool(self._usable_files)

    def _note(self, obstacle: str | None) -> None:
        self.obstacle = self.obstacle or obstacle

    def _live_bytes(self) -> dict[int, int]:
        live: dict[int, int] = defaultdict(int)
        for numbers, fragment in zip(self._opened.numbers, self._opened.fragments, strict=True):
            for box in fragment.boxes:
                for file, _, length in box.ranges():
                    live[numbers[file]] += length
        return live

    def find(self, block: Block, wide_digest: str) -> Located | None:
        """Return the earlier block of the same elements, if it has this digest and can be used again."""
        found = self._earlier(block)
        # The stored block is not read: equal checksums of 128 bits mean equal bytes, and a later read verifies them.
        if found is None or found[0].raw != wide_digest:
            return None
        self._used_files.update(found[1].files)
        return found

    def difference_base(self, block: Block) -> DifferenceBase | None:
        found = self._earlier(block) if self._delta and block.nbytes >= SMALLEST_DIFFERENCE else None
        if found is None or found[1].age >= MAX_DIFFERENCES_IN_A_ROW:
            return None
        record, place = found
        own = BaseRecord(record.codec, record.length, record.raw, record.stored, place.file, place.offset)
        records = [own, *place.bases]
        stored = located(record, place, self._opened.files)
        chain = [stored, *stored.bases]
        # The newest base that keeps the chain within the maximum length.
        first = max(0, len(records) - MAX_CHAIN_LENGTH)
        # Without the raw checksum, which `read` compares itself.
        undigested = msgspec.structs.replace(chain[first], raw="", bases=tuple(chain[first + 1 :]))
        return DifferenceBase(records[first:], undigested, place.age + 1)

    def read(self, base: DifferenceBase, block: Block, out: Bytes, scratch: Bytes) -> bool:
        """Fill ``out`` with the raw bytes of a base, by `scratch_bytes` of ``scratch``; return False if that fails."""
        expected = base.records[0].raw
        try:
            self._opened.blocks.decode(base.stored, block.leaf.source.dtype, out, scratch)
            # A difference from damaged bytes could never be undone, so the base is verified even if loads are not.
            if digest_as(expected, out) != expected:
                raise CorruptCheckpointError("the checksum of a block is wrong", path=base.stored.file.path)
        except (CorruptCheckpointError, StoreError, UnsupportedError) as error:
            # Blocks are stored in full instead. No other block of the file is tried: a failing disk may take seconds
            # to refuse each read.
            self._usable_files.difference_update(record.file for record in base.records)
            self._note(f"{base.stored.file.path.name} cannot be used: {error.message}")
            return False
        return True

    def keep(self, base: DifferenceBase) -> None:
        self._used_files.update(record.file for record in base.records)

    def _earlier(self, block: Block) -> Located | None:
        source = block.leaf.source
        box = TensorBox.of_source(source)
        found = self._cells.get(_cell(source.name, source.dtype.name, box, block.start, block.stop))
        if found is None:
            return None
        record, place = found
        # The file is not shared, or could not be read: the block is written again.
        if not self._usable_files.issuperset(place.files):
            return None
        if not self._missing_codecs.isdisjoint(_codecs(record, place)):
            return None  # without the codec, the block could not be read back
        return found

    def finish(self, first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Share only the files that are used; return their records and new numbers, as `SharedFiles.finish`."""
        return self._sharing.finish(self._used_files, first) if self._sharing else ([], {})

    def close(self) -> None:
        self._opened.close()


def _cell(name: str, dtype: str, box: TensorBox, start: int, stop: int) -> Cell:
    row = box.nbytes // box.sizes[0] if box.sizes else box.nbytes
    first = box.offsets[0] if box.offsets else 0
    return name, dtype, first + start // row, start % row, stop - start, box.offsets[1:], box.sizes[1:]


def _codecs(block: BlockRecord, place: BlockLocation) -> list[str]:
    return [block.codec, *(base.codec for base in place.bases)]


def _worth_keeping(records: list[FileRecord], live: dict[int, int]) -> list[int]:
    fractions = {
        # Without the header, which no block uses.
        number: count / max(1, records[number].bytes - records[number].head_bytes)
        for number, count in live.items()
    }
    worthy = (number for number, fraction in fractions.items() if fraction >= LEAST_LIVE)
    return sorted(worthy, key=lambda number: -live[number])


def open_base(
    path: PathLike | None, settings: OpenSettings, sources: Iterable[Source], cuts: Cuts, *, delta: bool, optional: bool
) -> tuple[BaseCheckpoint | None, str | None]:
    """Return the opened base of a save, or the reason why it cannot be used; neither if there is no base."""
    if path is None:
        return None, None
    try:
        return BaseCheckpoint(as_path(path), settings, sources, cuts, delta=delta), None
    # A mistyped path is an error: otherwise every save would silently be a full one.
    except NotACheckpointError as error:
        if not optional:
            raise NotACheckpointError(
                f"cannot be the base of a save: {error.message}",
                path=error.path,
                remedy="correct base=, or leave it out",
            ) from error
        return None, str(error)
    except (CorruptCheckpointError, StoreError, UnsupportedError) as error:
        # A damaged base must not end a training run: everything is written.
        return None, str(error)


# Sharing files with the earlier checkpoint.

_PREFIX = "from-"
_LONGEST_ORIGIN = 100


class SharedFiles(ABC):
    def __init__(self, opened: OpenFiles, directory: Path) -> None:
        # Names in the new checkpoint, by file number in the earlier one.
        self.names: dict[int, str] = {}
        self._opened = opened
        self._directory = directory
        self._origin = _origin(opened.path)

    @abstractmethod
    def add(self, number: int) -> str | None:
        """Share a file; return None, or the reason why it cannot be shared."""

    def finish(self, used: Container[int], first: int) -> tuple[list[FileRecord], dict[int, int]]:
        """Forget unused files, and return the records of the others with their new numbers, by number in the base."""
        self._settle(used)
        records: list[FileRecord] = []
        numbers: dict[int, int] = {}
        for number, name in self.names.items():
            if number in used:
                old = self._opened.records[number]
                numbers[number] = first + len(records)
                records.append(FileRecord(name, old.bytes, old.head_bytes, old.head, old.origin or self._origin))
        return records, numbers

    @abstractmethod
    def _settle(self, used: Container[int]) -> None:
        """Remove what is not used, and check the rest."""


class References(SharedFiles):
    """Names of objects of an earlier step, for the manifest of a new step in the same object store."""

    def add(self, number: int) -> str | None:
        name = self._opened.records[number].name
        here, there = self._directory, self._opened.path
        steps = [path for path in (here, there) if isinstance(path, StorePath) and path.is_step]
        # Before an object is deleted, the manifests of all steps of its run are looked at, and no other ones.
        if len(steps) < 2 or here.parent != there.parent:
            return f"{name} cannot be shared: in an object store, only steps of one run share objects"
        self.names[number] = name if "/" in name or here == there else f"../{there.name}/{name}"
        return None

    def _settle(self, used: Container[int]) -> None:
        # While the earlier manifest is there, no other process deletes the objects that it names; afterwards, the
        # grace period of the deletion protects them until the new manifest names them.
        names = [manifests.FILE_NAME, *(self._opened.records[number].name for number in self.names if number in used)]
        directory = self._opened.directory
        changed = directory.changed(names)
        if changed is not None:
            raise StoreError(
                "was deleted or replaced during a save that shares it",
                path=directory.path_of(changed),
                remedy="save again; a step that is the base of a save must remain until that is over",
            )


class Links(SharedFiles):
    """Hard links to the files of an earlier checkpoint; other ranks may link into the same (``shared``) directory."""

    def __init__(self, opened: OpenFiles, directory: Path, *, shared: bool = False) -> None:
        super().__init__(opened, directory)
        self._shared = shared
        self._taken: set[str] = set()
        # For all files, used or not, so that every rank finds the same names.
        self._names = [self._name(record) for record in opened.records]

    def add(self, number: int) -> str | None:
        record = self._opened.records[number]
        name = self._names[number]
        if not re.search(manifests.FILE_NAME_PATTERN, name):
            return f"{record.name} cannot be linked: its new name would be too long"
        link = self._directory / name
        try:
            os.link(f"{self._opened.directory.stable_path}/{record.name}", link)
            is_own = True
        except FileExistsError:
            is_own = False  # another rank was first
        except OSError as error:
            return f"{record.name} cannot be linked: {error.strerror}"
        # A link is made by name. The name may stand for another file than the open one if the base was replaced.
        opened = self._opened.statuses[number]
        with store_errors(link, "look at the link"):
            found = os.lstat(link)
        if (found.st_dev, found.st_ino, found.st_size) != (opened.st_dev, opened.st_ino, opened.st_size):
            if is_own:
                _remove(link)
            return f"{record.name} cannot be linked: it was replaced or changed meanwhile"
        self.names[number] = name
        return None

    def _name(self, record: FileRecord) -> str:
        """Return a name that is unique among the links, also where the file system ignores case."""
        name = record.name if record.name.startswith(_PREFIX) else f"{_PREFIX}{self._origin}-{record.name}"
        # Other tools must not take the tensors of an earlier step for new ones.
        name = coded_name(name)
        stem, _, suffix = name.rpartition(".")
        tried, count = name, 1
        while tried.casefold() in self._taken:
            count += 1
            tried = f"{stem}-{count}.{suffix}"
        self._taken.add(tried.casefold())
        return tried

    def _settle(self, used: Container[int]) -> None:
        for number, name in self.names.items():
            if number in used:
                _make_durable(self._directory / name, self._opened.records[number].bytes)
            # Another rank may use a link that this one does not: rank 0 removes the links that no fragment lists.
            elif not self._shared:
                _remove(self._directory / name)


def _origin(path: Path) -> str:
    # The origin is a part of file names, which may not be empty or have other characters.
    return re.sub(r"[^A-Za-z0-9_-]", "_", absolute(path).name)[:_LONGEST_ORIGIN] or "root"


def _remove(link: Path) -> None:
    with store_errors(link, "remove the link"):
        os.unlink(link)


def _make_durable(link: Path, size: int) -> None:
    # A checkpoint that `cp` made a moment ago may not be on the disk yet.
    with store_errors(link, "make the linked file durable"):
        fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
            # The file of a finished checkpoint never changes its size, unless some program writes into it.
            found = os.fstat(fd).st_size
        finally:
            close(fd)
    if found != size:
        raise CorruptCheckpointError(
            f"the file of an earlier checkpoint was changed while it was linked: it has {found:,} bytes, not {size:,}",
            path=link,
            remedy="find the program that writes into checkpoints, and save again",
        )


# Data files of incremental saves.

# Prefix of files with only some blocks of a part; their suffix keeps other tools from loading them as complete.
NAME_PREFIX = "changes-"

# A difference is stored if it takes less than this fraction of the full block, because it costs more to read.
WORTH_A_DIFFERENCE = 0.95

# Bytes in the manifest that record the base of a difference.
_RECORD_BYTES = 100

# Block size above which samples decide whether a difference is worth coding; coding less is cheaper than sampling.
_SAMPLED = 2 * 1024**2

# The samples of a block: groups of pieces, and the bytes of a piece.
_GROUPS, _PIECES, _PIECE = 4, 16, 4096


class IncrementalFile(CompressedFile):
    """A data file of the blocks that the base does not have."""

    def __init__(
        self, directory: Path, plan: FilePlan, context: WriteContext, base: BaseCheckpoint, *, delta: bool
    ) -> None:
        # First: the constructor of the base class asks for the longest description.
        self._delta = delta
        super().__init__(directory, replace(plan, name=coded_name(plan.name)), context, prefix=NAME_PREFIX)
        # The blocks that the base has; their locations have its file numbers.
        self.found: dict[BlockKey, Located] = {}
        # The bases of the blocks in this file that are differences.
        self.bases: dict[BlockKey, DifferenceBase] = {}
        self._base = base

    def _longest_description(self) -> Description:
        return describe_longest(self.plan, changes=True, delta=self._delta)

    def _description(self) -> Description:
        return describe(self.plan, self.records, self.bases)

    def _scratch_bytes(self, blocks: list[Block]) -> int:
        needs = [0]
        for block in blocks:
            base = self._base.difference_base(block)
            if base is not None:
                needs.append(_coding_bytes(block) + scratch_bytes(base.stored, block.nbytes))
        return max(needs)

    def _store(
        self, block: Block, raw: Bytes, copy_buffer: Bytes | None, out: Bytes, scratch: Bytes
    ) -> EncodedBlock | None:
        # The checksum of the memory as it is now. If the memory changes later, a reused block is as it was just now. A
        # stored block is hashed again while it is copied. The tensor had both values during the save.
        raw_digest = digest(raw, wide=True)
        found = self._base.find(block, raw_digest)
        if found is not None:
            self.found[block.key] = found
            return None
        base = self._base.difference_base(block)
        if base is None and copy_buffer is not None:
            return super()._store(block, raw, copy_buffer, out, scratch)
        if copy_buffer is not None:
            # The block is read several times from here on, and may have changed since it was hashed.
            data = HashedInput(copy_buffer, wide=True)
            raw, raw_digest = data.read(raw), data.hexdigest()
        difference = None if base is None else self._difference(block, raw, raw_digest, base, out, scratch)
        if base is None or difference is None:
            return EncodedBlock(raw_digest, *encode(raw, block, self._context.codec, out))
        coded, is_certain = difference
        if not is_certain:
            # `out` holds the coded difference, and its raw bytes in `scratch` may be overwritten.
            codec, length = encode(raw, block, self._context.codec, scratch)
            if coded.length + _RECORD_BYTES > WORTH_A_DIFFERENCE * length:
                out[:length] = scratch[:length]
                return EncodedBlock(raw_digest, codec, length)
        self._base.keep(base)
        self.bases[block.key] = base
        return coded

    def _difference(
        self, block: Block, raw: Bytes, raw_digest: str, base: DifferenceBase, out: Bytes, scratch: Bytes
    ) -> tuple[EncodedBlock, bool] | None:
        """Code the difference from the base to the front of ``out``; None if samples show that it is not worth it.

        The second value is whether the difference is surely shorter than the full block would be.
        """
        changed = scratch[: block.nbytes]
        if not self._base.read(base, block, changed, scratch[_coding_bytes(block) :]):
            return None
        np.bitwise_xor(changed, raw, out=changed)
        dtype = block.leaf.source.dtype
        if block.nbytes <= _SAMPLED:
            return EncodedBlock(raw_digest, *probe.encode(changed, dtype, out)), False
        full = [probe.estimate(sample, dtype) for sample in _samples(raw, raw_digest)]
        fractions = [probe.estimate(sample, dtype) for sample in _samples(changed, raw_digest)]
        if sum(fractions) > WORTH_A_DIFFERENCE * sum(full):
            return None
        codec, length = probe.encode(changed, dtype, out)
        # A block varies from place to place, so the smallest estimate stands for the full block. Samples do not show
        # repetitions at a distance, which zstd alone finds.
        certain = length + _RECORD_BYTES <= WORTH_A_DIFFERENCE * min(full) * block.nbytes
        return EncodedBlock(raw_digest, codec, length), certain and probe.choose(raw, dtype) is not zstd.CODEC


def _coding_bytes(block: Block) -> int:
    return round_up(probe.bound(block.nbytes))


def _samples(raw: Bytes, raw_digest: str) -> Iterator[Bytes]:
    # Fixed positions could all miss what the rest of the block is like. The digest as the seed makes saves repeatable.
    draw = random.Random(raw_digest)
    # At multiples of 16 bytes, so that samples begin with a whole element.
    last = (len(raw) - _PIECE) // 16
    for _ in range(_GROUPS):
        starts = sorted(16 * draw.randint(0, last) for _ in range(_PIECES))
        yield np.concatenate([raw[start : start + _PIECE] for start in starts])


def locations(
    keys: Sequence[BlockKey], offset: int, number: int, file: IncrementalFile, numbers: dict[int, int]
) -> tuple[list[BlockRecord], list[BlockLocation]]:
    """Return the blocks of a leaf and their locations, which are empty if the blocks follow one another."""
    blocks: list[BlockRecord] = []
    places: list[BlockLocation] = []
    for key in keys:
        if key in file.found:
            block, place = file.found[key]
            places.append(place.renumbered(numbers))
        else:
            block, base = file.records[key], file.bases.get(key)
            bases = renumbered(base.records, numbers) if base else []
            places.append(BlockLocation(number, offset, bases, base.age if base else 0))
            offset += block.length
        blocks.append(block)
    if all(place.file == number and not place.bases for place in places):
        places = []
    return blocks, places
