"""Planes of many distributions, for tests of coders."""

from collections.abc import Callable

import numpy as np

from tensorkeep.codecs.base import Bytes
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.codec_suite import as_bytes

Make = Callable[[np.random.Generator, int], Bytes]

# Around every limit of the format and of the coder: one stream or four, the sizes of the header of literals, the length
# of a frame in one, two and four bytes, the sample, a block and a run.
SIZES = (
    *(0, 1, 2, 3, 5, 6, 255, 256, 257, 511, 512, 1023, 1024, 1025, 16_383, 16_384, 16_385),
    *(65_535, 65_536, 65_537, 65_791, 65_792, 131_071, 131_072, 131_073, 262_143, 262_144, 262_145),
)


def fibonacci(random: np.random.Generator, count: int) -> Bytes:
    """Return symbols with Fibonacci numbers as counts: the optimal code has one bit more for each."""
    counts = [1, 1]
    while sum(counts) < count:
        counts.append(counts[-1] + counts[-2])
    return random.permutation(np.repeat(np.arange(len(counts)), counts))[:count].astype(np.uint8)


def normal(random: np.random.Generator, count: int) -> Bytes:
    """Return the exponents of weights."""
    weights = as_bytes((random.standard_normal(count) * 0.02).astype(BY_NAME["bfloat16"].numpy))
    return (weights.view("<u2") >> 7).astype(np.uint8)


def geometric(random: np.random.Generator, count: int) -> Bytes:
    return np.minimum(random.geometric(0.3, count), 255).astype(np.uint8)


def halves(random: np.random.Generator, count: int) -> Bytes:
    """Return a first half that differs from the second, so that a common code fits neither."""
    return np.where(np.arange(count) < count // 2, 0, 128).astype(np.uint8) + geometric(random, count)


def one_frequent(random: np.random.Generator, count: int) -> Bytes:
    """Return noise with one frequent symbol: most codes have nine bits, and values that do not fit in a byte."""
    return np.where(random.random(count) < 0.3, 7, random.integers(0, 256, count)).astype(np.uint8)


def rare_last(random: np.random.Generator, count: int) -> Bytes:
    plane = geometric(random, count)
    plane[-1:] = 255
    return plane


def rare_anywhere(random: np.random.Generator, count: int) -> Bytes:
    plane = geometric(random, count)
    if count:
        plane[random.integers(0, count, 3)] = random.integers(0, 256, 3)
    return plane


def periodic(period: int) -> Make:
    """Return planes whose first quarter of each period is noise and whose rest is constant: a sample may meet one."""

    def make(random: np.random.Generator, count: int) -> Bytes:
        noise = random.integers(0, 256, count, np.uint8)
        return np.where(np.arange(count) % period < period // 4, noise, 7).astype(np.uint8)

    return make


PLANES: dict[str, Make] = {
    "constant": lambda random, count: np.full(count, 200, np.uint8),
    "two symbols": lambda random, count: random.choice(np.array([0, 255], np.uint8), count),
    "mostly one of two": lambda random, count: (random.random(count) < 0.01).astype(np.uint8),
    "all symbols": lambda random, count: random.permutation(np.arange(count, dtype=np.uint8)),
    "noise": lambda random, count: random.integers(0, 256, count, np.uint8),
    "almost noise": lambda random, count: np.minimum(*random.integers(0, 256, (2, count), np.uint8)),
    "one frequent": one_frequent,
    "fibonacci": fibonacci,
    "geometric": geometric,
    "normal": normal,
    "sparse": lambda random, count: normal(random, count) * (random.random(count) < 0.05),
    "sorted": lambda random, count: np.sort(normal(random, count)),
    "halves": halves,
    "rare last": rare_last,
    "rare anywhere": rare_anywhere,
    **{f"period {period}": periodic(period) for period in (3, 64, 4096, 7919, 8192, 65_536, 131_072)},
}


def plane_of(name: str, count: int, seed: int = 0) -> Bytes:
    plane = PLANES[name](np.random.default_rng([seed, count]), count)
    assert plane.dtype == np.uint8 and plane.size == count
    return plane
