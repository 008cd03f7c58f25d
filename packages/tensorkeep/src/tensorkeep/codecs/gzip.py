"""One standard gzip member (RFC 1952), for readers that have only zlib."""

import zlib

from tensorkeep.codecs.base import Bytes, Codec, CodecError, append, check_padding
from tensorkeep.state.dtypes import DType

# The fastest level: blocks are compressed while others are written.
_LEVEL = 1
_GZIP_WINDOW = 31  # 15 bits of window, and 16 for a gzip header: no name, time zero
# The input is given in pieces, so that the decoded bytes are copied to the block in small parts.
_INPUT_PIECE = 64 << 10


class GzipCodec:
    name = "gzip"

    def bound(self, nbytes: int) -> int:
        # zlib-ng's fastest level may write nine bits for an incompressible byte.
        return nbytes + nbytes // 8 + 64

    def encode(self, raw: Bytes, dtype: DType, out: Bytes) -> int:
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
        length = append(deflate.compress(raw.data), out, 0)
        return append(deflate.flush(), out, length)

    def decode(self, stored: Bytes, dtype: DType, out: Bytes) -> None:
        inflate = zlib.decompressobj(_GZIP_WINDOW)
        filled = 0
        for start in range(0, stored.size, _INPUT_PIECE):
            # One byte more than needed reveals a block that is too long, and bounds the output of a zip bomb.
            limit = out.size - filled + 1
            try:
                piece = inflate.decompress(stored[start : start + _INPUT_PIECE].data, limit)
            except zlib.error as error:
                raise CodecError(f"not a gzip member: {error}") from None
            if len(piece) == limit:
                raise CodecError(f"decodes to more than the {out.size} bytes of the block")
            filled = append(piece, out, filled)
            if inflate.eof:
                check_padding(stored, min(start + _INPUT_PIECE, stored.size) - len(inflate.unused_data))
                break
        if not inflate.eof or filled != out.size:
            raise CodecError(f"decodes to {filled} bytes, the block has {out.size}")


CODEC: Codec = GzipCodec()
