"""The planes codec: its layout on disk as literal bytes, and the damage that it refuses."""

import io
import struct
from itertools import product

import numpy as np
import pytest
import zstandard

from tensorkeep.codecs import bitplanes
from tensorkeep.codecs.base import Bytes, CodecError
from tensorkeep.codecs.coder import RUN
from tensorkeep.codecs.planes import CODEC
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.cases import case
from tensorkeep.testing.codec_suite import CodecBlock, as_bytes, encode

pytestmark = pytest.mark.coder

BF16 = BY_NAME["bfloat16"]

# Two bfloat16: 0xBF81 = s1 e01111111 m0000001, 0x4049 = s0 e10000000 m1001001.
GOLDEN_RAW = bytes.fromhex("81bf 4940")
GOLDEN_BLOCK = bytes.fromhex(
    "5a2a4d18 12000000"  # a skippable frame of 18 bytes: the header
    "01 01 02 00"  # version 1, the exponent layout, two bytes an element
    "0400000000000000"  # four raw bytes
    "00 01"  # the lower plane is raw, the upper coded
    "0b000000"  # in one frame of eleven bytes
    "5b2a4d18 02000000"  # a skippable frame of two bytes: the raw planes
    "81 49"  # signs and mantissas: 1 0000001, 0 1001001
    "28b52ffd 20 02"  # a Zstandard frame of one segment that declares two bytes
    "110000 7f80"  # its last block, stored, of two bytes: the exponents
)


def block_of(hexadecimal: bytes) -> Bytes:
    return np.frombuffer(hexadecimal, np.uint8)


def coded(raw: Bytes, name: str) -> Bytes:
    return encode(CODEC, CodecBlock("", BY_NAME[name], raw))


def normal(name: str, count: int) -> Bytes:
    values = np.random.default_rng(1).standard_normal(count) * 0.02
    return as_bytes(values.astype(BY_NAME[name].numpy))


def test_a_block_spelled_out_by_hand_decodes() -> None:
    out = np.empty(4, np.uint8)
    CODEC.decode(block_of(GOLDEN_BLOCK), BF16, out)
    assert out.tobytes() == GOLDEN_RAW


DAMAGED_FIELDS = [
    (0, 0x5B, "not a block of byte planes"),
    (4, 0x13, "do not agree"),
    (8, 2, "version 2"),
    (9, 2, "unknown layout 2"),
    (10, 1, "unknown layout 1 of elements of 1 bytes"),
    (10, 3, "unknown layout 1 of elements of 3 bytes"),
    (11, 1, "not a block of byte planes"),
    (12, 6, "decodes to 6 bytes"),
    (19, 0x80, "decodes to"),
    (20, 2, "neither raw nor coded"),
    (20, 1, "do not agree"),
    (22, 0x0A, "bytes other than zeros follow"),
    (22, 0x0C, "are stored where the frames need"),
    (25, 0xFF, "are stored where the frames need"),
    (26, 0x5A, "raw planes are not at the place"),
    (30, 3, "raw planes are not at the place"),
    (36, 0x29, "not a Zstandard frame"),
    (40, 0x21, "a dictionary|another length"),
    (41, 3, "claims another length"),
    (42, 0x17, "damaged Zstandard frame"),
]


def test_each_damaged_field_is_refused() -> None:
    for place, value, message in DAMAGED_FIELDS:
        damaged = bytearray(GOLDEN_BLOCK)
        damaged[place] = value
        with case(f"{value} at {place}"), pytest.raises(CodecError, match=message):
            CODEC.decode(block_of(bytes(damaged)), BF16, np.empty(4, np.uint8))


def with_frame(frame: bytes) -> Bytes:
    head = bytearray(GOLDEN_BLOCK[:36])
    head[22:26] = struct.pack("<I", len(frame))
    return block_of(bytes(head) + frame)


FRAMES = {
    "no length": (zstandard.ZstdCompressor(write_content_size=False).compress(b"\x7f\x80"), "claims another length"),
    "a gigabyte, refused before decoding": (bytes.fromhex("28b52ffd a0 00000040 02000000"), "claims another length"),
    "a dictionary": (bytes.fromhex("28b52ffd 21 07 02 110000 7f80"), "dictionary"),
    # Without the single-segment flag: a window of 2**30 bytes, and a content size of two in a field of four bytes.
    "a large window": (bytes.fromhex("28b52ffd 80 a0 02000000 110000 7f80"), "window"),
    "a skippable frame": (bytes.fromhex("502a4d18 02000000 7f80"), "not a Zstandard frame"),
    "two frames": (GOLDEN_BLOCK[36:] * 2, "damaged Zstandard frame"),
}


def test_other_frames_in_place_of_a_plane_are_refused() -> None:
    for label, (frame, message) in FRAMES.items():
        with case(label), pytest.raises(CodecError, match=message):
            CODEC.decode(with_frame(frame), BF16, np.empty(4, np.uint8))


def test_any_zstd_decoder_reads_the_exponents_of_a_block() -> None:
    raw = normal("bfloat16", 2 * RUN + 5)
    stream = io.BytesIO(coded(raw, "bfloat16").tobytes())
    exponents = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True).read()
    assert exponents == (raw.view("<u2") >> 7).astype(np.uint8).tobytes()


def test_blocks_of_several_runs_round_trip() -> None:
    for name, count in product(("bfloat16", "float64"), (RUN - 1, RUN, RUN + 1, 3 * RUN)):
        raw = normal(name, count)
        out = np.empty_like(raw)
        with case(f"{count} elements of {name}"):
            CODEC.decode(coded(raw, name), BY_NAME[name], out)
            assert np.array_equal(out, raw)


def test_counters_noise_and_narrow_floats_have_their_sizes() -> None:
    for name, raw, most in (
        ("float32", as_bytes(normal("bfloat16", 300_000).view(BF16.numpy).astype(np.float32)), 0.34),
        ("int64", as_bytes(np.arange(300_000)), 0.005),
        ("uint8", np.random.default_rng(0).integers(0, 256, 300_000, np.uint8), 1 + 63 / 300_000),
    ):
        assert coded(raw, name).size <= most * raw.size, name


def test_the_exponent_layout_puts_the_exponent_on_the_top_plane() -> None:
    words = np.array([0x00000000, 0x80000000, 0x7F800000, 0x3FC12345, 0xFFFFFFFF], "<u4")
    planes = [np.empty(5, np.uint8) for _ in range(4)]
    bitplanes.split(words, planes, bitplanes.EXPONENT, bitplanes.Scratch(5))
    assert planes[3].tolist() == [0x00, 0x00, 0xFF, 0x7F, 0xFF]
    assert planes[2].tolist() == [0x00, 0x80, 0x00, 0x41, 0xFF]
    assert planes[1].tolist() == [0x00, 0x00, 0x00, 0x23, 0xFF]
    assert planes[0].tolist() == [0x00, 0x00, 0x00, 0x45, 0xFF]
