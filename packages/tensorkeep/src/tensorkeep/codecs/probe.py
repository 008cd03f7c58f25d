"""``compression="lossless"``: a few small samples choose the codec of every block."""

import numpy as np

from tensorkeep.codecs import planes, raw, zstd
from tensorkeep.codecs.base import Bytes, Codec, HashedInput
from tensorkeep.state.dtypes import DType

# Below this size, a header costs more than is saved.
_TINY = 512
# Up to this size, the whole block is the sample.
_SMALL = 4 << 10
_WINDOWS, _WINDOW = 8, 32 << 10
_TRIAL_PIECES, _TRIAL_PIECE = 4, 256 << 10
_TRIAL_DIVISOR = 16
_ESTIMATE_PIECE = 64 << 10

# One word in 16 is compared. Its value selects it, so that repeated rows have the same words selected.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SELECTED_SHIFT = np.uint64(60)
_REPEATED_FRACTION = 0.005

# `planes` decodes faster than `zstd` on most data, so it wins a tie.
_WORTH_MATCHING = 0.97
_WORTH_CODING = 0.98


def bound(nbytes: int) -> int:
    """The size of the ``out`` buffer that ``encode`` needs."""
    return max(codec.bound(nbytes) for codec in (planes.CODEC, zstd.CODEC, raw.CODEC))


def choose(block: Bytes, dtype: DType) -> Codec:
    """The codec (``planes``, ``zstd`` or ``raw``) that is expected to shrink a block most, at disk speed."""
    return _choose(block, dtype)[0]


def _choose(block: Bytes, dtype: DType) -> tuple[Codec, planes.PlaneModes | None]:
    """The chosen codec, and the modes of the planes if they were chosen."""
    # Trained weights get ``planes``, which samples its planes itself. Blocks with repetitions (equal rows of an
    # embedding, masks, zeros) may shrink more with ``zstd``: if a few windows contain repeated words, both are tried on
    # a larger sample.
    if block.size < _TINY:
        return raw.CODEC, None
    if block.size <= _SMALL:
        return _try(block, dtype), None
    if _repeats(block):
        piece = min(max(block.size // _TRIAL_DIVISOR // _TRIAL_PIECES, _WINDOW), _TRIAL_PIECE)
        return _try(_spread(block, piece, _TRIAL_PIECES, dtype.itemsize), dtype), None
    plan = planes.CODEC.plan(block, dtype)
    return (planes.CODEC, plan) if plan.shrinks else (raw.CODEC, None)


def encode(block: Bytes, dtype: DType, out: Bytes, data: HashedInput | None = None) -> tuple[str, int]:
    """Encode by the chosen codec, or raw, which ``data`` does not hash; return the codec's name and the length."""
    # The block may change meanwhile. Then the choice may be worse, but what is coded is still what is hashed.
    codec, plan = _choose(block, dtype)
    if codec is planes.CODEC:
        length = planes.CODEC.encode(block, dtype, out, plan=plan, data=data)
    elif codec is zstd.CODEC:
        length = codec.encode(data.read(block) if data else block, dtype, out)
    if codec is raw.CODEC or length >= block.size:
        return raw.CODEC.name, raw.CODEC.encode(block, dtype, out)
    return codec.name, length


def estimate(block: Bytes, dtype: DType) -> float:
    """The expected size of a coded block relative to its raw size, from a few samples."""
    sample = block if block.size <= _SMALL else _spread(block, _ESTIMATE_PIECE, _TRIAL_PIECES, dtype.itemsize)
    if not sample.size:
        return 1.0
    out = np.empty(bound(sample.size), np.uint8)
    coded = [codec.encode(sample, dtype, out) for codec in (zstd.CODEC, planes.CODEC)]
    return min(*coded, sample.size) / sample.size


def _repeats(block: Bytes) -> bool:
    """Whether eight-byte words are repeated, near or far, more often than in noise."""
    # Sorting the selected words brings equal ones together, near or far apart in the block.
    words = _spread(block, _WINDOW, _WINDOWS, 8).view(np.uint64)
    selected = words[(words * _MULTIPLIER) >> _SELECTED_SHIFT == 0]
    if selected.size < 2:
        return False
    selected.sort()
    return bool(np.count_nonzero(selected[1:] == selected[:-1]) > _REPEATED_FRACTION * selected.size)


def _try(sample: Bytes, dtype: DType) -> Codec:
    out = np.empty(bound(sample.size), np.uint8)
    matched = zstd.CODEC.encode(sample, dtype, out)
    split = planes.CODEC.encode(sample, dtype, out)
    if min(matched, split) >= _WORTH_CODING * sample.size:
        return raw.CODEC
    return zstd.CODEC if matched < _WORTH_MATCHING * split else planes.CODEC


def _spread(block: Bytes, piece: int, pieces: int, alignment: int) -> Bytes:
    """Pieces of the block from its start to its end, each a multiple of the alignment, as one array."""
    whole = block.size - block.size % alignment
    piece -= piece % alignment
    if whole <= piece * pieces:
        return block[:whole]
    starts = np.linspace(0, whole - piece, pieces).astype(int) // alignment * alignment
    return np.concatenate([block[start : start + piece] for start in starts])
