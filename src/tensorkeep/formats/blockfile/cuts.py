"""Where the boxes of tensors that many ranks write together are cut into blocks.

The cuts lie on one grid of rows of the full tensor, so that a box saved by another number of ranks is cut in the same
places. A rank that reads other rows than were written reads at most two blocks more of each box.
"""

from collections.abc import Sequence
from math import prod

GRID_BYTES = 4 * 1024**2
"""Raw bytes of the full tensor between two cuts; a multiple of every item size."""


def rows_per_block(whole: Sequence[int], itemsize: int, grid_bytes: int) -> int:
    """Return the number of rows, the indices of dimension 0, between two cuts of a tensor of this shape.

    Examples
    --------
    >>> rows_per_block((1000, 4096), 2, 4 * 1024**2)
    512
    """
    return max(1, grid_bytes // max(1, prod(whole[1:]) * itemsize))


def block_starts(
    whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int, grid_bytes: int
) -> Sequence[int]:
    """Return the first byte of each block of a box, in the box's own C-order stream.

    A box is cut where the index of its row in the full tensor is a multiple of `rows_per_block`. If one of its rows has
    more than ``grid_bytes``, each row is cut separately, every ``grid_bytes``.

    Examples
    --------
    >>> list(block_starts((100, 4), (30, 0), (40, 4), itemsize=1, grid_bytes=80))
    [0, 40, 120]
    """
    later = _starts_after_first(whole, offsets, sizes, itemsize, grid_bytes)
    if isinstance(later, range):
        return later if not later.start else (0, *later)
    rows, cuts = later
    return [row + cut for row in rows for cut in cuts]


def block_count(
    whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int, grid_bytes: int
) -> int:
    """Return the number of blocks of a box, without listing them: its sizes may come from a damaged file."""
    later = _starts_after_first(whole, offsets, sizes, itemsize, grid_bytes)
    if isinstance(later, range):
        return len(later) + (later.start > 0)
    rows, cuts = later
    return len(rows) * len(cuts)


def _starts_after_first(
    whole: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], itemsize: int, grid_bytes: int
) -> range | tuple[range, range]:
    """Return the starts on the grid, which may lack the first block; or those of rows, and those within each row."""
    nbytes = prod(sizes) * itemsize
    if not sizes or not nbytes:
        return range(0, nbytes, max(1, nbytes))
    row = nbytes // sizes[0]
    if row > grid_bytes:
        return range(0, nbytes, row), range(0, row, grid_bytes)
    rows = rows_per_block(whole, itemsize, grid_bytes)
    return range(-offsets[0] % rows * row, nbytes, rows * row)
