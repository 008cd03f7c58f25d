"""What a writer takes for one tensor, wherever its bytes lie."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tensorkeep.state.dtypes import DType

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional, contiguous array of bytes."""


class Source(Protocol):
    """A leaf in memory, or one stored in another checkpoint."""

    @property
    def name(self) -> str:
        """Its full dotted name."""

    @property
    def dtype(self) -> DType:
        """The element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its dimensions."""

    @property
    def nbytes(self) -> int:
        """Its raw bytes."""

    def host_bytes(self) -> Bytes | None:
        """Return the bytes without a copy when they lie in C order in host memory, else None."""

    def read(self, start: int, stop: int, out: Bytes) -> None:
        """Copy the bytes ``start:stop`` of the C-order stream; both are multiples of the item size."""
