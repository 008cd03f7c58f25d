"""Reading a checkpoint that many ranks wrote together: ranges and boxes, gathered from the boxes on disk."""

from bisect import bisect
from collections.abc import Sequence
from math import prod

from tensorkeep.formats.base import (
    BLOCK_BYTES,
    Box,
    BoxTarget,
    OpenSettings,
    StoredLeaf,
    Structure,
    as_range,
    box_of,
    box_shape,
    covering_range,
    intersection,
    range_to_boxes,
    relative,
    words,
)
from tensorkeep.formats.blockfile.plan import block_starts, bytes_between_cuts, rows_per_block
from tensorkeep.formats.blockfile.read import StoredTensor
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.open_files import OpenFiles
from tensorkeep.formats.native.pieces.records import Root, TensorRecord
from tensorkeep.formats.native.reader import OpenFilesReader
from tensorkeep.formats.native.records import WIDE_DIGESTS
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Leaf
from tensorkeep.storage.buffers import BufferPool, round_up
from tensorkeep.storage.direct_io import Bytes


class PiecesReader(OpenFilesReader):
    """An open native checkpoint that many ranks wrote."""

    def __init__(self, opened: OpenFiles, root: Root, settings: OpenSettings) -> None:
        self.metadata = root.metadata
        self.step = root.step
        super().__init__(opened)
        self._pool = settings.pool
        self._records = {leaf.name: leaf for leaf in root.leaves}
        self._boxes: dict[tuple[str, int], StoredTensor] = {}
        leaves = {leaf.name: self._leaf(leaf) for leaf in root.leaves}
        structure = Structure(root.skeleton, root.aliases, root.parts())
        self._set_state(structure.flat(leaves), self.path / manifests.FILE_NAME)
        fragments = opened.fragments
        if all(WIDE_DIGESTS in fragment.features for fragment in fragments):
            self.verifiable = "xxh3-128 of every block"
        places = [place for fragment in fragments for box in fragment.boxes for place in box.places]
        # Of the coarsest cuts: all ranks of one save use the same.
        self._grid = max(fragment.grid for fragment in fragments)
        most_bytes = self._grid.most_bytes
        self._describe(places, most_bytes)
        self.details["ranks"] = [
            {"fragment": record.name, "boxes": len(fragment.boxes), "bytes": sum(f.bytes for f in fragment.files)}
            for record, fragment in zip(root.fragments, fragments, strict=True)
        ]
        self.details["layouts"] = {leaf.name: leaf.layout for leaf in root.leaves if leaf.layout}
        # Besides the destination: a full block, its stored bytes, the part of it that is wanted, and an earlier block.
        blocks = 4 if any(place.bases for place in places) else 3
        # `block_bytes` is at least one block, and of fine blocks at least so many that fill 16 MiB, but one.
        if 2 * most_bytes < BLOCK_BYTES:
            blocks = -(-blocks * most_bytes // (BLOCK_BYTES - most_bytes))
        self.buffers = 1 + blocks

    def _leaf(self, record: TensorRecord) -> StoredLeaf:
        """Return a tensor as a leaf, from its records alone: boxes are prepared when they are first read."""
        boxes = self._opened.boxes[record.name]
        blocks = [block for _, box in boxes for block in box.blocks]
        is_delta = any(place.bases for _, box in boxes for place in box.places)
        codecs = [*(["delta"] if is_delta else []), *sorted({block.codec for block in blocks})]
        file = self._opened.files_of(boxes[0][0])[boxes[0][1].file].path.name if boxes else ""
        return StoredLeaf(
            self,
            record.name,
            BY_NAME[record.dtype],
            record.shape,
            stored_bytes=sum([block.length for block in blocks]),
            codec="+".join(codecs) or "raw",
            file=file,
        )

    def _stored(self, name: str, number: int) -> StoredTensor:
        """Return where a box of a tensor is stored."""
        found = self._boxes.get((name, number))
        if found is None:
            record, (rank, box) = self._records[name], self._opened.boxes[name][number]
            dtype = BY_NAME[record.dtype]
            file, blocks = self._opened.stored(box, self._opened.files_of(rank))
            grid = self._opened.fragments[rank].grid
            starts = block_starts(record.shape, box.offsets, box.sizes, dtype.itemsize, grid)
            nbytes = prod(box.sizes) * dtype.itemsize
            found = self._boxes[name, number] = StoredTensor(name, dtype, box.sizes, nbytes, file, starts, blocks)
        return found

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        leaf = self.flat.leaves[name]
        size = leaf.dtype.itemsize
        first, last = start // size, -(-stop // size)
        if (first * size, last * size) != (start, stop):
            with self._pool.acquire((last - first) * size) as buffer:
                whole = buffer[: (last - first) * size]
                self.read(name, first * size, last * size, whole)
                out[:] = whole[start - first * size : stop - first * size]
            return
        done = 0
        for box in range_to_boxes(leaf.shape, first, last):
            shape = box_shape(box)
            count = prod(shape) * size
            self._fill(name, box, BoxTarget(shape, size, out[done : done + count]), self._pool)
            done += count

    def read_box(self, name: str, offsets: Sequence[int], out: Leaf, pool: BufferPool) -> None:
        self._fill(name, box_of(offsets, out.shape), BoxTarget.of_leaf(out), pool)

    def mapped(self, name: str) -> Bytes | None:
        return self._stored(name, 0).mapped() if len(self._opened.boxes[name]) == 1 else None

    def block_bytes(self, name: str) -> int:
        """Return a multiple of the bytes between two cuts, so that no block is read twice."""
        record = self._records[name]
        itemsize = BY_NAME[record.dtype].itemsize
        row = prod(record.shape[1:]) * itemsize
        most = bytes_between_cuts(record.shape, itemsize, self._grid)
        if not record.shape or row > most:
            return max(BLOCK_BYTES, most)
        cut = rows_per_block(record.shape, itemsize, self._grid) * row
        return max(1, BLOCK_BYTES // cut) * cut if cut else BLOCK_BYTES

    def _fill(self, name: str, wanted: Box, target: BoxTarget, pool: BufferPool) -> None:
        """Read a box of a tensor from all stored boxes that have elements of it."""
        for number, (_, record) in enumerate(self._opened.boxes[name]):
            box = box_of(record.offsets, record.sizes)
            common = intersection(box, wanted)
            if common is None:
                continue
            stored = self._stored(name, number)
            size = stored.dtype.itemsize
            inner = relative(common, box)
            out = target.contiguous(relative(common, wanted))
            place = as_range(stored.shape, inner)
            if out is not None and place is not None:
                self._opened.blocks.read(stored, place[0] * size, place[1] * size, out)
            else:
                self._scatter(stored, inner, relative(box, wanted), target, pool)

    def _scatter(self, stored: StoredTensor, inner: Box, at: Box, target: BoxTarget, pool: BufferPool) -> None:
        """Read the blocks that have elements of ``inner``, a part of a stored box, and copy these elements.

        ``at`` is the stored box by its indices within the target.
        """
        size = stored.dtype.itemsize
        first, last = covering_range(stored.shape, inner)
        stops = (*stored.starts[1:], stored.nbytes)
        for index in range(bisect(stored.starts, first * size) - 1, bisect(stored.starts, last * size - 1)):
            start, stop = stored.starts[index], stops[index]
            parts = list(range_to_boxes(stored.shape, start // size, stop // size))
            spare = target.spare_bytes(stop - start)
            with pool.acquire(round_up(stop - start) + spare) as buffer:
                self._opened.blocks.read(stored, start, stop, buffer[: stop - start])
                begin = 0
                for part in parts:
                    shape = box_shape(part)
                    end = begin + prod(shape) * size
                    common = intersection(part, inner)
                    if common is not None:
                        data = words(buffer[begin:end], shape, size)[relative(common, part)]
                        target.put(_moved(common, at), data, buffer[round_up(stop - start) :])
                    begin = end


def _moved(box: Box, by: Box) -> Box:
    """Return a part of an array as a part of the one in which the array is at ``by``."""
    return tuple(slice(x.start + y.start, x.stop + y.start) for x, y in zip(box, by, strict=True))
