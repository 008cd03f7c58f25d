"""How fast one core codes and decodes the blocks of a state."""

import timeit
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tensorkeep.codecs import probe
from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import UsageError
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.state.dtypes import DType
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.strided import Bytes
from tensorkeep.state.tree import Flat

MOST_BLOCKS = 12


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Bytes per second of tensor data on one thread, over all blocks, and how small they got.

    Attributes
    ----------
    raw_bytes, stored_bytes : int
    encode, decode : float
        Bytes per second.
    codecs : dict of str to int
        How many blocks each codec got.
    """

    raw_bytes: int
    stored_bytes: int
    encode: float
    decode: float
    codecs: dict[str, int]


def measure_codecs(flat: Flat[Leaf]) -> CodecRate:
    """Code and decode up to 12 whole blocks spread over a state's tensors, on one thread, as a lossless save does.

    Raises
    ------
    UsageError
        If no tensor has a whole block.
    """
    blocks = _spread(list(_whole_blocks(flat)))
    out = np.empty(probe.bound(BLOCK_BYTES), np.uint8)
    back = np.empty(BLOCK_BYTES, np.uint8)
    out.fill(0)
    back.fill(0)
    stored = 0
    encoding = decoding = 0.0
    codecs: dict[str, int] = {}
    for block, dtype in blocks:
        coded: list[tuple[str, int]] = []
        encoding += timeit.timeit(lambda: coded.append(probe.encode(block, dtype, out)), number=1)  # noqa: B023
        name, length = coded[0]
        codec = CODECS.get(name)
        decoding += timeit.timeit(lambda: codec.decode(out[:length], dtype, back), number=1)  # noqa: B023
        if not np.array_equal(back, block):
            raise AssertionError(f"codec {name} decoded to different bytes")
        stored += length
        codecs[name] = codecs.get(name, 0) + 1
    raw = len(blocks) * BLOCK_BYTES
    return CodecRate(raw, stored, raw / encoding, raw / decoding, codecs)


def _whole_blocks(flat: Flat[Leaf]) -> Iterator[tuple[Bytes, DType]]:
    for leaf in flat.leaves.values():
        memory = leaf.host_bytes()
        if memory is not None:
            for start in range(0, memory.size - BLOCK_BYTES + 1, BLOCK_BYTES):
                yield memory[start : start + BLOCK_BYTES], leaf.dtype


def _spread(blocks: list[tuple[Bytes, DType]]) -> list[tuple[Bytes, DType]]:
    if not blocks:
        raise UsageError("no tensor is as large as a block of 16 MiB", remedy="take a larger state")
    places = np.linspace(0, len(blocks) - 1, min(MOST_BLOCKS, len(blocks))).astype(int)
    return [blocks[place] for place in places]
