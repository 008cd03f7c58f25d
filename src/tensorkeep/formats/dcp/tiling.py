"""Check that the chunks of a sharded tensor cover it, each element once."""

from collections.abc import Sequence
from math import prod

import numpy as np

from tensorkeep.formats.boxes import Box, box_shape

_MAX_CHUNKS = 8192
"""Of a tensor that is sharded in several dimensions: every pair of chunks is compared."""


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that boxes cover an array without overlap.

    Raises ValueError if they do not, or if more than 8192 chunks are cut in several dimensions.

    Examples
    --------
    >>> check_tiling((4,), [(slice(0, 2),), (slice(2, 4),)])
    >>> check_tiling((4,), [(slice(0, 3),), (slice(2, 4),)])
    Traceback (most recent call last):
        ...
    ValueError: the chunks overlap
    """
    for box in boxes:
        if len(box) != len(shape):
            raise ValueError("a chunk has another number of dimensions")
        if any(side.stop > length for side, length in zip(box, shape, strict=True)):
            start = [side.start for side in box]
            raise ValueError(f"a chunk of shape {list(box_shape(box))} at {start} reaches beyond {list(shape)}")
    full = [box for box in boxes if 0 not in box_shape(box)]
    count = sum(prod(box_shape(box)) for box in full)
    if count < prod(shape):
        raise ValueError(f"the chunks hold {count:,} of {prod(shape):,} elements")
    # Chunks inside the array that hold as many elements as it has cover it if and only if no two overlap.
    if count > prod(shape) or _overlap(full):
        raise ValueError("the chunks overlap")


def _overlap(boxes: Sequence[Box]) -> bool:
    if len(boxes) < 2:
        return False
    starts = np.array([[side.start for side in box] for box in boxes], np.int64)
    stops = np.array([[side.stop for side in box] for box in boxes], np.int64)
    cut = [axis for axis in range(starts.shape[1]) if (starts[:, axis] != starts[0, axis]).any()]
    if len(cut) == 1:
        order = np.argsort(starts[:, cut[0]])
        return bool((stops[order[:-1], cut[0]] > starts[order[1:], cut[0]]).any())
    if len(boxes) > _MAX_CHUNKS:
        raise ValueError(f"{len(boxes):,} chunks in several dimensions are too many to check")
    return any(
        bool(((starts[i + 1 :] < stops[i]) & (starts[i] < stops[i + 1 :])).all(axis=1).any())
        for i in range(len(boxes) - 1)
    )
