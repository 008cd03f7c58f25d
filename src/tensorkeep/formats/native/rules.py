"""The rules of stored blocks that types and ranges of the records do not express; the first broken one raises."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from tensorkeep.errors import CorruptCheckpointError, UnsupportedError
from tensorkeep.formats import checksummed_json
from tensorkeep.formats.blockfile.header import MAX_HEADER_BYTES
from tensorkeep.formats.blockfile.plan import BlockRecord
from tensorkeep.formats.native.records import PLACES, REFERENCES, BaseRecord, FileRecord, StoredRecord
from tensorkeep.paths import StorePath
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.storage import storage_of

_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")


def check_references(files: Sequence[FileRecord], features: Sequence[str], path: Path) -> None:
    """Check that only a checkpoint in an object store, with the feature for it, names objects of other checkpoints."""
    if REFERENCES in features and not storage_of(path).remote:
        raise UnsupportedError(
            "shares objects with other checkpoints, which is read from an object store only",
            path=path,
            remedy="copy it to the disk with `tensorkeep convert`, which makes it complete",
        )
    for file in files:
        if "/" not in file.name:
            continue
        problem = None
        if REFERENCES not in features:
            problem = f"which needs the feature {REFERENCES!r}"
        elif not file.origin:
            problem = "and does not name that as its origin"
        elif not isinstance(path, StorePath) or "/" not in path.key:
            problem = "outside of the bucket"
        if problem:
            raise CorruptCheckpointError(f"file {file.name} is of another checkpoint, {problem}", path=path)


def check_dtype(dtype: str, path: Path, name: str | None = None) -> None:
    """Raise UnsupportedError for a dtype that is not in the table."""
    if dtype not in BY_NAME:
        raise UnsupportedError(f"has dtype {dtype!r}, which this release does not know", path=path, name=name)


class StoredRules:
    """The rules of the files and blocks that one manifest or fragment lists; every error names it."""

    def __init__(self, path: Path, files: Sequence[FileRecord], features: Sequence[str]) -> None:
        self.path = path
        self._files = files
        self._features = features
        self._has_places = PLACES in features

    def corrupt(self, message: str, name: str | None = None, block: int | None = None) -> CorruptCheckpointError:
        """Return the error for a broken rule."""
        return CorruptCheckpointError(message, path=self.path, name=name, block=block)

    def check_unique(self, what: str, names: Sequence[str]) -> None:
        """Check that no name occurs twice."""
        if len(set(names)) < len(names):
            raise self.corrupt(f"the {what} {Counter(names).most_common(1)[0][0]!r} occurs twice")

    def check_files(self) -> None:
        """Check names and heads of the files."""
        check_references(self._files, self._features, self.path)
        self.check_unique("file", [file.name.casefold() for file in self._files])
        for file in self._files:
            if file.origin and not self._has_places:
                raise self.corrupt(f"file {file.name} is of an earlier save, which needs the feature {PLACES!r}")
            # An index has a head and no blocks.
            most = checksummed_json.MAX_BYTES if file.head_bytes == file.bytes else MAX_HEADER_BYTES + 8
            if file.head_bytes > min(file.bytes, most):
                raise self.corrupt(f"file {file.name} cannot have a head of {file.head_bytes:,} bytes")

    def check_stored(self, record: StoredRecord, name: str, nbytes: int, count: int, starts: Sequence[int]) -> None:
        """Check the blocks of a tensor or box; it has ``count`` blocks, whose first raw bytes are ``starts``.

        ``starts`` is looked at only if there are so many blocks.
        """
        self._check_file_numbers([record.file], name)
        if len(record.blocks) != count:
            raise self.corrupt(f"{nbytes:,} bytes are not {len(record.blocks)} blocks", name)
        if record.places and not self._has_places:
            raise self.corrupt(f"has blocks with places, which need the feature {PLACES!r}", name)
        if record.places and len(record.places) != count:
            raise self.corrupt(f"has {len(record.places)} places for {count} blocks", name)
        lengths = [stop - start for start, stop in pairwise((*starts, nbytes))]
        for index, block in enumerate(record.blocks):
            self._check_block(block, lengths[index], name, index)
        for index, place in enumerate(record.places):
            for base in place.bases:
                self._check_block(base, lengths[index], name, index)
            self._check_file_numbers(place.files, name, index)

    def _check_file_numbers(self, numbers: list[int], name: str, block: int | None = None) -> None:
        if max(numbers) >= len(self._files):
            raise self.corrupt(f"is in file {max(numbers)}, which is not listed", name, block)

    def _check_block(self, block: BlockRecord | BaseRecord, raw_bytes: int, name: str, index: int) -> None:
        # A plain block is just its raw bytes. A coded one is never longer, except for the padding to the next page.
        plain = block.codec == "raw" and not block.stored
        if not (block.length == raw_bytes if plain else 0 < block.length < raw_bytes + 2 * 4096):
            raise self.corrupt(f"{raw_bytes:,} bytes cannot be stored in {block.length:,}", name, index)
        if not (_DIGEST.fullmatch(block.raw) and (plain or _DIGEST.fullmatch(block.stored))):
            raise self.corrupt("has no checksum", name, index)

    def check_coverage(self, stored: Iterable[tuple[StoredRecord, str]]) -> None:
        """Check that blocks do not overlap, and fill the files of this save behind their heads without gaps."""
        ends = [file.head_bytes for file in self._files]
        ranges = sorted((*each, name) for record, name in stored for each in record.ranges())
        for number, start, length, name in ranges:
            file = self._files[number]
            if start < ends[number] or (start > ends[number] and not file.origin):
                raise self.corrupt(f"its bytes begin at {start:,}, not at {ends[number]:,}", name)
            ends[number] = start + length
        for file, end in zip(self._files, ends, strict=True):
            if end > file.bytes or (end < file.bytes and not file.origin):
                raise self.corrupt(f"the tensors of file {file.name} end at byte {end:,}, the file at {file.bytes:,}")
