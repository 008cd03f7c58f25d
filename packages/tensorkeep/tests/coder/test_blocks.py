"""Blocks of byte planes: each coder decodes what the other encoded, for every dtype; neither accepts more damage."""

from collections.abc import Sequence
from itertools import product
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coder.planes import PLANES, SIZES, plane_of
from tensorkeep.codecs import bitplanes, coder
from tensorkeep.codecs.base import Bytes, Codec, CodecError
from tensorkeep.codecs.coder import CompiledCoder, PythonCoder
from tensorkeep.codecs.planes import PlanesCodec
from tensorkeep.state.dtypes import BY_NAME, DType
from tensorkeep.testing.cases import case
from tensorkeep.testing.codec_suite import CodecBlock, as_bytes, decode, encode

LAYOUTS = [(layout, width) for layout, widths in bitplanes.LAYOUT_WIDTHS.items() for width in widths]


@pytest.fixture
def codecs(compiled: ModuleType) -> list[Codec]:
    """Return the codec with the compiled coder, and with the one in Python."""
    return [PlanesCodec(CompiledCoder), PlanesCodec(PythonCoder)]


def check(codecs: Sequence[Codec], dtype: DType, raw: Bytes) -> None:
    for writer in codecs:
        stored = encode(writer, CodecBlock("", dtype, raw))
        for reader in codecs:
            assert np.array_equal(decode(reader, stored, dtype, raw.size), raw)


def test_each_coder_decodes_blocks_of_the_other(codecs: list[Codec], share: tuple[int, int]) -> None:
    """Each dtype with half of the distributions, the instructions and the sizes by turns."""
    for (row, dtype), (column, name) in product(enumerate(BY_NAME.values()), enumerate(PLANES)):
        if (row + column) % (2 * share[1]) == share[0]:
            count = SIZES[(row + 2 * column) % len(SIZES)]
            with case(f"{count} bytes of {dtype}, {name}"):
                check(codecs, dtype, plane_of(name, count))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BY_NAME)
def test_each_coder_decodes_blocks_of_every_size_of_the_other(codecs: list[Codec], name: str) -> None:
    for distribution, count in product(PLANES, SIZES):
        with case(f"{count} bytes, {distribution}"):
            check(codecs, BY_NAME[name], plane_of(distribution, count))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("megabytes", [16, pytest.param(64, marks=pytest.mark.exhaustive)])
def test_each_coder_decodes_whole_blocks_of_the_other(megabytes: int) -> None:
    codecs, dtype = [PlanesCodec(CompiledCoder), PlanesCodec(PythonCoder)], BY_NAME["bfloat16"]
    weights = np.random.default_rng(0).standard_normal(megabytes << 19, np.float32).astype(dtype.numpy)
    check(codecs, dtype, as_bytes(weights))


@pytest.mark.skipif(coder.compiled is None, reason="the extension is not built, or TENSORKEEP_CODER=python is set")
@given(
    kind=st.sampled_from(LAYOUTS),
    count=st.integers(0, 3000),
    offsets=st.lists(st.integers(0, 16), min_size=9, max_size=9),
    instructions=st.integers(0, 2),
    copied=st.booleans(),
)
def test_coders_split_and_merge_alike(
    kind: tuple[int, int], count: int, offsets: list[int], instructions: int, copied: bool
) -> None:
    layout, width = kind
    noise = np.random.default_rng(count).integers(0, 256, count * width + offsets[8], np.uint8)
    # numpy's views of words may be unaligned, too.
    words = noise[offsets[8] :].view(f"<u{width}")
    split_by = []
    kinds = coder.compiled.kinds
    coder.compiled.use(kinds[instructions % len(kinds)])
    for each in (CompiledCoder(), PythonCoder()):
        memory = [np.full(offset + count + 64, 0xA5, np.uint8) for offset in offsets[:width]]
        planes = [place[offset : offset + count] for place, offset in zip(memory, offsets, strict=False)]
        copy = np.empty_like(words) if copied else None
        each.split(words, planes, layout, copy)
        assert copy is None or np.array_equal(copy, words)
        back = np.full(offsets[8] + count * width + 64, 0xA5, np.uint8)
        each.merge(planes, back[offsets[8] : offsets[8] + count * width].view(words.dtype), layout)
        assert np.array_equal(back[offsets[8] : -64], noise[offsets[8] :])
        other = noise[::-1].copy()[: words.nbytes].view(words.dtype)
        both = other ^ words
        each.merge(planes, other, layout, xor=True)
        assert np.array_equal(other, both)
        assert (back[: offsets[8]] == 0xA5).all() and (back[-64:] == 0xA5).all(), "merged outside"
        split_by.append(np.concatenate(memory))
    coder.compiled.use(kinds[-1])
    assert np.array_equal(*split_by), "split differently, or outside of the planes"


def outcome(codec: Codec, stored: Bytes, dtype: DType, nbytes: int) -> bytes | str:
    try:
        return decode(codec, stored, dtype, nbytes).tobytes()
    except CodecError as error:
        return str(error)


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e4m3fn"])
def test_damaged_blocks_are_decoded_or_refused_alike(codecs: list[Codec], name: str) -> None:
    dtype = BY_NAME[name]
    weights = np.random.default_rng(1).standard_normal(min(250, 600 // dtype.itemsize)) * 0.02
    raw = as_bytes(weights.astype(dtype.numpy))
    random = np.random.default_rng(2)
    for writer in codecs:
        stored = encode(writer, CodecBlock("", dtype, raw))
        damaged = [stored[:length] for length in range(0, stored.size, 7)]
        for place in range(stored.size):
            flipped = stored.copy()
            flipped[place] ^= random.integers(1, 256, dtype=np.uint8)
            damaged.append(flipped)
        for each in damaged:
            assert outcome(codecs[0], each, dtype, raw.size) == outcome(codecs[1], each, dtype, raw.size)
