"""One standard Zstandard frame (RFC 8878), for blocks with repetitions."""

import threading

import zstandard

from tensorkeep.codecs.base import Bytes, Codec, CodecError, append, check_padding
from tensorkeep.state.dtypes import DType

_LEVEL = 1
# A larger window costs memory in every reading thread, and finds next to nothing more in a block of 16 MiB.
_MAX_WINDOW_LOG = 24
# Level 1's own table (2**14) forgets a row of an embedding long before the row is repeated.
_HASH_LOG = 17
_BLOCK_HEADER = 3
_RLE_BLOCK, _RESERVED_BLOCK = 1, 3


class ZstdCodec:
    name = "zstd"

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def bound(self, nbytes: int) -> int:
        return zstd_bound(nbytes)

    def encode(self, raw: Bytes, dtype: DType, out: Bytes) -> int:
        return append(self._contexts.compressor(raw.size).compress(raw.data), out, 0)

    def decode(self, stored: Bytes, dtype: DType, out: Bytes) -> None:
        # The window and the content size come from the file: both are limited before memory is allocated.
        check_frame(stored, out.size, window=1 << _MAX_WINDOW_LOG)
        length = _frame_length(stored)
        check_padding(stored, length)
        try:
            # Into `out` without a copy: zstd decodes in one pass if it has the whole frame and space for its content.
            with self._contexts.decompressor.stream_reader(stored[:length].data) as reader:
                filled = reader.readinto(out) if out.size else 0
        except zstandard.ZstdError as error:
            raise CodecError(f"a damaged Zstandard frame: {error}") from None
        if filled != out.size:
            raise CodecError(f"decodes to {filled} bytes, the block has {out.size}")


class _Contexts(threading.local):
    # Threads must not share contexts, and creating one takes longer than coding a small block.
    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _MAX_WINDOW_LOG)
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}

    def compressor(self, nbytes: int) -> zstandard.ZstdCompressor:
        # A window over the whole block finds rows that repeat far apart; a larger one would only cost memory.
        window_log = min(max(nbytes.bit_length(), zstandard.WINDOWLOG_MIN), _MAX_WINDOW_LOG)
        if window_log not in self._compressors:
            parameters = zstandard.ZstdCompressionParameters.from_level(
                _LEVEL, window_log=window_log, hash_log=min(_HASH_LOG, window_log)
            )
            self._compressors[window_log] = zstandard.ZstdCompressor(compression_params=parameters)
        return self._compressors[window_log]


def zstd_bound(nbytes: int) -> int:
    """The maximum size of a frame for ``nbytes`` (``ZSTD_COMPRESSBOUND``, rounded up)."""
    return nbytes + nbytes // 256 + 64


def check_frame(frame: Bytes, content: int, *, window: int) -> None:
    """Check a frame's header before anything is decoded or allocated: content size, dictionary and window."""
    # A skippable frame declares a length as well, but decodes to nothing.
    if frame[: len(zstandard.FRAME_HEADER)].tobytes() != zstandard.FRAME_HEADER:
        raise CodecError("not a Zstandard frame")
    try:
        header = zstandard.get_frame_parameters(frame.data)
    except zstandard.ZstdError as error:
        raise CodecError(f"a damaged Zstandard frame: {error}") from None
    if header.content_size != content:
        raise CodecError(f"a frame claims another length than the {content} bytes expected")
    if header.dict_id:
        raise CodecError("a frame needs a dictionary")
    if header.window_size > max(window, content):
        raise CodecError(f"a frame needs a window of {header.window_size} bytes")


def _frame_length(stored: Bytes) -> int:
    """The end of the frame; the header must have been checked. Raises CodecError if the frame is cut short."""
    # The library does not say where a frame ended in its input. So the headers of the blocks are followed.
    end = zstandard.frame_header_size(stored.data)
    while True:
        if end + _BLOCK_HEADER > stored.size:
            raise CodecError("a Zstandard frame is cut short")
        header = int.from_bytes(stored[end : end + _BLOCK_HEADER].tobytes(), "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED_BLOCK:
            raise CodecError("a Zstandard block of a kind that does not exist")
        # An RLE block stores one byte, whatever its size.
        end += _BLOCK_HEADER + (1 if kind == _RLE_BLOCK else size)
        if last:
            break
    if zstandard.get_frame_parameters(stored.data).has_checksum:
        end += 4
    if end > stored.size:
        raise CodecError("a Zstandard frame is cut short")
    return end


CODEC: Codec = ZstdCodec()
