"""The contract of a codec: it encodes one block, at most 64 MiB of a tensor's raw bytes, from many threads at once."""

from typing import Protocol

import numpy as np
import xxhash

from tensorkeep.plugins import Registry
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Bytes as Bytes  # part of the contract

# Bytes that are hashed right after they were copied, while they are still in the core's cache.
_HASH_BYTES = 1024**2


class HashedInput:
    """The raw bytes of a block that is coded; every byte is read once and hashed."""

    def __init__(self, copy_buffer: Bytes | None, *, wide: bool) -> None:
        # The state may change during a save. Every byte is therefore copied first, and the copy is hashed and coded:
        # the checksum always matches the stored bytes. None if nothing changes the block.
        self.copy_buffer = copy_buffer
        self._hasher = xxhash.xxh3_128() if wide else xxhash.xxh3_64()

    def read(self, piece: Bytes) -> Bytes:
        """Hash the next piece of the block and return its bytes, copied if other threads may change them."""
        if self.copy_buffer is None:
            self.hash(piece)
            return piece
        copy = self.copy_buffer[: piece.size]
        for at in range(0, piece.size, _HASH_BYTES):
            np.copyto(copy[at : at + _HASH_BYTES], piece[at : at + _HASH_BYTES])
            self.hash(copy[at : at + _HASH_BYTES])
        return copy

    def hash(self, piece: Bytes) -> None:
        """Hash the next piece of the block, which the codec has copied itself."""
        self._hasher.update(piece)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()


class CodecError(ValueError):
    """The codec cannot have written the stored bytes; readers raise CorruptCheckpointError from it."""


class Codec(Protocol):
    """A lossless transform of a block.

    Attributes
    ----------
    name : str
        Its name in manifests.

    Examples
    --------
    >>> from tensorkeep.state.dtypes import BY_NAME
    >>> codec, dtype = CODECS.get("zstd"), BY_NAME["uint8"]
    >>> raw = np.zeros(1000, np.uint8)
    >>> out = np.empty(codec.bound(raw.size), np.uint8)
    >>> length = codec.encode(raw, dtype, out)
    >>> decoded = np.empty_like(raw)
    >>> codec.decode(out[:length], dtype, decoded)
    >>> length < 30, np.array_equal(decoded, raw)
    (True, True)
    """

    name: str

    def bound(self, nbytes: int) -> int:
        """Return the most bytes that ``encode`` writes for a block of ``nbytes`` raw bytes."""

    def encode(self, raw: Bytes, dtype: DType, out: Bytes) -> int:
        """Write the coded block to the front of ``out`` and return its length.

        Parameters
        ----------
        raw : uint8 array, shape (n,)
            The block's bytes, in C order, little-endian; n is a multiple of ``dtype.itemsize``.
        dtype : DType
            The type of the elements; a hint for better compression, never needed for correctness.
        out : uint8 array, shape (m,), m >= bound(n)
            The caller's buffer; all of it may be overwritten.
        """

    def decode(self, stored: Bytes, dtype: DType, out: Bytes) -> None:
        """Fill ``out``, which has exactly the raw length, from a coded block.

        ``stored`` may be longer than the length that ``encode`` returned: zeros may follow.

        Raises
        ------
        CodecError
            If the bytes are damaged or would decode to another length. Damaged bytes cause no write outside ``out`` and
            no allocation of more than the raw length.
        """


def append(data: bytes, out: Bytes, start: int) -> int:
    """Copy ``data`` to ``out`` at ``start``; return its end there."""
    end = start + len(data)
    out[start:end] = np.frombuffer(data, np.uint8)
    return end


def check_padding(stored: Bytes, end: int) -> None:
    """Raises CodecError unless only zeros follow the ``end`` of a coded block."""
    if stored[end:].any():
        raise CodecError("bytes other than zeros follow the coded block")


# All codecs that are installed; an entry point of ``tensorkeep.codecs`` adds one.
CODECS: Registry[Codec] = Registry("codec")
