"""One standard gzip member (RFC 1952), for readers that have nothing newer than zlib."""

from __future__ import annotations

import zlib

import numpy as np

from tensorkeep.codecs.base import Bytes, Codec, CodecError
from tensorkeep.state.dtypes import DType

_GZIP_WINDOW = 31  # 15 bits of window, and 16 to ask zlib for gzip's header: no name, time zero
_INPUT_PIECE = 64 << 10


class GzipCodec:
    """zlib's deflate in gzip's header.

    Parameters
    ----------
    level : int
        zlib's, 1 (fast) to 9.
    """

    name = "gzip"

    def __init__(self, level: int = 1) -> None:
        self._level = level

    def bound(self, nbytes: int) -> int:
        # zlib-ng's fastest level may spend nine bits on a byte that it cannot shrink.
        return nbytes + nbytes // 8 + 64

    def encode(self, raw: Bytes, dtype: DType, out: Bytes) -> int:
        deflate = zlib.compressobj(self._level, zlib.DEFLATED, _GZIP_WINDOW)
        length = 0
        for piece in (deflate.compress(raw.data), deflate.flush()):
            out[length : length + len(piece)] = np.frombuffer(piece, np.uint8)
            length += len(piece)
        return length

    def decode(self, stored: Bytes, dtype: DType, out: Bytes) -> None:
        inflate = zlib.decompressobj(_GZIP_WINDOW)
        filled = 0
        for start in range(0, stored.size, _INPUT_PIECE):
            # One byte more than is wanted shows a block that is too long, and bounds what a bomb can unpack.
            room = out.size - filled + 1
            try:
                piece = inflate.decompress(stored[start : start + _INPUT_PIECE].data, room)
            except zlib.error as error:
                raise CodecError(f"not a gzip member: {error}") from None
            if len(piece) == room:
                raise CodecError(f"decodes to more than the {out.size} bytes of the block")
            out[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
            if inflate.eof:
                break
        if not inflate.eof or filled != out.size:
            raise CodecError(f"decodes to {filled} bytes, the block has {out.size}")
        if inflate.unused_data.strip(b"\0") or stored[start + _INPUT_PIECE :].any():
            raise CodecError("something other than zeros follows the gzip member")


CODEC: Codec = GzipCodec()
