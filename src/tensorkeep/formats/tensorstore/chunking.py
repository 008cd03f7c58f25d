"""Which shape the chunks of an array get: the two algorithms of the TensorStore world, and a length per dimension.

``halving`` halves the largest dimension until a chunk is small enough, whether or not it still divides the array (what
is left over at the edges is stored padded). ``divisors``, as in T5X, takes the next smaller divisor instead, so that no
chunk is padded; a prime dimension then goes from whole to 1 in one step.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tensorkeep.errors import UsageError
from tensorkeep.formats.tensorstore.divisors import divisors
from tensorkeep.units import parse_bytes

Shape = tuple[int, ...]

DEFAULT_CHUNK = "32MiB"


def halving(shape: Sequence[int], most_elements: int) -> Shape:
    """Return a chunk of at most so many elements (1 at least), by halving the first of the largest dimensions."""
    chunk = [max(1, length) for length in shape]
    while chunk and prod(chunk) > max(1, most_elements) and max(chunk) > 1:
        largest = chunk.index(max(chunk))
        chunk[largest] //= 2
    return tuple(chunk)


def dividing(shape: Sequence[int], most_elements: int) -> Shape:
    """Return a chunk of at most so many elements (1 at least), each length a divisor of the array's."""
    chunk = [max(1, length) for length in shape]
    while chunk and prod(chunk) > max(1, most_elements) and max(chunk) > 1:
        largest = chunk.index(max(chunk))
        known = divisors(max(1, shape[largest]))
        chunk[largest] = known[bisect_left(known, chunk[largest]) - 1]
    return tuple(chunk)


ALGORITHMS: dict[str, Callable[[Sequence[int], int], Shape]] = {"halving": halving, "divisors": dividing}


@dataclass(frozen=True, slots=True)
class Chunking:
    """How large chunks shall be.

    Attributes
    ----------
    elements : int or None
        At most so many elements a chunk.
    nbytes : int or None
        At most so many bytes of the stored dtype a chunk.
    side : int or None
        At most so many elements along each dimension. Where none of the three is given, an array is one chunk.
    algorithm : str
        ``"halving"`` or ``"divisors"``, for the first two.
    """

    elements: int | None = None
    nbytes: int | None = None
    side: int | None = None
    algorithm: str = "halving"

    @classmethod
    def parse(cls, chunk: object, algorithm: object) -> Chunking:
        """Return what the options ``chunk`` and ``chunking`` mean.

        Raises
        ------
        UsageError
            If one of them means nothing.
        """
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise UsageError(f"the option chunking is {algorithm!r}", remedy=f"choose one of: {', '.join(ALGORITHMS)}")
        if chunk is None:
            return cls(algorithm=algorithm)
        if isinstance(chunk, int) and not isinstance(chunk, bool) and chunk >= 1:
            return cls(elements=chunk, algorithm=algorithm)
        if isinstance(chunk, str) and re.fullmatch(r"[1-9]\d{0,17}", chunk):
            return cls(side=int(chunk), algorithm=algorithm)
        if isinstance(chunk, str) and (nbytes := parse_bytes(chunk)) >= 1:
            return cls(nbytes=nbytes, algorithm=algorithm)
        raise UsageError(
            f"the option chunk is {chunk!r}",
            remedy='give a number of elements (262144), a size ("64MiB"), a length for each dimension ("64"), or None',
        )

    def shape_of(self, shape: Sequence[int], itemsize: int) -> Shape:
        """Return the chunk of an array; no length of it is below 1 or, unless the array is empty, above the array's."""
        if self.side is not None:
            return tuple(max(1, min(self.side, length)) for length in shape)
        if self.elements is None and self.nbytes is None:
            return tuple(max(1, length) for length in shape)
        most = self.elements if self.elements is not None else (self.nbytes or 1) // itemsize
        return ALGORITHMS[self.algorithm](shape, most)


DEFAULT_CHUNKING = Chunking.parse(DEFAULT_CHUNK, "halving")
