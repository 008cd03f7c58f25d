"""Data files of incremental saves: only blocks that changed since an earlier checkpoint."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from tensorkeep.codecs import probe, zstd
from tensorkeep.formats.blockfile.header import Description, describe, describe_longest
from tensorkeep.formats.blockfile.plan import Block, BlockKey, BlockRecord, FilePlan, coded_name
from tensorkeep.formats.blockfile.read import scratch_bytes
from tensorkeep.formats.blockfile.write import CodedDataFile, HashedReading, WriteContext, encode
from tensorkeep.formats.checksummed_json import digest
from tensorkeep.formats.native.previous import DifferenceBase, PreviousCheckpoint
from tensorkeep.formats.native.records import PlaceRecord
from tensorkeep.storage.buffers import round_up
from tensorkeep.storage.direct_io import Bytes

NAME_PREFIX = "changes-"
"""Prefix of files with only some blocks of a part; their suffix keeps other tools from loading them as complete."""

WORTH_A_DIFFERENCE = 0.95
"""A difference is stored if it takes less than this fraction of the full block, because it costs more to read."""

_RECORD_BYTES = 100
"""Bytes in the manifest that record the base of a difference."""

_SAMPLED = 2 * 1024**2
"""Bytes above which samples decide whether a difference is worth coding; coding less is cheaper than sampling."""

_GROUPS, _PIECES, _PIECE = 4, 16, 4096
"""The samples of a block: groups of pieces, of so many bytes each."""


class ChangesFile(CodedDataFile):
    """A data file that holds the blocks which the earlier checkpoint does not have.

    ``found`` are the blocks that are taken from the earlier checkpoint; their places have the file numbers of its
    manifest. ``bases`` are those of the blocks of this file that are differences.
    """

    def __init__(
        self, directory: Path, plan: FilePlan, context: WriteContext, previous: PreviousCheckpoint, *, delta: bool
    ) -> None:
        self._delta = delta
        super().__init__(directory, replace(plan, name=coded_name(plan.name)), context, prefix=NAME_PREFIX)
        self.found: dict[BlockKey, tuple[BlockRecord, PlaceRecord]] = {}
        self.bases: dict[BlockKey, DifferenceBase] = {}
        self._previous = previous

    def _longest_description(self) -> Description:
        return describe_longest(self.plan, changes=True, delta=self._delta)

    def _description(self) -> Description:
        return describe(self.plan, self.records, self.bases)

    def _scratch_bytes(self, blocks: list[Block]) -> int:
        needs = [0]
        for block in blocks:
            base = self._previous.base_of(block)
            if base is not None:
                needs.append(_coding_bytes(block) + scratch_bytes(base.stored, block.nbytes))
        return max(needs)

    def _store(
        self, block: Block, raw: Bytes, aside: Bytes | None, out: Bytes, scratch: Bytes
    ) -> tuple[str, str, int] | None:
        raw_digest = digest(raw, wide=True)
        found = self._previous.find(block, raw_digest)
        if found is not None:
            self.found[block.key] = found
            return None
        base = self._previous.base_of(block)
        if base is None and aside is not None:
            return super()._store(block, raw, aside, out, scratch)
        if aside is not None:
            # It is read several times, and may have changed since it was hashed.
            reading = HashedReading(aside, wide=True)
            raw, raw_digest = reading.read(raw), reading.hexdigest()
        difference = None if base is None else self._difference(block, raw, raw_digest, base, out, scratch)
        if base is None or difference is None:
            return raw_digest, *encode(raw, block, self._context.codec, out)
        changed_codec, changed_length, certain = difference
        if not certain:
            # `out` holds the coded difference, and its raw bytes in `scratch` may be overwritten.
            codec, length = encode(raw, block, self._context.codec, scratch)
            if changed_length + _RECORD_BYTES > WORTH_A_DIFFERENCE * length:
                out[:length] = scratch[:length]
                return raw_digest, codec, length
        self._previous.keep(base)
        self.bases[block.key] = base
        return raw_digest, changed_codec, changed_length

    def _difference(
        self, block: Block, raw: Bytes, raw_digest: str, base: DifferenceBase, out: Bytes, scratch: Bytes
    ) -> tuple[str, int, bool] | None:
        """Code the difference from the base to the front of ``out``; None if samples show that it is not worth it.

        Return the codec, the length, and whether it is certain to be shorter than the full block would be.
        """
        changed = scratch[: block.nbytes]
        if not self._previous.read(base, block, changed, scratch[_coding_bytes(block) :]):
            return None
        np.bitwise_xor(changed, raw, out=changed)
        dtype = block.leaf.source.dtype
        if block.nbytes <= _SAMPLED:
            return *probe.encode(changed, dtype, out), False
        full = [probe.estimate(sample, dtype) for sample in _samples(raw, raw_digest)]
        fractions = [probe.estimate(sample, dtype) for sample in _samples(changed, raw_digest)]
        if sum(fractions) > WORTH_A_DIFFERENCE * sum(full):
            return None
        codec, length = probe.encode(changed, dtype, out)
        # A block varies from place to place, so the smallest estimate stands for all of it; and repetitions at a
        # distance, which only zstd finds, do not show in samples.
        certain = length + _RECORD_BYTES <= WORTH_A_DIFFERENCE * min(full) * block.nbytes
        return codec, length, certain and probe.choose(raw, dtype) is not zstd.CODEC


def _coding_bytes(block: Block) -> int:
    """Return the buffer size that coding a block needs."""
    return round_up(probe.bound(block.nbytes))


def _samples(raw: Bytes, raw_digest: str) -> Iterator[Bytes]:
    """Yield pieces of a block, in groups.

    Their places are drawn from the digest of the block: fixed places could all miss what the rest is like.
    """
    draw = random.Random(raw_digest)
    last = (len(raw) - _PIECE) // 16
    for _ in range(_GROUPS):
        starts = sorted(16 * draw.randint(0, last) for _ in range(_PIECES))
        yield np.concatenate([raw[start : start + _PIECE] for start in starts])
