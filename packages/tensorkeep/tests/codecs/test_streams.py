"""zstd and gzip blocks are standard streams."""

import gzip as standard_gzip

import numpy as np
import pytest
import zstandard

from tensorkeep.codecs import gzip, zstd
from tensorkeep.codecs.base import Bytes, Codec, CodecError
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.cases import case
from tensorkeep.testing.codec_suite import CodecBlock, as_bytes, encode

F32, U8 = BY_NAME["float32"], BY_NAME["uint8"]


def coded(codec: Codec, raw: Bytes) -> Bytes:
    return encode(codec, CodecBlock("", F32, raw))


def rows(distinct: int, count: int) -> Bytes:
    random = np.random.default_rng(4)
    return as_bytes(random.standard_normal((distinct, 1600)).astype(np.float32)[random.integers(0, distinct, count)])


def test_blocks_are_one_standard_frame_or_member_without_a_date() -> None:
    raw = rows(3, 20)
    assert zstandard.ZstdDecompressor().decompress(coded(zstd.CODEC, raw).tobytes()) == raw.tobytes()
    stored = coded(gzip.CODEC, raw).tobytes()
    assert (standard_gzip.decompress(stored), stored[4:8]) == (raw.tobytes(), bytes(4))
    # zstd matches a row that is repeated megabytes later.
    raw = rows(300, 1200)
    assert coded(zstd.CODEC, raw).size < 0.4 * raw.size


@pytest.mark.parametrize("codec", [zstd.CODEC, gzip.CODEC], ids=lambda codec: codec.name)
def test_a_decompression_bomb_is_refused(codec: Codec) -> None:
    bomb = coded(codec, np.zeros(8 << 20, np.uint8))
    with pytest.raises(CodecError):
        codec.decode(bomb, U8, np.empty(1000, np.uint8))


def test_each_false_claim_of_a_frame_is_refused() -> None:
    for frame, message in (
        ("28b52ffd 21 07 02 110000 7f80", "dictionary"),
        ("28b52ffd 80 a0 02000000 110000 7f80", "window"),
        ("502a4d18 02000000 7f80", "not a Zstandard frame"),
        ("28b52ffd 20 02 170000 7f80", "kind that does not exist"),
        ("28b52ffd 20 02 100000 7f80", "cut short"),
        ("28b52ffd 20 02 190000 7f80", "cut short"),
        ("28b52ffd 20 02 090000 7f", "damaged|decodes to"),
        ("28b52ffd 24 02 110000 7f80", "cut short"),
        ("28b52ffd 24 02 110000 7f80 00000000", "damaged"),
    ):
        with case(frame), pytest.raises(CodecError, match=message):
            zstd.CODEC.decode(np.frombuffer(bytes.fromhex(frame), np.uint8), U8, np.empty(2, np.uint8))
