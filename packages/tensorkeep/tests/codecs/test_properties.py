"""Codecs with generated blocks and damaged bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.codecs import gzip, planes, probe, raw, zstd
from tensorkeep.codecs.base import Bytes, Codec, CodecError
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.testing.codec_suite import CodecBlock, decode, encode

CODECS = {codec.name: codec for codec in (raw.CODEC, zstd.CODEC, gzip.CODEC, planes.CODEC)}
pytestmark = pytest.mark.coder
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
dtypes = st.sampled_from(list(BY_NAME.values()))


@st.composite
def structured(draw: st.DrawFn) -> Bytes:
    """Bytes with repeats and noise, so that every mode and fallback is used."""
    pattern = draw(st.binary(max_size=64))
    noise = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, draw(st.integers(0, 9000)), np.uint8)
    pieces = [np.frombuffer(pattern, np.uint8).repeat(draw(st.integers(1, 90))), noise & draw(st.integers(0, 255))]
    return np.concatenate(pieces)


@each_codec
@given(block=structured(), dtype=dtypes, padding=st.integers(0, 100))
def test_every_block_round_trips(codec: Codec, block: Bytes, dtype: DType, padding: int) -> None:
    stored = np.concatenate([encode(codec, CodecBlock("", dtype, block)), np.zeros(padding, np.uint8)])
    assert np.array_equal(decode(codec, stored, dtype, block.size), block)


@given(block=structured(), dtype=dtypes)
def test_the_probe_never_grows_a_block(block: Bytes, dtype: DType) -> None:
    out = np.empty(probe.bound(block.size), np.uint8)
    name, length = probe.encode(block, dtype, out)
    assert length <= block.size
    assert np.array_equal(decode(CODECS[name], out[:length], dtype, block.size), block)


@each_codec
@given(stored=st.binary(max_size=300), dtype=dtypes, nbytes=st.integers(0, 300))
def test_arbitrary_bytes_raise_nothing_but_codec_errors(codec: Codec, stored: bytes, dtype: DType, nbytes: int) -> None:
    decode_or_refuse(codec, np.frombuffer(stored, np.uint8), dtype, nbytes)


@each_codec
@given(block=structured(), dtype=dtypes, data=st.data())
def test_damage_raises_nothing_but_codec_errors(codec: Codec, block: Bytes, dtype: DType, data: st.DataObject) -> None:
    stored = encode(codec, CodecBlock("", dtype, block))
    for _ in range(data.draw(st.integers(1, 4)) if stored.size else 0):
        # Half of the damage is at the front, where the structure is.
        reach = min(stored.size, data.draw(st.sampled_from([48, stored.size])))
        stored[data.draw(st.integers(0, reach - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, stored.size)) if data.draw(st.booleans()) else stored.size
    nbytes = data.draw(st.sampled_from([block.size, block.size, block.size + 8, block.size // 2]))
    decode_or_refuse(codec, stored[:cut], dtype, nbytes)


def decode_or_refuse(codec: Codec, stored: Bytes, dtype: DType, nbytes: int) -> None:
    """Decode bytes of any kind; errors other than the codec's are raised."""
    try:
        decode(codec, stored, dtype, nbytes)
    except CodecError as refusal:
        assert str(refusal)
