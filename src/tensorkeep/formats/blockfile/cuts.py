"""Where the boxes of tensors that many ranks write together are cut into blocks.

The cuts lie on one grid of rows of the full tensor, so that a box saved by another number of ranks is cut in the same
places. A rank that reads other rows than were written reads at most two blocks more of each box.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

LEAST_BYTES = 128 * 1024
"""The least bytes between two cuts of a tensor that is cut into parts; a power of two."""


class Grid(NamedTuple):
    """How finely tensors are cut: about every ``most_bytes`` of raw bytes, or into ``parts`` parts if that is finer.

    A tensor is not cut into parts of less than 128 KiB.
    """

    most_bytes: int
    parts: int = 1


RAW_GRID = Grid(4 * 1024**2, parts=128)
"""A rank that reads one of eight shards of a tensor reads little more than its own bytes."""

CODED_GRID = Grid(4 * 1024**2)
"""Smaller blocks take twice the time to code."""


def rows_per_block(whole: Sequence[int], itemsize: int, grid: Grid) -> int:
    """Return the number of rows, the indices of dimension 0, between two cuts of a tensor of this shape.

    They have as many bytes as `bytes_between_cuts`, or less; at least one row.

    Examples
    --------
    >>> rows_per_block((100_000, 4096), 2, RAW_GRID)
    512
    """
    return max(1, bytes_between_cuts(whole, itemsize, grid) // max(1, prod(whole[1:]) * itemsize))


def bytes_between_cuts(whole: Sequence[int], itemsize: int, grid: Grid) -> int:
    """Return the bytes of a tensor of this shape between two cuts.

    Examples
    --------
    >>> bytes_between_cuts((3200, 8640), 2, RAW_GRID)
    524288
    """
    part = -(-prod(whole) * itemsize // grid.parts)
    return min(grid.most_bytes, max(LEAST_BYTES, 1 << max(0, part - 1).bit_length()))


def block_starts(
    whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int, grid: Grid
) -> Sequence[int]:
    """Return the first byte of each block of a box, in the box's own C-order stream.

    A box is cut where the index of its row in the full tensor is a multiple of `rows_per_block`. If one of its rows has
    more than `bytes_between_cuts`, each row is cut separately, every so many bytes.

    Examples
    --------
    >>> list(block_starts((100, 4), (30, 0), (40, 4), itemsize=1, grid=Grid(80)))
    [0, 40, 120]
    """
    later = _starts_after_first(whole, offsets, sizes, itemsize, grid)
    if isinstance(later, range):
        return later if not later.start else (0, *later)
    rows, cuts = later
    return [row + cut for row in rows for cut in cuts]


def block_count(whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int, grid: Grid) -> int:
    """Return the number of blocks of a box, without listing them: its sizes may come from a damaged file."""
    later = _starts_after_first(whole, offsets, sizes, itemsize, grid)
    if isinstance(later, range):
        return len(later) + (later.start > 0)
    rows, cuts = later
    return len(rows) * len(cuts)


def _starts_after_first(
    whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int, grid: Grid
) -> range | tuple[range, range]:
    """Return the starts on the grid, which may lack the first block; or those of rows, and those within each row."""
    nbytes = prod(sizes) * itemsize
    if not sizes or not nbytes:
        return range(0, nbytes, max(1, nbytes))
    row = nbytes // sizes[0]
    step = bytes_between_cuts(whole, itemsize, grid)
    if row > step:
        return range(0, nbytes, row), range(0, row, step)
    rows = rows_per_block(whole, itemsize, grid)
    return range(-offsets[0] % rows * row, nbytes, rows * row)
