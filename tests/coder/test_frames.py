"""Frames of planes: each coder and zstandard read what the others wrote, of every size and distribution."""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from coder.planes import PLANES, SIZES, plane_of
from tensorkeep.codecs import coder
from tensorkeep.codecs.base import Bytes, CodecError
from tensorkeep.codecs.coder import RUN, CompiledCoder, PythonCoder
from tensorkeep.codecs.zstd import zstd_bound

BLOCK = 128 * 1024
GUARD = 0xA5
each_plane = pytest.mark.parametrize("name", PLANES)


def bound(count: int) -> int:
    """Return the bytes that the C coder needs to be given."""
    return 13 + count + 3 * (count // BLOCK + 1)


def encode(compiled: ModuleType, encoder: Bytes, plane: Bytes, *, first: bool, space: int | None = None) -> Bytes:
    """Encode to exactly that much space, and assert that the bytes behind it are as before."""
    space = bound(plane.size) if space is None else space
    memory = np.full(space + 512, GUARD, np.uint8)
    length = compiled.encode_frame(encoder, plane, memory[:space], first)
    assert (memory[space:] == GUARD).all(), "wrote past the end"
    return memory[:length].copy()


def decode(compiled: ModuleType, decoder: Bytes, frame: Bytes, count: int) -> Bytes:
    memory = np.full(count + 1024, GUARD, np.uint8)
    assert compiled.decode_frame(decoder, frame, memory[512 : count + 512])
    assert (memory[:512] == GUARD).all() and (memory[count + 512 :] == GUARD).all(), "wrote outside"
    return memory[512 : count + 512]


def by_python(plane: Bytes) -> Bytes:
    out = np.empty(zstd_bound(plane.size), np.uint8)
    return out[: PythonCoder().encode(0, plane, out, first=True)]


@each_plane
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_each_coder_reads_what_the_others_wrote(compiled: ModuleType, name: str, every: int) -> None:
    encoder, decoder = np.zeros(compiled.ENCODER_BYTES, np.uint8), np.zeros(compiled.DECODER_BYTES, np.uint8)
    python, zstd = PythonCoder(), zstandard.ZstdDecompressor()
    for count in SIZES[list(PLANES).index(name) % every :: every]:
        # The second may have the code of the first, the third not.
        for seed, first in enumerate((True, False, True)):
            plane = plane_of(name, count, seed)
            frame = encode(compiled, encoder, plane, first=first)
            assert frame.size <= bound(count)
            assert zstd.decompress(frame.data, allow_extra_data=False) == plane.tobytes()
            assert np.array_equal(decode(compiled, decoder, frame, count), plane)
            if count <= RUN:
                assert np.array_equal(python.decode(0, frame, count), plane)
                assert np.array_equal(CompiledCoder().decode(0, by_python(plane), count), plane)


@pytest.mark.parametrize("tail", [1, 2, 5, 20, 100])
def test_a_short_block_after_one_that_does_not_shrink_stays_in_bounds(compiled: ModuleType, tail: int) -> None:
    # The code of both blocks is worth nothing to the first, and its description is longer than the second.
    chances = np.linspace(1, 1.9, 256) / np.linspace(1, 1.9, 256).sum()
    plane = np.random.default_rng(0).choice(256, BLOCK + tail, p=chances).astype(np.uint8)
    assert encode(compiled, np.zeros(compiled.ENCODER_BYTES, np.uint8), plane, first=True).size > plane.size


@pytest.mark.parametrize("count", [0, 1, 255, 256, BLOCK, BLOCK + 1])
def test_too_little_space_is_refused(compiled: ModuleType, count: int) -> None:
    encoder = np.zeros(compiled.ENCODER_BYTES, np.uint8)
    with pytest.raises(ValueError, match="too small"):
        encode(compiled, encoder, plane_of("noise", count), first=True, space=bound(count) - 1)


def test_a_state_of_another_size_or_alignment_is_refused(compiled: ModuleType) -> None:
    memory, plane, out = np.zeros(1 << 20, np.uint8), plane_of("normal", 100), np.empty(1000, np.uint8)
    aligned = memory[-memory.ctypes.data % 8 :]
    for encoder in (aligned[: compiled.ENCODER_BYTES - 8], aligned[4 : 4 + compiled.ENCODER_BYTES]):
        with pytest.raises(ValueError, match="encoder"):
            compiled.encode_frame(encoder, plane, out, True)
    for decoder in (aligned[: compiled.DECODER_BYTES - 8], aligned[4 : 4 + compiled.DECODER_BYTES]):
        with pytest.raises(ValueError, match="decoder"):
            compiled.decode_frame(decoder, plane, out)


# Not so for planes in which even zstandard's small table finds matches (sparse ones, which the codec codes at level 1),
# and for those whose symbols are distributed differently over a run, as one code serves two blocks of 128 KiB, and a
# sample of a period may miss the rest of it: sorted planes, halves, long periods.
@pytest.mark.parametrize("name", ["two symbols", "all symbols", "noise", "fibonacci", "geometric", "normal"])
@pytest.mark.parametrize("count", [65_536, RUN])
def test_frames_are_as_small_as_those_of_zstandard(compiled: ModuleType, name: str, count: int) -> None:
    planes = [plane_of(name, count, seed) for seed in range(4)]
    encoder = np.zeros(compiled.ENCODER_BYTES, np.uint8)
    ours = sum(encode(compiled, encoder, plane, first=seed == 0).size for seed, plane in enumerate(planes))
    assert ours <= 1.003 * sum(by_python(plane).size for plane in planes)


@given(
    pieces=st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.integers(1, 9000)), max_size=6),
    noise=st.integers(0, 3000),
    kind=st.integers(0, 2),
)
@pytest.mark.skipif(coder.compiled is None, reason="the extension is not built, or TENSORKEEP_CODER=python is set")
def test_every_plane_round_trips(pieces: list[tuple[bytes, int]], noise: int, kind: int) -> None:
    patterns = b"".join(pattern * times for pattern, times in pieces)
    plane = np.frombuffer(patterns + np.random.default_rng(0).bytes(noise), np.uint8)
    kinds = coder.compiled.kinds
    coder.compiled.use(kinds[kind % len(kinds)])
    try:
        frame = encode(coder.compiled, np.zeros(coder.compiled.ENCODER_BYTES, np.uint8), plane, first=True)
        decoder = np.zeros(coder.compiled.DECODER_BYTES, np.uint8)
        assert np.array_equal(decode(coder.compiled, decoder, frame, plane.size), plane)
    finally:
        coder.compiled.use(kinds[-1])
    assert zstandard.ZstdDecompressor().decompress(frame.data) == plane.tobytes()


def foreign_frames() -> Iterator[tuple[str, bytes]]:
    """Yield frames by the zstd library of a plane of 9,000 bytes, as no coder here writes them."""
    plane = plane_of("normal", 9000).tobytes()
    dictionary = zstandard.ZstdCompressionDict(plane[:4000])
    for level in (-5, 1, 3, 19):
        yield f"level {level}", zstandard.ZstdCompressor(level=level).compress(plane)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(plane)
    yield "checksum", frame
    yield "wrong checksum", frame[:-1] + bytes([frame[-1] ^ 1])
    yield "no content size", zstandard.ZstdCompressor(write_content_size=False).compress(plane)
    yield "dictionary", zstandard.ZstdCompressor(dict_data=dictionary).compress(plane)
    yield "two frames", zstandard.ZstdCompressor().compress(plane[:4500]) * 2
    yield "skippable", bytes.fromhex("502a4d18 02000000 7f80")
    yield "skippable before", bytes.fromhex("502a4d18 02000000 7f80") + frame
    yield "skippable after", frame + bytes.fromhex("502a4d18 02000000 7f80")
    yield "bytes after", frame + b"\0"
    yield "large window", bytes.fromhex("28b52ffd 80 a0 28230000") + frame[6:]
    yield "nothing", b""


FOREIGN = dict(foreign_frames())


def outcome(python: PythonCoder, frame: bytes) -> bytes | str:
    try:
        return python.decode(0, np.frombuffer(frame, np.uint8), 9000).tobytes()
    except CodecError as error:
        return str(error)


@pytest.mark.parametrize("label", FOREIGN)
def test_frames_of_other_writers_are_read_or_refused_as_by_zstandard(compiled: ModuleType, label: str) -> None:
    found = outcome(CompiledCoder(), FOREIGN[label])
    assert found == outcome(PythonCoder(), FOREIGN[label])
    assert (found == plane_of("normal", 9000).tobytes()) == (label.startswith("level") or label == "checksum")
