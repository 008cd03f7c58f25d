"""The codec that the probe chooses for each kind of tensor."""

import numpy as np
import pytest

from tensorkeep.codecs import planes, probe, raw, zstd
from tensorkeep.codecs.base import CODECS, Bytes
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.codec_suite import Block, as_bytes, blocks

TRIED = {codec.name: codec for codec in (planes.CODEC, zstd.CODEC, raw.CODEC)}


def chosen(block: Bytes, name: str) -> tuple[str, float]:
    """Return the codec's name and the size of the coded block relative to the raw one, having decoded it."""
    dtype = BY_NAME[name]
    out = np.empty(probe.bound(block.size), np.uint8)
    codec, length = probe.encode(block, dtype, out)
    back = np.empty_like(block)
    TRIED[codec].decode(out[:length], dtype, back)
    assert np.array_equal(back, block)
    return codec, length / block.size


def normal(name: str, *shape: int) -> Bytes:
    values = np.random.default_rng(2).standard_normal(shape) * 0.02
    return as_bytes(values.astype(BY_NAME[name].numpy))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("bfloat16", 0.665),
        ("float16", 0.85),
        ("float32", 0.835),
        ("float64", 0.895),
        ("float8_e4m3fn", 0.675),
        ("float8_e5m2", 0.695),
    ],
)
def test_trained_weights_go_to_planes(name: str, most: float) -> None:
    codec, size = chosen(normal(name, 500_000), name)
    assert codec == "planes"
    assert size <= most


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_an_embedding_of_repeated_rows_goes_to_zstd(name: str) -> None:
    width = 6400 // BY_NAME[name].itemsize
    table = normal(name, 100, width).reshape(100, 6400)
    codec, size = chosen(as_bytes(table[np.random.default_rng(5).integers(0, 100, 1500)]), name)
    assert codec == "zstd"
    assert size < 0.1


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_rows_repeated_four_times_are_stored_about_once(name: str) -> None:
    width = 6400 // BY_NAME[name].itemsize
    table = normal(name, 200, width).reshape(200, 6400).repeat(4, axis=0)
    assert chosen(as_bytes(table), name)[1] < 0.26


@pytest.mark.parametrize("name", ["bfloat16", "float32", "int64", "bool"])
def test_zeros_shrink_to_almost_nothing(name: str) -> None:
    assert chosen(np.zeros(4 << 20, np.uint8), name)[1] < 0.001


def test_a_constant_shrinks_to_almost_nothing() -> None:
    assert chosen(as_bytes(np.full(1 << 20, 1.25, BY_NAME["bfloat16"].numpy)), "bfloat16")[1] < 0.001


@pytest.mark.parametrize(("name", "most"), [("bfloat16", 0.19), ("float32", 0.16)])
def test_a_sparse_tensor_shrinks_to_its_non_zeros(name: str, most: float) -> None:
    random = np.random.default_rng(6)
    values = random.standard_normal(1 << 20) * 0.02 * (random.random(1 << 20) < 0.05)
    assert chosen(as_bytes(values.astype(BY_NAME[name].numpy)), name)[1] < most


@pytest.mark.parametrize(("name", "most"), [("bfloat16", 0.05), ("float32", 0.025), ("bool", 0.09)])
def test_a_one_hot_mask_shrinks_to_a_few_bits(name: str, most: float) -> None:
    mask = np.random.default_rng(6).random(1 << 20) < 0.05
    assert chosen(as_bytes(mask.astype(BY_NAME[name].numpy)), name)[1] < most


@pytest.mark.parametrize(
    ("values", "most"),
    [(np.arange(500_000), 0.005), (np.random.default_rng(8).integers(0, 50_000, 500_000), 0.26)],
    ids=["counters", "tokens"],
)
def test_high_zero_bytes_of_integers_shrink(values: np.ndarray, most: float) -> None:
    assert chosen(as_bytes(values), "int64")[1] < most


@pytest.mark.parametrize("nbytes", [1, 100, 5000, 1 << 20])
def test_noise_stays_raw(nbytes: int) -> None:
    noise = np.random.default_rng(9).integers(0, 256, nbytes, np.uint8)
    assert chosen(noise, "uint8") == ("raw", 1.0)


def test_a_small_bias_shrinks_too() -> None:
    codec, size = chosen(normal("bfloat16", 1500), "bfloat16")
    assert codec == "planes"
    assert size < 0.7


@pytest.mark.parametrize("block", list(blocks()), ids=lambda block: block.label)
def test_no_block_grows_and_every_block_round_trips(block: Block) -> None:
    out = np.empty(probe.bound(block.raw.size), np.uint8)
    codec, length = probe.encode(block.raw, block.dtype, out)
    assert length <= block.raw.size
    back = np.empty_like(block.raw)
    TRIED[codec].decode(out[:length], block.dtype, back)
    assert np.array_equal(back, block.raw)


def test_every_codec_of_the_probe_is_registered() -> None:
    assert set(TRIED) <= set(CODECS.names())
