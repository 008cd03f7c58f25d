"""The planes codec: its layout on disk as literal bytes, and the damage that it refuses."""

import io
import struct

import numpy as np
import pytest
import zstandard

from tensorkeep.codecs import bitplanes
from tensorkeep.codecs.base import Bytes, CodecError
from tensorkeep.codecs.planes import CODEC, RUN
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.codec_suite import as_bytes

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
    out = np.empty(CODEC.bound(raw.size), np.uint8)
    return out[: CODEC.encode(raw, BY_NAME[name], out)]


def normal(name: str, count: int) -> Bytes:
    values = np.random.default_rng(1).standard_normal(count) * 0.02
    return as_bytes(values.astype(BY_NAME[name].numpy))


def test_a_block_spelled_out_by_hand_decodes() -> None:
    out = np.empty(4, np.uint8)
    CODEC.decode(block_of(GOLDEN_BLOCK), BF16, out)
    assert out.tobytes() == GOLDEN_RAW


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
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
    ],
)
def test_each_damaged_field_is_refused(place: int, value: int, message: str) -> None:
    damaged = bytearray(GOLDEN_BLOCK)
    damaged[place] = value
    with pytest.raises(CodecError, match=message):
        CODEC.decode(block_of(bytes(damaged)), BF16, np.empty(4, np.uint8))


def with_frame(frame: bytes) -> Bytes:
    head = bytearray(GOLDEN_BLOCK[:36])
    head[22:26] = struct.pack("<I", len(frame))
    return block_of(bytes(head) + frame)


def test_a_frame_that_declares_no_length_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x7f\x80")
    with pytest.raises(CodecError, match="claims another length"):
        CODEC.decode(with_frame(frame), BF16, np.empty(4, np.uint8))


def test_a_frame_that_declares_a_gigabyte_is_refused_before_decoding() -> None:
    frame = bytes.fromhex("28b52ffd a0 00000040 02000000")
    with pytest.raises(CodecError, match="claims another length"):
        CODEC.decode(with_frame(frame), BF16, np.empty(4, np.uint8))


def test_a_frame_that_needs_a_dictionary_is_refused() -> None:
    frame = bytes.fromhex("28b52ffd 21 07 02 110000 7f80")
    with pytest.raises(CodecError, match="dictionary"):
        CODEC.decode(with_frame(frame), BF16, np.empty(4, np.uint8))


def test_a_frame_that_needs_a_large_window_is_refused() -> None:
    # Without the single-segment flag: a window of 2**30 bytes, and a content size of two in a field of four bytes.
    frame = bytes.fromhex("28b52ffd 80 a0 02000000 110000 7f80")
    with pytest.raises(CodecError, match="window"):
        CODEC.decode(with_frame(frame), BF16, np.empty(4, np.uint8))


def test_a_skippable_frame_in_place_of_a_plane_is_refused() -> None:
    with pytest.raises(CodecError, match="not a Zstandard frame"):
        CODEC.decode(with_frame(bytes.fromhex("502a4d18 02000000 7f80")), BF16, np.empty(4, np.uint8))


def test_two_frames_in_place_of_one_are_refused() -> None:
    with pytest.raises(CodecError, match="damaged Zstandard frame"):
        CODEC.decode(with_frame(GOLDEN_BLOCK[36:] * 2), BF16, np.empty(4, np.uint8))


def test_any_zstd_decoder_reads_the_exponents_of_a_block() -> None:
    raw = normal("bfloat16", 2 * RUN + 5)
    stream = io.BytesIO(coded(raw, "bfloat16").tobytes())
    exponents = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True).read()
    assert exponents == (raw.view("<u2") >> 7).astype(np.uint8).tobytes()


@pytest.mark.parametrize("count", [RUN - 1, RUN, RUN + 1, 3 * RUN])
@pytest.mark.parametrize("name", ["bfloat16", "float64"])
def test_blocks_of_several_runs_round_trip(count: int, name: str) -> None:
    raw = normal(name, count)
    out = np.empty_like(raw)
    CODEC.decode(coded(raw, name), BY_NAME[name], out)
    assert np.array_equal(out, raw)


# Entropy of the planes of N(0, 0.02), and a little for the tables.
@pytest.mark.parametrize(
    ("name", "most"),
    [("bfloat16", 0.665), ("float16", 0.85), ("float32", 0.84), ("float64", 0.895), ("float8_e4m3fn", 0.68)],
)
def test_weights_shrink_to_the_entropy_of_their_exponents(name: str, most: float) -> None:
    raw = normal(name, 400_000)
    assert coded(raw, name).size <= most * raw.size


def test_a_bfloat16_stored_as_float32_is_as_small() -> None:
    raw = as_bytes(normal("bfloat16", 300_000).view(BF16.numpy).astype(np.float32))
    assert coded(raw, "float32").size <= 0.34 * raw.size


def test_counters_shrink_to_almost_nothing() -> None:
    raw = as_bytes(np.arange(300_000))
    assert coded(raw, "int64").size <= 0.005 * raw.size


def test_noise_grows_by_a_header_only() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    assert coded(raw, "uint8").size - raw.size < 64


def test_the_exponent_layout_puts_the_exponent_on_the_top_plane() -> None:
    words = np.array([0x00000000, 0x80000000, 0x7F800000, 0x3FC12345, 0xFFFFFFFF], "<u4")
    planes = [np.empty(5, np.uint8) for _ in range(4)]
    bitplanes.split(words, planes, bitplanes.EXPONENT, bitplanes.Scratch(5))
    assert planes[3].tolist() == [0x00, 0x00, 0xFF, 0x7F, 0xFF]
    assert planes[2].tolist() == [0x00, 0x80, 0x00, 0x41, 0xFF]
    assert planes[1].tolist() == [0x00, 0x00, 0x00, 0x23, 0xFF]
    assert planes[0].tolist() == [0x00, 0x00, 0x00, 0x45, 0xFF]


@pytest.mark.parametrize(
    ("layout", "width"), [(layout, width) for layout, widths in bitplanes.LAYOUT_WIDTHS.items() for width in widths]
)
def test_merge_inverts_split_for_every_layout(layout: int, width: int) -> None:
    words = np.random.default_rng(3).integers(0, 256, 999 * width, np.uint8).view(f"<u{width}")
    planes = [np.empty(999, np.uint8) for _ in range(width)]
    scratch = bitplanes.Scratch(999)
    bitplanes.split(words, planes, layout, scratch)
    back = np.empty_like(words)
    bitplanes.merge(planes, back, layout, scratch)
    assert np.array_equal(back, words)
