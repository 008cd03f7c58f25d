"""The contract of a codec: bytes to bytes, lossless, one block at a time.

A codec sees one block (at most 64 MiB of one tensor's raw bytes) and is called from many threads at once. Its exam is
``tensorkeep.testing.codec_suite.CodecSuite``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from tensorkeep.plugins import Registry

if TYPE_CHECKING:
    from tensorkeep.state.dtypes import DType

Bytes = npt.NDArray[np.uint8]
"""A one-dimensional, contiguous array of bytes."""


class CodecError(ValueError):
    """Stored bytes that the codec cannot have written; the reader turns it into ``CorruptCheckpointError``."""


class Codec(Protocol):
    """A lossless transform of a block.

    Attributes
    ----------
    name : str
        What manifests call it.
    """

    name: str

    def bound(self, nbytes: int) -> int:
        """Return the most bytes that ``encode`` writes for a block of that many raw bytes."""

    def encode(self, raw: Bytes, dtype: DType, out: Bytes) -> int:
        """Write the coded block to the front of ``out`` and return its length.

        Parameters
        ----------
        raw : uint8 array, shape (n,)
            The block's bytes, in C order, little-endian; n is a multiple of ``dtype.itemsize``.
        dtype : DType
            What the bytes are; a hint to shrink them better, never needed to be right for correctness.
        out : uint8 array, shape (m,), m >= bound(n)
            Scratch that the caller owns.
        """

    def decode(self, stored: Bytes, dtype: DType, out: Bytes) -> None:
        """Fill ``out``, which has exactly the raw length, from a coded block.

        ``stored`` may be longer than what ``encode`` returned: zeros may follow.

        Raises
        ------
        CodecError
            If the bytes are damaged or would decode to another length. Never writes outside ``out`` and never
            allocates more than the raw length, whatever the bytes claim.
        """


CODECS: Registry[Codec] = Registry("codec")
"""All codecs that are installed; an entry point of ``tensorkeep.codecs`` adds one."""
