"""How fast one core codes and decodes weights with each coder, checksums included, and how small they get.

Blocks of every dtype, more of them than fit in a cache, are coded and decoded by the compiled coder and by the one in
Python in turns. ``lossless.py`` writes the same to a JSON file.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tensorkeep.cli.text import Table
from tensorkeep.codecs import planes, probe
from tensorkeep.codecs.base import Bytes, HashedInput
from tensorkeep.codecs.coder import CompiledCoder, PythonCoder
from tensorkeep.formats.base import BLOCK_BYTES
from tensorkeep.formats.checksummed_json import digest, new_hasher
from tensorkeep.state.dtypes import BY_NAME, DType

DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
BLOCKS = 12
CODECS = {"compiled": planes.PlanesCodec(CompiledCoder), "python": planes.PlanesCodec(PythonCoder)}


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one coder: raw and stored bytes of all blocks, and seconds of processor time."""

    dtype: str
    coder: str
    raw_bytes: int
    stored_bytes: int
    encode_seconds: float
    decode_seconds: float

    @property
    def size(self) -> float:
        """Stored bytes over raw bytes."""
        return self.stored_bytes / self.raw_bytes

    @property
    def encode(self) -> float:
        """GB of raw bytes a second."""
        return self.raw_bytes / self.encode_seconds / 1e9

    @property
    def decode(self) -> float:
        """GB of raw bytes a second."""
        return self.raw_bytes / self.decode_seconds / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    rounds = [each for name in options.dtypes for each in measure(BY_NAME[name], options.rounds)]
    headings = ("dtype", "coder", ">size", ">coded GB/s", ">decoded GB/s", ">times as fast")
    Table(headings, rows(rounds)).show()
    return 0


def measure(dtype: DType, rounds: int) -> list[Round]:
    """Code and decode the blocks with both coders in turns, after a round that is not counted."""
    blocks = weights(dtype)
    out = np.zeros(probe.bound(BLOCK_BYTES), np.uint8)
    back = np.zeros(BLOCK_BYTES, np.uint8)
    aside = np.zeros(BLOCK_BYTES, np.uint8)
    found = []
    by_default = planes.CODEC
    for number in range(rounds + 1):
        for name, codec in CODECS.items():
            planes.CODEC = codec  # the one that the probe takes
            encode = decode = 0.0
            stored = 0
            for raw in blocks:
                began = time.process_time()
                reading = HashedInput(aside, wide=False)
                chosen, length = probe.encode(raw, dtype, out, reading)
                expected = reading.hexdigest(), digest(out[:length])
                encode += time.process_time() - began
                assert chosen == "planes"
                began = time.process_time()
                found_stored = digest(out[:length])
                hasher = new_hasher()
                codec.decode(out[:length], dtype, back, done=hasher.update)
                assert (hasher.hexdigest(), found_stored) == expected
                decode += time.process_time() - began
                stored += length
            if number:
                found.append(Round(dtype.name, name, len(blocks) * BLOCK_BYTES, stored, encode, decode))
    planes.CODEC = by_default
    return found


def weights(dtype: DType) -> list[Bytes]:
    """Return blocks of N(0, 0.02)."""
    generator = torch.Generator().manual_seed(0)
    count = BLOCK_BYTES // dtype.itemsize
    kind = getattr(torch, dtype.name)
    return [(torch.randn(count, generator=generator) * 0.02).to(kind).view(torch.uint8).numpy() for _ in range(BLOCKS)]


def rows(rounds: list[Round]) -> list[tuple[str, ...]]:
    """Return a row for each dtype and coder, of medians."""

    def median(dtype: str, coder: str, of: Callable[[Round], float]) -> float:
        return statistics.median(of(each) for each in rounds if (each.dtype, each.coder) == (dtype, coder))

    found = []
    for dtype, coder in dict.fromkeys((each.dtype, each.coder) for each in rounds):
        size = median(dtype, coder, lambda each: each.size)
        encode, decode = median(dtype, coder, lambda r: r.encode), median(dtype, coder, lambda r: r.decode)
        by = encode / median(dtype, "python", lambda r: r.encode), decode / median(dtype, "python", lambda r: r.decode)
        found.append((dtype, coder, f"{size:.4f}", f"{encode:.2f}", f"{decode:.2f}", f"{by[0]:.2f}, {by[1]:.2f}"))
    return found


if __name__ == "__main__":
    sys.exit(main())
