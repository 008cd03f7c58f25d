"""Which codec a block of a lossless checkpoint gets, decided on a few small samples.

Trained weights go to ``planes``, whose own probe decides plane by plane. Blocks that repeat themselves (rows of an
embedding, masks, zeros) may do better with ``zstd``: a look at a few windows tells whether anything repeats, and only
then are both tried on a larger sample. What neither shrinks stays ``raw``.
"""

from __future__ import annotations

import numpy as np

from tensorkeep.codecs import planes, raw, zstd
from tensorkeep.codecs.base import Bytes, Codec
from tensorkeep.state.dtypes import DType

# Below this, no saving pays for a header.
_TINY = 512
# Up to this, the block is its own sample.
_SMALL = 4 << 10
_WINDOWS, _WINDOW = 8, 32 << 10
_TRIAL_PIECES, _TRIAL_PIECE = 4, 256 << 10
_TRIAL_SHARE = 16
_ESTIMATE_PIECE = 64 << 10

# One word in 16 is looked at, chosen by its value, so that a row that comes again has the same words chosen.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_CHOSEN_SHIFT = np.uint64(60)
_REPEATED_SHARE = 0.005

# `planes` decodes faster than `zstd` on most data, so a tie goes to it.
_WORTH_MATCHING = 0.97
_WORTH_CODING = 0.98


def bound(nbytes: int) -> int:
    """Return the most bytes that ``encode`` needs as scratch for a block of that many raw bytes."""
    return max(codec.bound(nbytes) for codec in (planes.CODEC, zstd.CODEC, raw.CODEC))


def choose(block: Bytes, dtype: DType) -> Codec:
    """Return the codec that is expected to shrink a block best at a disk's speed.

    Parameters
    ----------
    block : uint8 array, shape (n,)
        Raw bytes, in C order.
    dtype : DType
        What they are.

    Returns
    -------
    Codec
        ``planes``, ``zstd`` or ``raw``.
    """
    if block.size < _TINY:
        return raw.CODEC
    if block.size <= _SMALL:
        return _try(block, dtype)
    if _repeats(block):
        return _try(_spread(block, _trial_piece(block.size), _TRIAL_PIECES, dtype.itemsize), dtype)
    return planes.CODEC if planes.CODEC.shrinks(block, dtype) else raw.CODEC


def encode(block: Bytes, dtype: DType, out: Bytes) -> tuple[str, int]:
    """Code a block by the chosen codec, or store it raw where the coded form is not smaller.

    Parameters
    ----------
    block : uint8 array, shape (n,)
        Raw bytes, in C order.
    dtype : DType
        What they are.
    out : uint8 array, shape (m,), m >= bound(n)
        Scratch that the caller owns.

    Returns
    -------
    tuple of str and int
        The codec's name, and the bytes at the front of ``out``: never more than n.
    """
    codec = choose(block, dtype)
    length = codec.encode(block, dtype, out)
    if length < block.size:
        return codec.name, length
    return raw.CODEC.name, raw.CODEC.encode(block, dtype, out)


def estimate(block: Bytes, dtype: DType) -> float:
    """Return the share of a block that is left when it is coded, going by a few samples of it."""
    sample = block if block.size <= _SMALL else _spread(block, _ESTIMATE_PIECE, _TRIAL_PIECES, dtype.itemsize)
    if not sample.size:
        return 1.0
    out = np.empty(bound(sample.size), np.uint8)
    return (
        min(zstd.CODEC.encode(sample, dtype, out), planes.CODEC.encode(sample, dtype, out), sample.size) / sample.size
    )


def _repeats(block: Bytes) -> bool:
    """Tell whether eight-byte words come again, near or far, more often than noise would have it."""
    words = _spread(block, _WINDOW, _WINDOWS, 8).view(np.uint64)
    chosen = words[(words * _MULTIPLIER) >> _CHOSEN_SHIFT == 0]
    if chosen.size < 2:
        return False
    chosen.sort()
    return bool(np.count_nonzero(chosen[1:] == chosen[:-1]) > _REPEATED_SHARE * chosen.size)


def _try(sample: Bytes, dtype: DType) -> Codec:
    out = np.empty(bound(sample.size), np.uint8)
    matched = zstd.CODEC.encode(sample, dtype, out)
    split = planes.CODEC.encode(sample, dtype, out)
    if min(matched, split) >= _WORTH_CODING * sample.size:
        return raw.CODEC
    return zstd.CODEC if matched < _WORTH_MATCHING * split else planes.CODEC


def _trial_piece(nbytes: int) -> int:
    return min(max(nbytes // _TRIAL_SHARE // _TRIAL_PIECES, _WINDOW), _TRIAL_PIECE)


def _spread(block: Bytes, piece: int, pieces: int, alignment: int) -> Bytes:
    """Return pieces of the block from its start to its end, each a multiple of the alignment, as one array."""
    whole = block.size - block.size % alignment
    piece -= piece % alignment
    if whole <= piece * pieces:
        return block[:whole]
    starts = np.linspace(0, whole - piece, pieces).astype(int) // alignment * alignment
    return np.concatenate([block[start : start + piece] for start in starts])
