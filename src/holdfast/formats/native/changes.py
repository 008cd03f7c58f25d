"""Writing only what has changed since an earlier checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast.codecs import probe
from holdfast.formats.native.manifest import BlockRecord, PlaceRecord
from holdfast.formats.native.pack import Block, FilePlan
from holdfast.formats.native.previous import Base, Found, Previous
from holdfast.formats.native.streams import CodedStream, How, encode
from holdfast.formats.sealed import wide_digest
from holdfast.io.buffers import round_up
from holdfast.io.files import Bytes

WORTH_A_DIFFERENCE = 0.95
"""A difference is stored if it takes less than this share of the whole block: it costs more to read."""


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
                needs.append(round_up(block.nbytes) + self._previous.scratch_bytes(base, block.nbytes))
        return max(needs)

    def _store(self, block: Block, raw: Bytes, out: Bytes, scratch: Bytes) -> tuple[str, str, int] | None:
        digest = wide_digest(raw)
        key = block.leaf.key, block.index
        found: Found | None = self._previous.find(block, digest)
        if found is not None:
            self.found[key] = found.block, found.place
            return None
        base = self._previous.base_of(block)
        stored = None if base is None else self._difference(block, raw, base, out, scratch)
        if base is None or stored is None:
            stored = encode(raw, block, self._how.codec, out)
        else:
            self._previous.take(base)
            self.bases[key] = base
        return digest, *stored

    def _difference(self, block: Block, raw: Bytes, base: Base, out: Bytes, scratch: Bytes) -> tuple[str, int] | None:
        """Code the difference from the base to the front of ``out``; None where the whole block is as small."""
        changed = scratch[: block.nbytes]
        if not self._previous.read(base, block, changed, scratch[round_up(block.nbytes) :]):
            return None
        np.bitwise_xor(changed, raw, out=changed)
        dtype = block.leaf.source.dtype
        whole = probe.estimate(raw, dtype)
        if probe.estimate(changed, dtype) > WORTH_A_DIFFERENCE * whole:
            return None
        name, length = probe.encode(changed, dtype, out)
        # Once more, now that the length is known: the samples may not have been like the rest.
        return (name, length) if length <= WORTH_A_DIFFERENCE * whole * len(raw) else None
