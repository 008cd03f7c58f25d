"""The chunk shape of an array: a limit on its size, and two algorithms that choose it.

``halving`` halves the largest dimension until a chunk is small enough, whether or not the result divides the array;
chunks at the edges are then padded. ``divisors``, as in T5X, takes the next smaller divisor of the dimension instead,
so that no chunk is padded; a dimension of prime length goes from full to 1 in one step.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isqrt, prod
from typing import Literal

from tensorkeep.errors import UsageError
from tensorkeep.units import parse_bytes

Shape = tuple[int, ...]
Algorithm = Literal["halving", "divisors"]


def chunk_shape(shape: Sequence[int], itemsize: int, chunk: int | str | None, algorithm: Algorithm) -> Shape:
    """Return the shape of an array's chunks; no length is below 1, nor above the array's unless the array is empty.

    ``chunk`` is as in `ArrayOptions`: elements or bytes per chunk, limits that the algorithm observes, or a length
    along each dimension, or None for one chunk. Raises UsageError for any other value.

    Examples
    --------
    >>> chunk_shape((32000, 3200), 4, "64MiB", "halving")
    (4000, 3200)
    >>> chunk_shape((32000, 3), 4, "64", "halving")
    (64, 3)
    """
    full = tuple(max(1, length) for length in shape)
    if chunk is None:
        return full
    if isinstance(chunk, str) and re.fullmatch(r"[1-9]\d{0,17}", chunk):
        return tuple(min(int(chunk), length) for length in full)
    try:
        limit = parse_bytes(chunk)
    except UsageError:
        limit = 0
    if limit < 1:
        raise UsageError(
            f"the option chunk is {chunk!r}",
            remedy='give a number of elements (262144), a size ("64MiB"), a length for each dimension ("64"), or None',
        )
    # Divisors are found by trial division, and an empty array may have a dimension of any length.
    shrink = divide if algorithm == "divisors" and 0 not in shape else halve
    return shrink(full, limit if isinstance(chunk, int) else limit // itemsize)


def halve(shape: Sequence[int], max_elements: int) -> Shape:
    """Return a chunk of at most so many elements, at least 1, by halving the first of the largest dimensions."""
    return _shrink(shape, max_elements, lambda length, _: length // 2)


def divide(shape: Sequence[int], max_elements: int) -> Shape:
    """Return a chunk of at most so many elements, at least 1, with lengths that divide the array's."""
    return _shrink(
        shape, max_elements, lambda length, axis: max(each for each in divisors(shape[axis]) if each < length)
    )


def _shrink(shape: Sequence[int], max_elements: int, smaller: Callable[[int, int], int]) -> Shape:
    chunk = list(shape)
    while chunk and prod(chunk) > max(1, max_elements) and max(chunk) > 1:
        axis = chunk.index(max(chunk))
        chunk[axis] = smaller(chunk[axis], axis)
    return tuple(chunk)


@lru_cache(maxsize=256)
def divisors(number: int) -> list[int]:
    """Return every divisor of a positive number, ascending.

    Examples
    --------
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
