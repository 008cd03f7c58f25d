"""The manifest of a save, put together from what its streams have written and what they took from an earlier one."""

from __future__ import annotations

from dataclasses import dataclass

from tensorkeep.formats.base import BLOCK_BYTES, WriteSettings
from tensorkeep.formats.blockfile.plan import Placed
from tensorkeep.formats.blockfile.records import (
    PLACES,
    VERSION,
    WIDE_DIGESTS,
    BaseRecord,
    BlockRecord,
    FileRecord,
    LeafRecord,
    Manifest,
    PlaceRecord,
)
from tensorkeep.formats.blockfile.stream import Stream
from tensorkeep.formats.native.history import History
from tensorkeep.formats.native.incremental import ChangesStream
from tensorkeep.formats.structure import AliasRecord
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.version import __version__


@dataclass(frozen=True, slots=True)
class FinishedStream:
    """A data file that is written and durable: its stream, its record, and the offset of each key's bytes in it."""

    stream: Stream
    record: FileRecord
    offsets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What a manifest is made from.

    Attributes
    ----------
    flat : Flat
    streams : list of FinishedStream
        In the order of the first files.
    files : list of FileRecord
    numbers : dict of int to int
        Of the earlier checkpoint's files, by their numbers there.
    """

    flat: Flat[Source]
    streams: list[FinishedStream]
    files: list[FileRecord]
    numbers: dict[int, int]

    def manifest(self, settings: WriteSettings, history: History) -> Manifest:
        """Return the manifest."""
        flat = self.flat
        records = {
            leaf.source.name: self._leaf(leaf, number, finished)
            for number, finished in enumerate(self.streams)
            for leaf in finished.stream.plan.leaves
        }
        leaves = [records[name] for name in flat.leaves]
        aliases = {name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()}
        features = [WIDE_DIGESTS] if history.incremental else []
        if any(leaf.places for leaf in leaves):
            features.append(PLACES)
        return Manifest(
            format="tensorkeep",
            version=VERSION,
            writer=f"tensorkeep {__version__}",
            features=features,
            block_bytes=BLOCK_BYTES,
            compression=settings.compression,
            files=self.files,
            leaves=leaves,
            aliases=aliases,
            skeleton=flat.skeleton,
            metadata=settings.metadata,
            step=settings.step,
        )

    def _leaf(self, leaf: Placed, number: int, finished: FinishedStream) -> LeafRecord:
        count = -(-leaf.source.nbytes // BLOCK_BYTES)
        stream = finished.stream
        offset = finished.offsets.get(leaf.key, 0)
        blocks: list[BlockRecord] = []
        places: list[PlaceRecord] = []
        if isinstance(stream, ChangesStream):
            for index in range(count):
                block, place = self._changed(leaf, index, number, offset, stream)
                offset += block.length if place.file == number else 0
                blocks.append(block)
                places.append(place)
            if all(place.file == number and not place.bases for place in places):
                places = []  # they simply follow one another
        else:
            blocks = [stream.records[leaf.key, index] for index in range(count)]
        return LeafRecord(
            name=leaf.source.name,
            part=leaf.part,
            key=leaf.key,
            dtype=leaf.source.dtype.name,
            shape=leaf.source.shape,
            file=number,
            offset=finished.offsets.get(leaf.key, 0),
            blocks=blocks,
            places=places,
        )

    def _changed(
        self, leaf: Placed, index: int, number: int, offset: int, stream: ChangesStream
    ) -> tuple[BlockRecord, PlaceRecord]:
        key = leaf.key, index
        if key in stream.found:
            block, place = stream.found[key]
            return block, PlaceRecord(self.numbers[place.file], place.offset, self._bases(place.bases), place.age)
        base = stream.bases.get(key)
        bases, age = ([], 0) if base is None else (self._bases(base.records), base.age)
        return stream.records[key], PlaceRecord(number, offset, bases, age)

    def _bases(self, records: list[BaseRecord]) -> list[BaseRecord]:
        return [
            BaseRecord(base.codec, base.length, base.raw, base.stored, self.numbers[base.file], base.offset)
            for base in records
        ]
