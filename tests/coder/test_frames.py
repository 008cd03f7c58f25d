"""Frames of the C coder: space, and the limits of the format."""

import numpy as np
import pytest

from tensorkeep.codecs import coder
from tensorkeep.codecs.base import Bytes

if coder.compiled is None:
    pytest.skip("the extension is not built, or TENSORKEEP_CODER=python is set", allow_module_level=True)

BLOCK = 128 * 1024
GUARD = 0xA5


def bound(count: int) -> int:
    return 13 + count + 3 * (count // BLOCK + 1)


def encode(data: Bytes, space: int) -> Bytes:
    """Encode to exactly ``space`` bytes, and assert that those behind them are as before."""
    memory = np.full(space + 512, GUARD, np.uint8)
    length = coder.compiled.encode_frame(np.zeros(coder.compiled.ENCODER_BYTES, np.uint8), data, memory[:space], True)
    assert (memory[space:] == GUARD).all(), "wrote past the end"
    return memory[:length]


@pytest.mark.parametrize("tail", [1, 2, 5, 20, 100])
def test_a_short_block_after_one_that_does_not_shrink_stays_in_bounds(tail: int) -> None:
    # The code of both blocks is worth nothing to the first, and its description is longer than the second.
    chances = np.linspace(1, 1.9, 256) / np.linspace(1, 1.9, 256).sum()
    data = np.random.default_rng(0).choice(256, BLOCK + tail, p=chances).astype(np.uint8)
    assert encode(data, bound(data.size)).size > data.size
