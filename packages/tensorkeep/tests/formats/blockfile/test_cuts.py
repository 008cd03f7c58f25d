"""Cuts of boxes on the grid of the full tensor."""

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.formats.base import LEAST_BLOCK_BYTES
from tensorkeep.formats.blockfile.plan import RAW_GRID, Grid, TensorBox


def cuts_in_rows(offsets, sizes, whole, itemsize, grid_bytes) -> set[int]:
    """Return the rows of the full tensor at which the blocks of a box begin."""
    row = itemsize * math.prod(sizes[1:])
    return {
        offsets[0] + start // row
        for start in Grid(grid_bytes).block_starts(TensorBox(whole, offsets, sizes, itemsize))[1:]
    }


def test_boxes_of_different_ranks_are_cut_at_the_same_rows() -> None:
    whole, grid = (1000, 10), 640  # 16 rows of 4 bytes
    for ranks in (1, 2, 3, 7):
        step = -(-1000 // ranks)
        for start in range(0, 1000, step):
            sizes = min(step, 1000 - start), 10
            found = cuts_in_rows((start, 0), sizes, whole, 4, grid)
            assert found == {row for row in range(start + 1, start + sizes[0]) if row % 16 == 0}


def test_columns_are_cut_at_the_rows_of_the_full_tensor_and_a_long_row_within_the_row() -> None:
    assert cuts_in_rows((0, 5), (100, 5), (100, 10), 4, 640) == set(range(16, 100, 16))
    assert list(Grid(32).block_starts(TensorBox((3, 100), (1, 0), (2, 50), 1))) == [0, 32, 50, 82]
    # The starts of a box that lies on the grid need no list.
    assert isinstance(Grid(64).block_starts(TensorBox((10**12, 4), (0, 0), (10**12, 4), 4)), range)


@given(st.integers(0, 2**32))
def test_counts_and_starts_agree(seed: int) -> None:
    random = Random(seed)
    whole = tuple(random.randrange(1, 9) for _ in range(random.randrange(4)))
    offsets = tuple(random.randrange(length) for length in whole)
    sizes = tuple(random.randrange(1, length - at + 1) for length, at in zip(whole, offsets, strict=True))
    itemsize, grid = random.choice((1, 2, 4, 8, 16)), random.choice((16, 32, 128, 1024))
    starts = Grid(grid).block_starts(TensorBox(whole, offsets, sizes, itemsize))
    assert len(starts) == Grid(grid).block_count(TensorBox(whole, offsets, sizes, itemsize))
    stops = [*starts[1:], itemsize * math.prod(sizes)]
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    assert starts[0] == 0
    assert all(0 < length <= grid and length % itemsize == 0 for length in lengths)


def test_boxes_of_any_size_have_limits() -> None:
    # An impossible box takes no memory, and a block has at least one row.
    assert Grid(16).block_count(TensorBox((2**62, 3), (1, 0), (2**62 - 1, 3), 1)) > 2**58
    assert Grid(4096).rows_per_block((5, 10**9), 4) == 1
    assert Grid(4096).rows_per_block((5, 0), 4) == 4096
    for mib, expected in ((1, LEAST_BLOCK_BYTES), (20, 256 * 1024), (100, 1024**2), (5000, 4 * 1024**2)):
        assert RAW_GRID.bytes_between_cuts((mib, 1024**2), 1) == expected, mib
