"""The codec ``planes``: byte planes, each raw or Huffman-coded. It shrinks trained weights at the speed of a disk.

A weight's exponent has few different values; its sign and mantissa are noise. So the elements are split into byte
planes (``bitplanes``). A plane that shrinks in a small sample is coded in Zstandard frames of 256 KiB. The frames are
only Huffman-coded (``coder``), or coded by Zstandard at level 1 if matching shrinks the sample 5% more. The other
planes are stored raw.

The block on disk, version 1
----------------------------
All integers are little-endian. Files with such blocks MUST load for ever. A block is a stream of Zstandard frames
(RFC 8878): ``zstd -d`` reads it and prints the coded planes::

    u32  magic 0x184D2A5A          a skippable frame: the header
    u32  length of what follows, to the first frame below
      u8   version = 1
      u8   layout: 0 = bytes as they are, 1 = exponent on the top plane (see ``bitplanes``)
      u8   width w of an element in bytes: 1, 2, 4 or 8; 2 or more with layout 1
      u8   zero
      u64  n, the raw length of the block, a multiple of w
      u8   mode of a plane, least significant first: 0 = raw, 1 = coded             (w times)
      u32  length of a Zstandard frame, in the order of the frames below            (coded planes x runs)
    u32  magic 0x184D2A5B          a skippable frame: the raw planes; absent without any
    u32  length = (raw planes) x n / w
      the raw planes, one after the other, least significant first
    the coded planes, as Zstandard frames: for each run of 262,144 elements (the last may be shorter), one frame for
    each coded plane, least significant first

The frames of a run are adjacent, so reading a slice of a tensor decodes only its runs. Each frame MUST declare its
content size, use no dictionary and a window of at most 256 KiB. Zeros MAY follow the block; a reader MUST refuse
anything else.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import zstandard

from tensorkeep.codecs import bitplanes
from tensorkeep.codecs.base import Bytes, CodecError, HashedInput, append, check_padding
from tensorkeep.codecs.coder import INSTALLED, RUN, PythonCoder
from tensorkeep.codecs.zstd import zstd_bound
from tensorkeep.state.dtypes import DType

VERSION = 1

_HEADER_MAGIC = 0x184D2A5A
_RAW_MAGIC = 0x184D2A5B
_SKIPPABLE = struct.Struct("<II")
_FIXED = struct.Struct("<BBBBQ")
_LENGTH = np.dtype("<u4")
_RAW, _CODED = 0, 1

# A plane's sample is so large that the table of Huffman codes is negligible and zstd finds matches.
_SAMPLE_PIECES = 4
_SAMPLE_PIECE = 4096
_SAMPLE_PIECE_MIN = 1024
_SAMPLE_DIVISOR = 64
_WORTH_CODING = 0.98
_WORTH_MATCHING = 0.95

_STORE, _HUFFMAN, _MATCH = range(3)


@dataclass(frozen=True, slots=True)
class PlaneModes:
    """The layout of a block and how to store each plane, least significant first."""

    layout: int
    planes: tuple[int, ...]

    @property
    def shrinks(self) -> bool:
        return any(self.planes)


class PlanesCodec:
    name = "planes"

    def __init__(self, coder: type[PythonCoder] = INSTALLED) -> None:
        self._threads = _Threads(coder)

    def bound(self, nbytes: int) -> int:
        # Every plane has at least one frame, however short the block is.
        frames = nbytes // RUN + max(bitplanes.WIDTHS)
        header = 2 * _SKIPPABLE.size + _FIXED.size + max(bitplanes.WIDTHS)
        return header + nbytes + nbytes // 256 + frames * (_LENGTH.itemsize + zstd_bound(0))

    def plan(self, raw: Bytes, dtype: DType) -> PlaneModes:
        layout, width = _layout(raw.size, dtype)
        sample = _sample(bitplanes.as_words(raw, width))
        planes = [np.empty(sample.size, np.uint8) for _ in range(width)]
        self._threads.coder.split(sample, planes, layout)
        return PlaneModes(layout, tuple(self._threads.choose(plane) for plane in planes))

    def encode(
        self, raw: Bytes, dtype: DType, out: Bytes, *, plan: PlaneModes | None = None, data: HashedInput | None = None
    ) -> int:
        """Encode as every codec does; ``data`` hashes every run while it is in the core's cache."""
        plan = plan or self.plan(raw, dtype)
        coder, matcher, planes_of = self._threads.coder, self._threads.matcher, self._threads.planes
        words = bitplanes.as_words(raw, len(plan.planes))
        # Raw planes are split directly into their place in `out`; only coded ones need a temporary.
        header = _Header(plan.layout, raw.size, tuple(_RAW if method == _STORE else _CODED for method in plan.planes))
        raw_planes = header.raw_planes(out)
        lengths: list[int] = []
        end = header.frames_start
        for start in range(0, words.size, RUN):
            run = words[start : start + RUN]
            planes = planes_of(raw_planes, start, run.size)
            copy = None
            # Other threads may change the block: what is hashed must be what is coded, so both read the copy.
            if data and data.copy_buffer is not None:
                copy = bitplanes.as_words(data.copy_buffer[: run.nbytes], words.itemsize)
            coder.split(run, planes, plan.layout, copy)
            if data:
                data.hash((run if copy is None else copy).view(np.uint8))
            for number, method in enumerate(plan.planes):
                if method == _STORE:
                    continue
                if method == _HUFFMAN:
                    length = coder.encode(number, planes[number], out[end:], first=start == 0)
                else:
                    length = append(matcher.compress(planes[number].data), out[end:], 0)
                lengths.append(length)
                end += length
        # Written last: only now are the lengths of the frames known.
        header.write(out, lengths)
        return end

    def decode(
        self,
        stored: Bytes,
        dtype: DType,
        out: Bytes,
        *,
        done: Callable[[Bytes], object] | None = None,
        xor: bool = False,
    ) -> None:
        """``done`` gets every run while it is in the cache; with ``xor``, bytes are XORed into ``out``."""
        # All lengths are checked before anything is decoded.
        header, frames = _read(stored, out.size)
        coder = self._threads.coder
        # Run by run, so that planes and words stay in the core's cache.
        words = bitplanes.as_words(out, header.width)
        raw_planes = header.raw_planes(stored)
        for start in range(0, words.size, RUN):
            run = words[start : start + RUN]
            planes = [
                coder.decode(number, next(frames), run.size) if plane is None else plane[start : start + RUN]
                for number, plane in enumerate(raw_planes)
            ]
            coder.merge(planes, run, header.layout, xor=xor)
            if done:
                done(run.view(np.uint8))


# Coders and Zstandard's contexts are not safe to share between threads, and costly to make for every block.
class _Threads(threading.local):
    def __init__(self, coder: type[PythonCoder]) -> None:
        self.coder = coder()
        # A window of 256 KiB: the format allows no more.
        self.matcher = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(1, window_log=18)
        )
        self._memory: dict[int, Bytes] = {}

    def planes(self, raw_planes: list[Bytes | None], start: int, count: int) -> list[Bytes]:
        """Where the planes of a run go: raw planes to their place in the block, the others to temporaries."""
        for number, plane in enumerate(raw_planes):
            if plane is None and number not in self._memory:
                self._memory[number] = np.empty(RUN, np.uint8)
        return [
            self._memory[number][:count] if plane is None else plane[start : start + count]
            for number, plane in enumerate(raw_planes)
        ]

    def choose(self, sample: Bytes) -> int:
        huffman = self.coder.coded_size(sample)
        matching = len(self.matcher.compress(sample.data))
        # A small gain is not worth the time to decode.
        if min(huffman, matching) >= _WORTH_CODING * sample.size:
            return _STORE
        return _MATCH if matching < _WORTH_MATCHING * huffman else _HUFFMAN


class _Header:
    def __init__(self, layout: int, nbytes: int, modes: tuple[int, ...]) -> None:
        self.layout = layout
        self.nbytes = nbytes
        self.modes = modes
        self.width = len(modes)
        self.count = nbytes // self.width
        self.raw_bytes = modes.count(_RAW) * self.count
        frames = modes.count(_CODED) * -(-self.count // RUN)
        self.lengths_start = _SKIPPABLE.size + _FIXED.size + self.width
        self.raw_start = self.lengths_start + frames * _LENGTH.itemsize
        self.frames_start = self.raw_start + (_SKIPPABLE.size if _RAW in modes else 0) + self.raw_bytes

    def raw_planes(self, block: Bytes) -> list[Bytes | None]:
        planes: list[Bytes | None] = []
        start = self.raw_start + _SKIPPABLE.size
        for mode in self.modes:
            planes.append(block[start : start + self.count] if mode == _RAW else None)
            start += self.count if mode == _RAW else 0
        return planes

    def write(self, block: Bytes, lengths: list[int]) -> None:
        fixed = _FIXED.pack(VERSION, self.layout, self.width, 0, self.nbytes) + bytes(self.modes)
        payload = fixed + np.array(lengths, _LENGTH).tobytes()
        end = append(_SKIPPABLE.pack(_HEADER_MAGIC, len(payload)) + payload, block, 0)
        if _RAW in self.modes:
            append(_SKIPPABLE.pack(_RAW_MAGIC, self.raw_bytes), block, end)


def _layout(nbytes: int, dtype: DType) -> tuple[int, int]:
    # Real and imaginary parts are numbers of their own.
    width = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    if width not in bitplanes.WIDTHS or nbytes % width:
        return bitplanes.BYTES, 1
    # float16's exponent is within its top byte already.
    return (bitplanes.EXPONENT if width > 1 and dtype.exponent_bits >= 8 else bitplanes.BYTES), width


def _sample(words: bitplanes.Words) -> bitplanes.Words:
    piece = min(max(words.size // _SAMPLE_DIVISOR // _SAMPLE_PIECES, _SAMPLE_PIECE_MIN), _SAMPLE_PIECE)
    if words.size <= piece * _SAMPLE_PIECES:
        return words
    # Spread over the block: its first rows may be of another kind than the rest.
    starts = np.linspace(0, words.size - piece, _SAMPLE_PIECES).astype(int)
    return np.concatenate([words[start : start + piece] for start in starts])


def _read(stored: Bytes, nbytes: int) -> tuple[_Header, Iterator[Bytes]]:
    """The header of a block that must decode to ``nbytes``, and the frames, all within bounds. Raises CodecError."""
    header = _read_header(stored, nbytes)
    lengths = stored[header.lengths_start : header.raw_start].view(_LENGTH)
    # In 64 bits: damaged lengths must not wrap around to a plausible end.
    ends = header.frames_start + np.cumsum(lengths, dtype=np.int64)
    end = int(ends[-1]) if ends.size else header.frames_start
    if end > stored.size:
        raise CodecError(f"{stored.size} bytes are stored where the frames need {end}")
    check_padding(stored, end)
    starts = (ends - lengths).tolist()
    return header, (stored[start:stop] for start, stop in zip(starts, ends.tolist(), strict=True))


def _read_header(stored: Bytes, nbytes: int) -> _Header:
    start = _SKIPPABLE.size + _FIXED.size
    if stored.size < start:
        raise CodecError(f"{stored.size} bytes cannot hold a header")
    magic, length = _SKIPPABLE.unpack_from(stored.data)
    version, layout, width, reserved, declared = _FIXED.unpack_from(stored.data, _SKIPPABLE.size)
    if magic != _HEADER_MAGIC or reserved:
        raise CodecError("not a block of byte planes")
    if version != VERSION:
        raise CodecError(f"version {version} of the byte planes; this reader supports version {VERSION}")
    if width not in bitplanes.LAYOUT_WIDTHS.get(layout, ()):
        raise CodecError(f"unknown layout {layout} of elements of {width} bytes")
    if declared != nbytes or nbytes % width:
        # The raw length comes from the manifest; a block may not decode to anything else.
        raise CodecError(f"decodes to {declared} bytes in elements of {width}, the block has {nbytes}")
    modes = tuple(stored[start : start + width].tolist())
    if len(modes) != width or not set(modes) <= {_RAW, _CODED}:
        raise CodecError("a plane is neither raw nor coded")
    header = _Header(layout, nbytes, modes)
    if length != header.raw_start - _SKIPPABLE.size or stored.size < header.frames_start:
        raise CodecError("the header and the stored length do not agree")
    if _RAW in modes and _SKIPPABLE.unpack_from(stored.data, header.raw_start) != (_RAW_MAGIC, header.raw_bytes):
        raise CodecError("the raw planes are not at the place that the header gives")
    return header


CODEC = PlanesCodec()
