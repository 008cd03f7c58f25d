"""Frames of planes: each coder and zstandard read what the others wrote, of every size and distribution."""

from collections.abc import Iterator
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from coder.oracle import GUARD, Oracle, outcome
from coder.planes import PLANES, SIZES, plane_of
from tensorkeep.codecs import coder
from tensorkeep.codecs.base import Bytes
from tensorkeep.codecs.coder import RUN, CompiledCoder, PythonCoder
from tensorkeep.codecs.zstd import zstd_bound
from tensorkeep.testing.cases import case

BLOCK = 128 * 1024


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


def by_python(plane: Bytes) -> Bytes:
    out = np.empty(zstd_bound(plane.size), np.uint8)
    return out[: PythonCoder().encode(0, plane, out, first=True)]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_each_coder_reads_what_the_others_wrote(compiled: ModuleType, share: tuple[int, int], every: int) -> None:
    encoder, oracle = np.zeros(compiled.ENCODER_BYTES, np.uint8), Oracle(compiled)
    python, zstd = PythonCoder(), zstandard.ZstdDecompressor()
    for index, name in enumerate(PLANES):
        sizes = SIZES[(index + 3 * share[0]) % every :: every]
        # The second may have the code of the first, the third not.
        for count, (seed, first) in product(sizes, enumerate((True, False, True))):
            with case(f"{name}, {count} bytes, plane {seed}"):
                plane = plane_of(name, count, seed)
                frame = encode(compiled, encoder, plane, first=first)
                assert frame.size <= bound(count)
                assert zstd.decompress(frame.data, allow_extra_data=False) == plane.tobytes()
                assert oracle.accepts(frame.tobytes(), count)
                if count <= RUN:
                    assert np.array_equal(python.decode(0, frame, count), plane)
                    assert np.array_equal(CompiledCoder().decode(0, by_python(plane), count), plane)


def test_all_instructions_write_the_same_frames(extension: ModuleType) -> None:
    for name, count in product(PLANES, (257, 16_385, 131_073)):
        frames = set()
        for kind in extension.kinds:
            extension.use(kind)
            encoder = np.zeros(extension.ENCODER_BYTES, np.uint8)
            frames.add(encode(extension, encoder, plane_of(name, count), first=True).tobytes())
        assert len(frames) == 1, f"{name}, {count} bytes"


def test_a_short_block_after_one_that_does_not_shrink_stays_in_bounds(extension: ModuleType) -> None:
    # The code of both blocks is worth nothing to the first, and its description is longer than the second.
    chances = np.linspace(1, 1.9, 256) / np.linspace(1, 1.9, 256).sum()
    plane = np.random.default_rng(0).choice(256, BLOCK + 100, p=chances).astype(np.uint8)
    for size in (BLOCK + tail for tail in (1, 2, 5, 20, 100)):
        encoder = np.zeros(extension.ENCODER_BYTES, np.uint8)
        assert encode(extension, encoder, plane[:size], first=True).size > size


def test_too_little_space_is_refused(extension: ModuleType) -> None:
    encoder = np.zeros(extension.ENCODER_BYTES, np.uint8)
    for count in (0, 1, 255, 256, BLOCK, BLOCK + 1):
        with case(count), pytest.raises(ValueError, match="too small"):
            encode(extension, encoder, plane_of("noise", count), first=True, space=bound(count) - 1)


# Not so for planes in which even zstandard's small table finds matches (sparse ones, which the codec codes at level 1),
# and for those whose symbols are distributed differently over a run, as one code serves two blocks of 128 KiB, and a
# sample of a period may miss the rest of it: sorted planes, halves, long periods.
def test_frames_are_as_small_as_those_of_zstandard(extension: ModuleType) -> None:
    names = ("two symbols", "all symbols", "noise", "fibonacci", "geometric", "normal")
    for name, count in product(names, (65_536, RUN)):
        planes = [plane_of(name, count, seed) for seed in range(4)]
        encoder = np.zeros(extension.ENCODER_BYTES, np.uint8)
        ours = sum(encode(extension, encoder, plane, first=seed == 0).size for seed, plane in enumerate(planes))
        assert ours <= 1.003 * sum(by_python(plane).size for plane in planes), f"{name}, {count} bytes"


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
        assert Oracle(coder.compiled).accepts(frame.tobytes(), plane.size)
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


@pytest.mark.usefixtures("compiled")
def test_frames_of_other_writers_are_read_or_refused_as_by_zstandard() -> None:
    for label, frame in foreign_frames():
        with case(label):
            found = outcome(CompiledCoder(), frame, 9000)
            assert found == outcome(PythonCoder(), frame, 9000)
            assert (found == plane_of("normal", 9000).tobytes()) == (label.startswith("level") or label == "checksum")
