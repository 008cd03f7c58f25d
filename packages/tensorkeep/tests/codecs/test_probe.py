"""The codec that the probe chooses for each kind of tensor."""

from collections.abc import Iterator

import numpy as np
import pytest

from tensorkeep.codecs import planes, probe, raw, zstd
from tensorkeep.codecs.base import CODECS, Bytes
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.cases import case
from tensorkeep.testing.codec_suite import as_bytes, blocks, decode

pytestmark = pytest.mark.coder

TRIED = {codec.name: codec for codec in (planes.CODEC, zstd.CODEC, raw.CODEC)}


def chosen(block: Bytes, name: str) -> tuple[str, float]:
    """Return the codec's name and the size of the coded block relative to the raw one, having decoded it."""
    out = np.empty(probe.bound(block.size), np.uint8)
    codec, length = probe.encode(block, BY_NAME[name], out)
    assert np.array_equal(decode(TRIED[codec], out[:length], BY_NAME[name], block.size), block)
    return codec, length / block.size


def normal(name: str, *shape: int) -> Bytes:
    values = np.random.default_rng(2).standard_normal(shape) * 0.02
    return as_bytes(values.astype(BY_NAME[name].numpy))


def shrinking() -> Iterator[tuple[str, str, Bytes, float, str | None]]:
    """Yield a label, the dtype, the bytes, the most that may be stored of them, and the codec that must be chosen."""
    random = np.random.default_rng(6)
    weights = {"bfloat16": 0.665, "float16": 0.85, "float32": 0.835, "float64": 0.895}
    for name, most in (weights | {"float8_e4m3fn": 0.675, "float8_e5m2": 0.695}).items():
        yield "trained weights", name, normal(name, 500_000), most, "planes"
    yield "a small bias", "bfloat16", normal("bfloat16", 1500), 0.7, "planes"
    for name, sparse, mask in (("bfloat16", 0.19, 0.05), ("float32", 0.16, 0.025)):
        table = normal(name, 200, 6400 // BY_NAME[name].itemsize).reshape(200, 6400)
        yield "an embedding of repeated rows", name, as_bytes(table[random.integers(0, 100, 1500)]), 0.1, "zstd"
        yield "rows repeated four times", name, as_bytes(table.repeat(4, axis=0)), 0.26, None
        chosen = random.random(1 << 20) < 0.05
        values = random.standard_normal(1 << 20) * 0.02 * chosen
        yield "a sparse tensor", name, as_bytes(values.astype(BY_NAME[name].numpy)), sparse, None
        yield "a one-hot mask", name, as_bytes(chosen.astype(BY_NAME[name].numpy)), mask, None
    yield "a one-hot mask", "bool", as_bytes(random.random(1 << 20) < 0.05), 0.09, None
    for name in ("bfloat16", "float32", "int64", "bool"):
        yield "zeros", name, np.zeros(4 << 20, np.uint8), 0.001, None
    yield "a constant", "bfloat16", as_bytes(np.full(1 << 20, 1.25, BY_NAME["bfloat16"].numpy)), 0.001, None
    yield "counters", "int64", as_bytes(np.arange(500_000)), 0.005, None
    yield "tokens", "int64", as_bytes(random.integers(0, 50_000, 500_000)), 0.26, None


def test_each_kind_of_tensor_shrinks_with_its_registered_codec() -> None:
    assert set(TRIED) <= set(CODECS.names())
    for label, name, block, most, codec in shrinking():
        with case(f"{label} of {name}"):
            found, size = chosen(block, name)
            assert size <= most
            assert codec in (found, None)


def test_no_block_grows_every_block_round_trips_and_noise_stays_raw() -> None:
    for block in blocks():
        if block.raw.size:
            with case(block.label):
                assert chosen(block.raw, block.dtype.name)[1] <= 1
    for nbytes in (1, 100, 5000, 1 << 20):
        assert chosen(np.random.default_rng(9).integers(0, 256, nbytes, np.uint8), "uint8") == ("raw", 1.0), nbytes
