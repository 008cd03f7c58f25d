"""The C coder compared with zstandard for any bytes; run as a program, it damages frames for a while.

PYTHONPATH=packages/tensorkeep/tests python -m coder.oracle SECONDS SEED
"""

import sys
import time
from collections import Counter
from types import ModuleType

import numpy as np
import zstandard

from coder.crafted import ACCEPTED, REFUSED
from coder.planes import PLANES, plane_of
from tensorkeep.codecs import coder
from tensorkeep.codecs.base import CodecError
from tensorkeep.codecs.coder import RUN, CompiledCoder, PythonCoder

GUARD = 0xA5
MARGIN = 512
_EXTREMES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)


class Oracle:
    """Decodes with the C coder, and compares what it accepts with zstandard; the state of its decoder is kept."""

    def __init__(self, compiled: ModuleType) -> None:
        self._compiled = compiled
        self._decoder = np.zeros(compiled.DECODER_BYTES, np.uint8)
        self._memory = np.empty(0, np.uint8)
        self._zstd = zstandard.ZstdDecompressor()

    def accepts(self, frame: bytes, count: int) -> bool:
        """Return whether the C coder decodes a frame; assert that zstandard agrees and that no guard is overwritten."""
        if self._memory.size < count + 2 * MARGIN:
            self._memory = np.empty(2 * count + 2 * MARGIN, np.uint8)
        memory = self._memory[: count + 2 * MARGIN]
        memory[:MARGIN] = memory[-MARGIN:] = GUARD
        out = memory[MARGIN:-MARGIN]
        accepted = self._compiled.decode_frame(self._decoder, frame, out)
        assert (memory[:MARGIN] == GUARD).all() and (memory[-MARGIN:] == GUARD).all(), "wrote outside"
        if accepted:
            assert self._zstd.decompress(frame, allow_extra_data=False) == out.tobytes(), "zstandard differs"
        return bool(accepted)


def outcome(python: PythonCoder, frame: bytes, count: int) -> bytes | str:
    """Return the plane that a coder decodes, or its error."""
    try:
        return python.decode(0, np.frombuffer(frame, np.uint8), count).tobytes()
    except CodecError as error:
        return str(error)


def sources(random: np.random.Generator) -> list[tuple[bytes, int]]:
    """Return some good frames, by each writer, and the frames made by hand, with the lengths to which they decode."""
    found = [(data, count) for count, data in (ACCEPTED | REFUSED).values() if count < 10_000]
    for _ in range(40):
        count = int(random.choice([random.integers(2, 400), random.integers(2, 4000), random.integers(2, RUN)]))
        plane = plane_of(str(random.choice(list(PLANES))), count, int(random.integers(1000)))
        out = np.empty(2 * count + 1000, np.uint8)
        writers: list[PythonCoder] = [CompiledCoder(), PythonCoder()]
        found += [(out[: each.encode(0, plane, out, first=True)].tobytes(), count) for each in writers]
        level = int(random.choice([-5, 1, 3, 19]))
        found.append((zstandard.ZstdCompressor(level=level).compress(plane.data), count))
    return found


def damaged(random: np.random.Generator, frame: bytes) -> bytes:
    """Return a frame with a few random changes, most of them at the front, where its structure is."""
    data = bytearray(frame)
    for _ in range(int(random.integers(1, 4))):
        if not data:
            break
        place = int(random.integers(min(len(data), int(random.choice([16, 160, len(data)])))))
        length = int(random.integers(1, 9))
        match int(random.integers(6)):
            case 0:
                data[place] ^= 1 << int(random.integers(8))
            case 1:
                data[place] = int(random.choice(_EXTREMES))
            case 2:
                data[place : place + length] = random.bytes(length)
            case 3:
                del data[place : place + length]
            case 4:
                start = int(random.integers(len(data)))
                data[place:place] = data[start : start + length]
            case 5:
                del data[place:]
    return bytes(data)


def main(seconds: float, seed: int) -> None:
    start, cases = time.monotonic(), Counter[str]()
    oracles = {kind: Oracle(coder.compiled) for kind in coder.compiled.kinds}
    coders = CompiledCoder(), PythonCoder()
    while time.monotonic() < start + seconds or not cases:
        random = np.random.default_rng(seed)
        for frame, count in sources(random):
            for _ in range(50):
                each = damaged(random, frame)
                accepted = []
                try:
                    for kind, oracle in oracles.items():
                        coder.compiled.use(kind)
                        accepted.append(oracle.accepts(each, count))
                    assert len(set(accepted)) == 1, "instructions differ"
                    assert outcome(coders[0], each, count) == outcome(coders[1], each, count), "coders differ"
                except (AssertionError, zstandard.ZstdError) as error:
                    sys.exit(f"oracle: {error}: seed {seed}, {count} bytes from {each.hex()}")
                cases["accepted" if accepted[0] else "refused"] += 1
        seed += 1
    counts = f"{cases.total()} damaged frames ({cases['accepted']} accepted)"
    print(f"oracle: {counts}, {seconds:.0f} seconds, to seed {seed}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
