"""How fast one core codes and decodes weights with each coder, checksums included, and how small they get.

Blocks of every dtype, more of them than fit in a cache, are coded and decoded by the compiled coder and by the one in
Python in turns. ``lossless.py`` writes the same to a JSON file.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict

import numpy as np
import torch

from figures import Samples
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    samples: Samples = {}
    for name in options.dtypes:
        samples |= measure(BY_NAME[name], options.rounds)
    headings = ("dtype", "coder", ">size", ">coded GB/s", ">decoded GB/s", ">times as fast")
    Table(headings, [row for name in options.dtypes for row in rows(samples, name)]).show()
    return 0


def measure(dtype: DType, rounds: int) -> Samples:
    """Code and decode the blocks with both coders in turns, after a round that is not counted.

    Returns the size, stored over raw bytes, and GB of raw bytes a second of processor time by dtype and coder.
    """
    blocks = weights(dtype)
    out = np.zeros(probe.bound(BLOCK_BYTES), np.uint8)
    back = np.zeros(BLOCK_BYTES, np.uint8)
    aside = np.zeros(BLOCK_BYTES, np.uint8)
    found: Samples = defaultdict(list)
    raw_bytes = len(blocks) * BLOCK_BYTES
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
            rates = {"code": raw_bytes / encode / 1e9, "decode": raw_bytes / decode / 1e9, "size": stored / raw_bytes}
            for what, value in rates.items() if number else ():
                found[f"{what} {dtype.name} {name}"].append(value)
    planes.CODEC = by_default
    return found


def weights(dtype: DType) -> list[Bytes]:
    """Return blocks of N(0, 0.02)."""
    generator = torch.Generator().manual_seed(0)
    count = BLOCK_BYTES // dtype.itemsize
    kind = getattr(torch, dtype.name)
    return [(torch.randn(count, generator=generator) * 0.02).to(kind).view(torch.uint8).numpy() for _ in range(BLOCKS)]


def rows(samples: Samples, dtype: str) -> list[tuple[str, ...]]:
    """Return a row of medians for each coder."""

    def median(what: str, coder: str) -> float:
        return statistics.median(samples[f"{what} {dtype} {coder}"])

    found = []
    for coder in CODECS:
        encode, decode = median("code", coder), median("decode", coder)
        faster = f"{encode / median('code', 'python'):.2f}, {decode / median('decode', 'python'):.2f}"
        found.append((dtype, coder, f"{median('size', coder):.4f}", f"{encode:.2f}", f"{decode:.2f}", faster))
    return found


if __name__ == "__main__":
    sys.exit(main())
