"""Reading native checkpoints, by one process or by many ranks, without trusting anything in them."""

import os
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.errors import CorruptCheckpointError
from tensorkeep.formats import boxes, checksummed_json
from tensorkeep.formats.base import BLOCK_BYTES, OpenSettings, Problem, Reader, StoredLeaf, Structure
from tensorkeep.formats.blockfile.plan import BlockRecord, TensorBox
from tensorkeep.formats.blockfile.read import BlockReader, StoredBlock, StoredTensor, read_ahead
from tensorkeep.formats.boxes import Box, BoxTarget
from tensorkeep.formats.decoding import missing_as
from tensorkeep.formats.model_folder import add_unused
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.manifest import WIDE_DIGESTS, BlockLocation, FileRecord, Root, TensorDescription
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Bytes, Leaf
from tensorkeep.storage import read_directory, storage_of
from tensorkeep.storage.base import Directory, SourceFile
from tensorkeep.storage.buffers import BufferPool, round_up
from tensorkeep.storage.system_errors import store_errors


class OpenFiles:
    """The open files of a native checkpoint, in the order of the manifest, with checked sizes; to be closed."""

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self.blocks = BlockReader(settings.pool, verify=settings.verify)
        self.files: list[SourceFile] = []
        # The files' statuses when they were opened.
        self.statuses: list[os.stat_result] = []
        read_directory(path, lambda directory: self._open(directory, settings))

    def _open(self, directory: Directory, settings: OpenSettings) -> None:
        # Files are opened relative to this directory's descriptor: its path may name another checkpoint by now.
        self.directory = directory
        try:
            self.manifest = manifests.read(directory)
            self.fragments, self.boxes = manifests.read_fragments(directory, self.manifest)
            # Two ranks may have linked the same file of an earlier save.
            records = {file.name: file for fragment in self.fragments for file in fragment.files}
            places = {name: number for number, name in enumerate(records)}
            self.records = list(records.values())
            # `numbers[rank]` maps a fragment's file numbers to `files`.
            self.numbers = [[places[file.name] for file in fragment.files] for fragment in self.fragments]
            # All at once, unless they are very many: a checkpoint that is replaced meanwhile is read to the end as it
            # was.
            for record in self.records:
                self.files.append(self._open_file(record, page_cache=settings.page_cache))
                self.statuses.append(self.files[-1].status)
            self._files_by_rank = [[self.files[number] for number in numbers] for numbers in self.numbers]
            fragments = self.manifest.fragments if isinstance(self.manifest, Root) else []
            with store_errors(self.path / manifests.FILE_NAME, "look at the file"):
                self.manifest_names = [manifests.FILE_NAME, *(record.name for record in fragments)]
                self.manifest_statuses = [directory.status(name) for name in self.manifest_names]
        except BaseException:
            self._close_files()
            raise

    def _open_file(self, record: FileRecord, *, page_cache: bool) -> SourceFile:
        with missing_as(missing_file(self.directory.path_of(record.name))):
            file = self.directory.open(record.name, follow_links=False, page_cache=page_cache, one_of=len(self.records))
        if file.size != record.bytes:
            # The rules of the manifest hold for this size only: block offsets were checked against it.
            file.close()
            raise wrong_size(file.path, file.size, record.bytes)
        return file

    @property
    def has_wide_digests(self) -> bool:
        return all(WIDE_DIGESTS in fragment.features for fragment in self.fragments)

    @property
    def locations(self) -> list[BlockLocation]:
        return [place for fragment in self.fragments for box in fragment.boxes for place in box.places]

    def stored_box(self, tensor: TensorDescription, number: int) -> StoredTensor:
        rank, box = self.boxes[tensor.name][number]
        dtype, files = BY_NAME[tensor.dtype], self._files_by_rank[rank]
        found = TensorBox(tensor.shape, box.offsets, box.sizes, dtype.itemsize)
        starts = self.fragments[rank].cuts.block_starts(found)
        blocks = tuple([located(block, place, files) for block, place in box.located()])
        file = blocks[0].file if blocks else files[box.file]
        return StoredTensor(tensor.name, dtype, box.sizes, found.nbytes, file, starts, blocks)

    def identity(self) -> str:
        # The manifest has the checksums of all blocks or of all fragments.
        return checksummed_json.digest(checksummed_json.read_content(self.directory, manifests.FILE_NAME), wide=True)

    def close(self) -> None:
        self._close_files()
        self.directory.close()

    def _close_files(self) -> None:
        for file in self.files:
            file.close()
        self.files.clear()
        self.statuses.clear()


def located(block: BlockRecord, place: BlockLocation, files: Sequence[SourceFile]) -> StoredBlock:
    bases = tuple(
        StoredBlock(files[base.file], base.codec, base.offset, base.length, base.raw, base.stored)
        for base in place.bases
    )
    return StoredBlock(files[place.file], block.codec, place.offset, block.length, block.raw, block.stored, bases)


def missing_file(path: Path) -> CorruptCheckpointError:
    return CorruptCheckpointError("the manifest lists this file, but it is missing", path=path)


def wrong_size(path: Path, size: int, expected: int) -> CorruptCheckpointError:
    problem = "was cut short" if size < expected else "has grown"
    return CorruptCheckpointError(f"the file {problem}: it holds {size:,} bytes, {expected:,} were written", path=path)


def occupied_bytes(status: os.stat_result) -> int:
    # As `du` counts: what the file system has allocated.
    return status.st_blocks * 512  # the unit of st_blocks on every file system


class NativeReader(Reader):
    format = "native"

    def __init__(self, opened: OpenFiles, settings: OpenSettings) -> None:
        self.path = opened.path
        self._opened = opened
        self._pool = settings.pool
        manifest = opened.manifest
        self.metadata, self.step = manifest.metadata, manifest.step
        self._tensors: dict[str, TensorDescription] = {leaf.name: leaf for leaf in manifest.leaves}
        # Filled when a box is first read: a rank needs few of the boxes that all ranks have written.
        self._boxes: dict[tuple[str, int], StoredTensor] = {}
        leaves = {leaf.name: self._leaf(leaf) for leaf in manifest.leaves}
        structure = Structure(manifest.skeleton, manifest.aliases, manifest.parts())
        self._set_state(structure.flat(leaves), self.path / manifests.FILE_NAME)
        self.verifiable = f"xxh3-{128 if opened.has_wide_digests else 64} of every block"
        # The coarsest cuts: all ranks of one save use the same.
        self._cuts = max((fragment.cuts for fragment in opened.fragments), key=lambda cuts: cuts.most_bytes)
        locations = opened.locations
        self.buffers = self._buffers(any(place.bases for place in locations))
        self.details = _details(opened, locations, self._cuts.most_bytes)
        # To list a store is a request more, and shows what other saves have left there, too.
        if not storage_of(self.path).remote:
            add_unused(self, self.path, {*opened.manifest_names, *self.details["files"]})

    def _buffers(self, is_delta: bool) -> int:
        if not isinstance(self._opened.manifest, Root):
            return 3 if is_delta else 2
        # Besides the destination: a full block, its stored bytes, the wanted part, and an earlier block.
        blocks, most_bytes = 4 if is_delta else 3, self._cuts.most_bytes
        # `block_bytes` is at least one block, and of fine blocks at least so many that fill 16 MiB, but one.
        if 2 * most_bytes < BLOCK_BYTES:
            blocks = -(-blocks * most_bytes // (BLOCK_BYTES - most_bytes))
        return 1 + blocks

    def _leaf(self, tensor: TensorDescription) -> StoredLeaf:
        stored = self._opened.boxes[tensor.name]
        codecs: dict[str, None] = {}  # each once, in order
        for _, box in stored:
            if any(place.bases for place in box.places):
                codecs["delta"] = None
            codecs |= dict.fromkeys([block.codec for block in box.blocks])
        file = ""
        if stored:
            rank, box = stored[0]
            file = self._opened.fragments[rank].files[box.places[0].file if box.places else box.file].name
        return StoredLeaf(
            self,
            tensor.name,
            BY_NAME[tensor.dtype],
            tensor.shape,
            stored_bytes=sum([block.length for _, box in stored for block in box.blocks]),
            codec="+".join(codecs) or "raw",
            file=file,
        )

    def _box(self, name: str, number: int) -> StoredTensor:
        found = self._boxes.get((name, number))
        if found is None:
            found = self._boxes[name, number] = self._opened.stored_box(self._tensors[name], number)
        return found

    def _has_one_box(self, name: str) -> bool:
        return len(self._opened.boxes[name]) == 1

    def identity(self) -> str:
        return self._opened.identity()

    def audit(self) -> Iterator[Problem]:
        for record, file in zip(self._opened.records, self._opened.files, strict=True):
            if checksummed_json.digest_of(file, record.head_bytes) != record.head:
                # Blocks have their own checksums; heads and indexes are checked here.
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        if not all(self._has_one_box(name) for name, _, _ in ranges):
            return nullcontext()
        return read_ahead([(self._box(name, 0), start, stop) for name, start, stop in ranges])

    def mapped(self, name: str) -> Bytes | None:
        return self._box(name, 0).mapped() if self._has_one_box(name) else None

    def block_bytes(self, name: str) -> int:
        tensor = self._tensors[name]
        return self._cuts.read_bytes(tensor.shape, BY_NAME[tensor.dtype].itemsize)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        # One box is the full tensor: `check_tiling` has seen to that.
        if self._has_one_box(name):
            self._opened.blocks.read(self._box(name, 0), start, stop, out)
            return
        leaf = self.flat.leaves[name]
        size = leaf.dtype.itemsize
        first, last = start // size, -(-stop // size)
        if (first * size, last * size) != (start, stop):
            # Boxes are cut and copied by whole elements; a caller may ask for any range of bytes.
            with self._pool.acquire((last - first) * size) as buffer:
                whole = buffer[: (last - first) * size]
                self.read(name, first * size, last * size, whole)
                out[:] = whole[start - first * size : stop - first * size]
            return
        done = 0
        for box in boxes.range_to_boxes(leaf.shape, first, last):
            shape = boxes.box_shape(box)
            count = prod(shape) * size
            self._fill(name, box, BoxTarget(shape, size, out[done : done + count]), self._pool)
            done += count

    def read_box(self, name: str, offsets: Sequence[int], out: Leaf, pool: BufferPool) -> None:
        # A full tensor of one process is read by ranges, as in every other format.
        if not isinstance(self._opened.manifest, Root):
            super().read_box(name, offsets, out, pool)
            return
        self._fill(name, boxes.box_of(offsets, out.shape), BoxTarget.of_leaf(out), pool)

    def _fill(self, name: str, wanted: Box, target: BoxTarget, pool: BufferPool) -> None:
        for number, (_, record) in enumerate(self._opened.boxes[name]):
            box = boxes.box_of(record.offsets, record.sizes)
            common = boxes.intersection(box, wanted)
            if common is None:
                continue
            stored = self._box(name, number)
            size = stored.dtype.itemsize
            inner = boxes.relative(common, box)
            out = target.contiguous(boxes.relative(common, wanted))
            place = boxes.as_range(stored.shape, inner)
            # Contiguous on both sides: read or decode straight into the destination.
            if out is not None and place is not None:
                self._opened.blocks.read(stored, place[0] * size, place[1] * size, out)
            else:
                self._scatter(stored, inner, boxes.relative(box, wanted), target, pool)

    def _scatter(self, stored: StoredTensor, inner: Box, at: Box, target: BoxTarget, pool: BufferPool) -> None:
        """Read the blocks of a stored box that have elements of ``inner``, and copy these elements to the target.

        ``inner`` has indices within the stored box. ``at`` is the stored box by its indices within the target.
        """
        size = stored.dtype.itemsize
        first, last = boxes.covering_range(stored.shape, inner)
        stops = (*stored.starts[1:], stored.nbytes)
        for index in range(bisect(stored.starts, first * size) - 1, bisect(stored.starts, last * size - 1)):
            start, stop = stored.starts[index], stops[index]
            # A block is a range of the box's C-order stream, so it is a few boxes.
            parts = list(boxes.range_to_boxes(stored.shape, start // size, stop // size))
            spare = target.spare_bytes(stop - start)
            with pool.acquire(round_up(stop - start) + spare) as buffer:
                self._opened.blocks.read(stored, start, stop, buffer[: stop - start])
                begin = 0
                for part in parts:
                    shape = boxes.box_shape(part)
                    end = begin + prod(shape) * size
                    common = boxes.intersection(part, inner)
                    if common is not None:
                        data = boxes.words(buffer[begin:end], shape, size)[boxes.relative(common, part)]
                        region = tuple(
                            slice(x.start + y.start, x.stop + y.start) for x, y in zip(common, at, strict=True)
                        )
                        target.put(region, data, buffer[round_up(stop - start) :])
                    begin = end

    def close(self) -> None:
        self._opened.close()


def _details(opened: OpenFiles, locations: Sequence[BlockLocation], block_bytes: int) -> dict[str, Any]:
    manifest, statuses = opened.manifest, [*opened.statuses, *opened.manifest_statuses]
    occupied = sum(map(occupied_bytes, statuses))
    # Removing the checkpoint alone frees the files that nothing else has a link to.
    own = sum(occupied_bytes(status) for status in statuses if status.st_nlink <= 1)
    details: dict[str, Any] = {"version": manifest.version, "writer": manifest.writer}
    if manifest.step is not None:
        details["step"] = msgspec.to_builtins(manifest.step)
    if locations or any(file.origin for file in opened.records):
        linked: dict[str, int] = {}
        for file in opened.records:
            if file.origin:
                linked[file.origin] = linked.get(file.origin, 0) + file.bytes
        written = sum(file.bytes for file in opened.records if not file.origin)
        details["history"] = {
            "new_bytes": written + sum(status.st_size for status in opened.manifest_statuses),
            "linked_bytes": linked,
            "deepest_chain": max((len(place.bases) for place in locations), default=0),
        }
    details |= {
        "compression": manifest.compression,
        "block_bytes": block_bytes,
        "files": {file.name: file.bytes for file in opened.records},
        "space": {"own_bytes": own, "shared_bytes": occupied - own, "occupied_bytes": occupied},
    }
    if isinstance(manifest, Root):
        details["ranks"] = [
            {"fragment": record.name, "boxes": len(fragment.boxes), "bytes": sum(f.bytes for f in fragment.files)}
            for record, fragment in zip(manifest.fragments, opened.fragments, strict=True)
        ]
        details["layouts"] = {leaf.name: leaf.layout for leaf in manifest.leaves if leaf.layout}
    return details
