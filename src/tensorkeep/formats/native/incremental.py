"""Writing only what has changed since an earlier checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tensorkeep.codecs import probe, zstd
from tensorkeep.formats.blockfile.plan import Block, FilePlan
from tensorkeep.formats.blockfile.records import BlockRecord, PlaceRecord
from tensorkeep.formats.blockfile.stream import CodedStream, How, encode
from tensorkeep.formats.native.previous import Base, Found, Previous
from tensorkeep.formats.sealed import wide_digest
from tensorkeep.io.buffers import round_up
from tensorkeep.io.files import Bytes

WORTH_A_DIFFERENCE = 0.95
"""A difference is stored if it takes less than this share of the whole block: it costs more to read."""

_RECORD_BYTES = 100
"""What the manifest takes to say what a block is the difference from."""

_SAMPLED = 2 * 1024**2
"""Bytes above which samples tell whether a difference is worth coding; up to there, coding takes less than they do."""

_GROUPS, _PIECES, _PIECE = 4, 16, 4096
"""The samples of a block: groups of pieces, of so many bytes each."""


@dataclass(frozen=True, slots=True)
class _Coded:
    """A coded difference, and whether it is certain to be shorter than the whole block would be."""

    codec: str
    length: int
    certain: bool


class ChangesStream(CodedStream):
    """A data file that holds the blocks which the earlier checkpoint does not have.

    Attributes
    ----------
    found : dict of (str, int) to (BlockRecord, PlaceRecord)
        By key and index, the blocks that are taken from the earlier checkpoint; their files have its numbers.
    bases : dict of (str, int) to Base
        What blocks of this file are differences from.
    """

    def __init__(
        self,
        path: Path,
        plan: FilePlan,
        groups: list[list[Block]],
        room: int,
        how: How,
        previous: Previous,
    ) -> None:
        super().__init__(path, plan, groups, room, how)
        self.found: dict[tuple[str, int], tuple[BlockRecord, PlaceRecord]] = {}
        self.bases: dict[tuple[str, int], Base] = {}
        self._previous = previous

    def _scratch_bytes(self, blocks: list[Block]) -> int:
        needs = [0]
        for block in blocks:
            base = self._previous.base_of(block)
            if base is not None:
                needs.append(_room(block) + self._previous.scratch_bytes(base, block.nbytes))
        return max(needs)

    def _store(self, block: Block, raw: Bytes, out: Bytes, scratch: Bytes) -> tuple[str, str, int] | None:
        digest = wide_digest(raw)
        key = block.leaf.key, block.index
        found: Found | None = self._previous.find(block, digest)
        if found is not None:
            self.found[key] = found.block, found.place
            return None
        base = self._previous.base_of(block)
        difference = None if base is None else self._difference(block, raw, digest, base, out, scratch)
        if base is None or difference is None:
            return digest, *encode(raw, block, self._how.codec, out)
        if not difference.certain:
            # The difference itself lies coded in `out`: its raw bytes are not needed any more.
            name, length = encode(raw, block, self._how.codec, scratch)
            if difference.length + _RECORD_BYTES > WORTH_A_DIFFERENCE * length:
                out[:length] = scratch[:length]
                return digest, name, length
        self._previous.take(base)
        self.bases[key] = base
        return digest, difference.codec, difference.length

    def _difference(
        self, block: Block, raw: Bytes, digest: str, base: Base, out: Bytes, scratch: Bytes
    ) -> _Coded | None:
        """Code the difference from the base to the front of ``out``; None where samples say that it is not worth it."""
        changed = scratch[: block.nbytes]
        if not self._previous.read(base, block, changed, scratch[_room(block) :]):
            return None
        np.bitwise_xor(changed, raw, out=changed)
        dtype = block.leaf.source.dtype
        if block.nbytes <= _SAMPLED:
            return _Coded(*probe.encode(changed, dtype, out), certain=False)
        whole = [probe.estimate(sample, dtype) for sample in _samples(raw, digest)]
        shares = [probe.estimate(sample, dtype) for sample in _samples(changed, digest)]
        if sum(shares) > WORTH_A_DIFFERENCE * sum(whole):
            return None
        name, length = probe.encode(changed, dtype, out)
        # A block is not alike throughout, so what shrinks best is taken for all of it; and what repeats itself at a
        # distance shrinks in no sample.
        certain = length + _RECORD_BYTES <= WORTH_A_DIFFERENCE * min(whole) * block.nbytes
        return _Coded(name, length, certain and probe.choose(raw, dtype) is not zstd.CODEC)


def _room(block: Block) -> int:
    """Return the bytes in which a block can be coded."""
    return round_up(probe.bound(block.nbytes))


def _samples(raw: Bytes, digest: str) -> Iterator[Bytes]:
    """Yield pieces of a block, in groups.

    Where they lie is drawn from the digest of the block: at fixed places, they could all miss what the rest is like.
    """
    draw = random.Random(digest)
    last = (len(raw) - _PIECE) // 16
    for _ in range(_GROUPS):
        starts = sorted(16 * draw.randint(0, last) for _ in range(_PIECES))
        yield np.concatenate([raw[start : start + _PIECE] for start in starts])
