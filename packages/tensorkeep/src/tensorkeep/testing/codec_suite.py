"""The conformance suite of codecs.

Subclass it in your tests and name the codec::

    class TestMyCodec(CodecSuite):
        codec = my_package.my_codec.CODEC
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from tensorkeep.codecs.base import Bytes, Codec, CodecError
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.testing.cases import case

_GUARD = 0xA5
_PADDING = 4096
_SAMPLED_PLACES = 60


class CodecBlock(NamedTuple):
    """A block to encode: a label, the dtype and the raw bytes."""

    label: str
    dtype: DType
    raw: Bytes


def blocks() -> Iterator[CodecBlock]:
    """Yield small blocks of every dtype and of the kinds of data in checkpoints."""
    random = np.random.default_rng(20)
    for dtype in BY_NAME.values():
        noise = random.integers(0, 256, 24 * dtype.itemsize * 41, np.uint8)
        yield CodecBlock(f"noise-{dtype}", dtype, noise)
        yield CodecBlock(f"one-{dtype}", dtype, noise[: dtype.itemsize].copy())
        if dtype.kind == "float" and dtype.has_numpy:
            yield CodecBlock(f"normal-{dtype}", dtype, as_bytes(random.standard_normal(9001).astype(dtype.numpy)))
    weights = (random.standard_normal((40, 600)) * 0.02).astype(np.float32)
    for name in ("bfloat16", "float32"):
        dtype = BY_NAME[name]
        yield CodecBlock(f"empty-{name}", dtype, np.empty(0, np.uint8))
        yield CodecBlock(f"zeros-{name}", dtype, np.zeros(30_000 * dtype.itemsize, np.uint8))
        yield CodecBlock(f"constant-{name}", dtype, as_bytes(np.full(30_000, 1.25, dtype.numpy)))
        mask = random.random(weights.shape) < 0.05
        # The last element is not zero: padding must be distinguishable.
        mask[-1, -1] = True
        yield CodecBlock(f"sparse-{name}", dtype, as_bytes((weights * mask).astype(dtype.numpy)))
        yield CodecBlock(f"rows-{name}", dtype, as_bytes(weights[random.integers(0, 9, 90)].astype(dtype.numpy)))
    # All patterns of 16 bits: NaN payloads, infinities, both zeros, denormals.
    patterns = np.arange(1 << 16, dtype="<u2")
    yield CodecBlock("patterns-bfloat16", BY_NAME["bfloat16"], as_bytes(patterns))
    yield CodecBlock("patterns-float16", BY_NAME["float16"], as_bytes(patterns))
    yield CodecBlock("patterns-float32", BY_NAME["float32"], as_bytes(patterns.astype("<u4") << 16 | patterns[::-1]))
    yield CodecBlock("counter-int64", BY_NAME["int64"], as_bytes(np.arange(-30_000, -10_000)))
    yield CodecBlock("tokens-int64", BY_NAME["int64"], as_bytes(random.integers(0, 50_000, 20_000)))
    yield CodecBlock("mask-bool", BY_NAME["bool"], as_bytes(random.random(50_000) < 0.3))
    yield CodecBlock("odd-length-float32", BY_NAME["float32"], as_bytes(weights)[:4099])
    yield CodecBlock(
        "several-frames-bfloat16", BY_NAME["bfloat16"], as_bytes(weights.astype("<f2"))[:20_000].repeat(35)
    )


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """Return the bytes of an array in C order, as a uint8 array of shape (nbytes,)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def encode(codec: Codec, block: CodecBlock) -> Bytes:
    """Encode a block, and assert that the codec kept to its bound and did not change its input."""
    bound = codec.bound(block.raw.size)
    # The bytes behind the bound show whether a codec writes past it.
    out = np.full(bound + 64, _GUARD, np.uint8)
    before = block.raw.copy()
    length = codec.encode(block.raw, block.dtype, out[:bound])
    assert 0 <= length <= bound
    assert (out[bound:] == _GUARD).all(), "wrote past the end of `out`"
    assert np.array_equal(before, block.raw), "changed its input"
    return out[:length].copy()


def decode(codec: Codec, stored: Bytes, dtype: DType, nbytes: int) -> Bytes:
    """Decode a block, and assert that the codec wrote nothing outside ``out``."""
    # Guards on both sides: a codec in C can write before its memory, too.
    memory = np.full(64 + nbytes + 64, _GUARD, np.uint8)
    out = memory[64 : 64 + nbytes]
    try:
        codec.decode(stored, dtype, out)
    finally:
        assert (memory[:64] == _GUARD).all() and (memory[64 + nbytes :] == _GUARD).all(), "wrote outside `out`"
    return out


_BLOCKS = list(blocks())
# These blocks do not end in zeros, so that a codec without a stored length can recognise padding.
_FEW = [block for block in _BLOCKS if block.label in ("normal-bfloat16", "sparse-float32", "counter-int64")]


class CodecSuite:
    """The tests that every codec must pass; see `tensorkeep.codecs.base.Codec`.

    Attributes
    ----------
    codec : Codec
        The codec under test.
    """

    codec: ClassVar[Codec]

    def test_round_trip_is_exact_and_trailing_zeros_are_ignored(self) -> None:
        for block in _BLOCKS:
            with case(block.label):
                stored = encode(self.codec, block)
                for each in (stored, np.concatenate([stored, np.zeros(_PADDING, np.uint8)])):
                    assert np.array_equal(decode(self.codec, each, block.dtype, block.raw.size), block.raw)

    def test_encoding_is_deterministic(self) -> None:
        for block in _FEW:
            assert np.array_equal(encode(self.codec, block), encode(self.codec, block)), block.label

    def test_round_trip_is_exact_for_a_wrong_dtype(self) -> None:
        for block, dtype in zip(cycle(_FEW), BY_NAME.values(), strict=False):
            with case(f"{block.label} as {dtype}"):
                stored = encode(self.codec, block._replace(dtype=dtype))
                assert np.array_equal(decode(self.codec, stored, dtype, block.raw.size), block.raw)

    def test_read_only_and_unaligned_memory(self) -> None:
        for block in _FEW:
            with case(block.label):
                shifted = np.empty(block.raw.size + 1, np.uint8)
                shifted[1:] = block.raw
                shifted.flags.writeable = False
                stored = encode(self.codec, block._replace(raw=shifted[1:]))
                source = np.empty(stored.size + 1, np.uint8)
                source[1:] = stored
                source.flags.writeable = False
                back = np.empty(block.raw.size + 1, np.uint8)
                self.codec.decode(source[1:], block.dtype, back[1:])
                assert np.array_equal(back[1:], block.raw)

    def test_many_threads_at_once(self) -> None:
        def round_trip(number: int) -> bool:
            block = _FEW[number % len(_FEW)]
            stored = encode(self.codec, block)
            return np.array_equal(decode(self.codec, stored, block.dtype, block.raw.size), block.raw)

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(round_trip, range(8 * len(_FEW))))

    def test_a_truncated_block_is_refused(self) -> None:
        for block in _FEW:
            stored = encode(self.codec, block)
            for length in {0, 1, 7, stored.size // 3, stored.size // 2, stored.size - 1}:
                with case(f"{length} bytes of {block.label}"), pytest.raises(CodecError):
                    decode(self.codec, stored[:length], block.dtype, block.raw.size)

    def test_another_raw_length_is_refused(self) -> None:
        for block in _FEW:
            stored = encode(self.codec, block)
            for nbytes in (block.raw.size + 1, block.raw.size + 64, block.raw.size - 1, 8, 0):
                with case(f"{block.label} in {nbytes} bytes"), pytest.raises(CodecError):
                    decode(self.codec, stored, block.dtype, nbytes)

    def test_other_bytes_after_the_block_are_refused(self) -> None:
        for block in _FEW:
            trailed = np.concatenate([encode(self.codec, block), np.zeros(100, np.uint8), np.ones(1, np.uint8)])
            with case(block.label), pytest.raises(CodecError):
                decode(self.codec, trailed, block.dtype, block.raw.size)

    def test_damage_raises_only_codec_errors(self) -> None:
        random = np.random.default_rng(7)
        for block in _FEW:
            stored = encode(self.codec, block)
            # The structure is at the front; the rest is sampled.
            positions = [*range(min(stored.size, 128)), *random.integers(0, stored.size, _SAMPLED_PLACES).tolist()]
            for position in positions:
                damaged = stored.copy()
                damaged[position] ^= random.integers(1, 256, dtype=np.uint8)
                # Wrong bits without an error are allowed here: the checksum of the container finds them.
                with case(f"byte {position} of {block.label}"), suppress(CodecError):
                    decode(self.codec, damaged, block.dtype, block.raw.size)
