"""The base of an incremental save by many ranks: blocks are found again by the elements that they cover.

So the base may have been saved by another number of ranks, as far as its boxes have the same columns: boxes are cut at
the same rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

from tensorkeep.formats.base import OpenSettings, box_of, intersection
from tensorkeep.formats.blockfile.plan import Block, Grid, block_starts
from tensorkeep.formats.native.pieces.records import BoxRecord, Root
from tensorkeep.formats.native.previous import NARROW_DIGESTS, Located, PreviousCheckpoint
from tensorkeep.formats.native.records import WIDE_DIGESTS, BaseRecord, PlaceRecord
from tensorkeep.state.sharded import Piece

Cell = tuple[str, str, int, int, int, tuple[int, ...], tuple[int, ...]]
"""What a block covers: tensor, dtype, row, first byte in the row, bytes, and the columns: their offsets and sizes."""


class PreviousPieces(PreviousCheckpoint):
    """An open earlier checkpoint of many ranks; see `PreviousCheckpoint`. ``pieces`` are the boxes to be saved."""

    def __init__(self, path: Path, settings: OpenSettings, *, delta: bool, pieces: Sequence[Piece], grid: Grid) -> None:
        self._pieces = pieces
        self._grid = grid
        self._cells: dict[Cell, Located] = {}
        super().__init__(path, settings, delta=delta)

    def _index(self) -> str | None:
        if not isinstance(self._opened.manifest, Root):
            return "one process saved it, in other blocks than many ranks do"
        fragments = self._opened.fragments
        if any(WIDE_DIGESTS not in fragment.features for fragment in fragments):
            return NARROW_DIGESTS
        if any(fragment.grid != self._grid for fragment in fragments):
            return "its tensors are cut in other places, as those of another compression are"
        records = {leaf.name: leaf for leaf in self._opened.manifest.leaves}
        wanted: dict[str, list[Piece]] = defaultdict(list)
        for piece in self._pieces:
            record = records.get(piece.name)
            if record is not None and (record.dtype, record.shape) == (piece.dtype.name, piece.whole):
                wanted[piece.name].append(piece)
        for name, pieces in wanted.items():
            boxes = [box_of(piece.offsets, piece.shape) for piece in pieces]
            for rank, record_of_box in self._opened.boxes[name]:
                box = box_of(record_of_box.offsets, record_of_box.sizes)
                if any(intersection(box, own) is not None for own in boxes):
                    self._add(pieces[0], rank, record_of_box)
        return None

    def _add(self, piece: Piece, rank: int, box: BoxRecord) -> None:
        """Index the blocks of one box of the tensor of a piece, with the file numbers of all fragments together."""
        numbers = self._opened.numbers[rank]
        starts = block_starts(piece.whole, box.offsets, box.sizes, piece.dtype.itemsize, self._grid)
        nbytes = prod(box.sizes) * piece.dtype.itemsize
        for (block, place), start, stop in zip(box.located(), starts, (*starts[1:], nbytes), strict=True):
            bases = [BaseRecord(b.codec, b.length, b.raw, b.stored, numbers[b.file], b.offset) for b in place.bases]
            cell = _cell(piece.name, piece.dtype.name, box.offsets, box.sizes, nbytes, start, stop)
            self._cells[cell] = block, PlaceRecord(numbers[place.file], place.offset, bases, place.age)

    def _located(self) -> Iterator[Located]:
        yield from self._cells.values()

    def _live_bytes(self) -> dict[int, int]:
        live: dict[int, int] = defaultdict(int)
        for numbers, fragment in zip(self._opened.numbers, self._opened.fragments, strict=True):
            for box in fragment.boxes:
                for file, _, length in box.ranges():
                    live[numbers[file]] += length
        return live

    def _lookup(self, block: Block) -> Located | None:
        piece = block.leaf.source
        assert isinstance(piece, Piece)
        cell = _cell(piece.name, piece.dtype.name, piece.offsets, piece.shape, piece.nbytes, block.start, block.stop)
        return self._cells.get(cell)


def _cell(
    name: str, dtype: str, offsets: tuple[int, ...], sizes: tuple[int, ...], nbytes: int, start: int, stop: int
) -> Cell:
    """Return what a block of a box covers; ``nbytes`` are those of the box, and the block is ``start:stop`` of them."""
    row = nbytes // sizes[0] if sizes else nbytes
    first = offsets[0] if offsets else 0
    return name, dtype, first + start // row, start % row, stop - start, offsets[1:], sizes[1:]
