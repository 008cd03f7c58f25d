"""Samples of plain tensors: a rank's value of a tensor that others have as well is stored for all of them."""

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import xxhash

from tensorkeep.errors import StateMismatchWarning, stack_level_of_caller
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.sharded import ShardedLeaf

_SAMPLE_BYTES = 1024


def sample_digests(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Return a checksum of the first and the last bytes of each plain tensor in host memory, by name."""
    found: dict[str, str] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, ShardedLeaf) or not leaf.nbytes or (leaf.is_torch and leaf.array.device.type != "cpu"):
            continue
        count = min(leaf.nbytes, _SAMPLE_BYTES // leaf.dtype.itemsize * leaf.dtype.itemsize)
        sample = np.empty(2 * count, np.uint8)
        leaf.read(0, count, sample[:count])
        leaf.read(leaf.nbytes - count, leaf.nbytes, sample[count:])
        found[name] = xxhash.xxh3_64_hexdigest(sample.data)
    return found


def warn_of_differing(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Warn of the plain tensors whose samples differ between ranks, of which one rank's will be stored."""
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(by_rank):
        for name, digest in digests.items():
            other, expected = first.setdefault(name, (rank, digest))
            if digest != expected:
                differing.setdefault(name, (other, rank))
    if differing:
        name, (one, other) = next(iter(differing.items()))
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        text = (
            f"{name!r}{more}: plain tensors that differ between ranks {one} and {other}; the values of one rank are "
            "saved for all. Give each rank keys of its own, or wrap them: tensorkeep.distributed.PerRank(value)"
        )
        warnings.warn(StateMismatchWarning(text), stacklevel=stack_level_of_caller())
