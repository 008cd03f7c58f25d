"""Reading a native checkpoint, without trusting anything in it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import Problem, Reader, Structure
from tensorkeep.formats.blockfile.read import StoredTensor, read_ahead
from tensorkeep.formats.model_folder import notes_on_folder, unused_files
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.open_files import OpenFiles, occupied_bytes
from tensorkeep.formats.native.records import WIDE_DIGESTS, LeafRecord, Manifest, PlaceRecord
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.storage import storage_of
from tensorkeep.storage.direct_io import Bytes


class OpenFilesReader(Reader):
    """The base of the readers of native checkpoints, whose files are open; see `OpenFiles`."""

    format = "native"
    verifiable = "xxh3-64 of every block"

    def __init__(self, opened: OpenFiles) -> None:
        self.path = opened.path
        self._opened = opened

    def _describe(self, places: Sequence[PlaceRecord], block_bytes: int) -> None:
        """Set the details and the notes; ``places`` are those of all blocks that have one."""
        self.details = describe(self._opened, places, block_bytes)
        # To list a store is a request more, and shows what other saves have left there, too.
        if not storage_of(self.path).remote:
            used = {*self._opened.manifest_names, *self.details["files"]}
            if unused := unused_files(self.path, used):
                self.details["unused_files"] = unused
                self.notes = [*notes_on_folder(self.path, unused)]

    def identity(self) -> str:
        return self._opened.identity()

    def audit(self) -> Iterator[Problem]:
        """Yield the files whose header, or content, is damaged."""
        for record, file in zip(self._opened.records, self._opened.files, strict=True):
            if checksummed_json.digest_of(file, record.head_bytes) != record.head:
                whole = record.head_bytes == record.bytes
                yield Problem(f"the checksum of its {'content' if whole else 'header'} is wrong", file=record.name)

    def close(self) -> None:
        self._opened.close()


class NativeReader(OpenFilesReader):
    """An open native checkpoint of one process."""

    def __init__(self, opened: OpenFiles, manifest: Manifest) -> None:
        super().__init__(opened)
        self._manifest = manifest
        self.tensors = {leaf.name: self._stored_tensor(leaf) for leaf in manifest.leaves}
        leaves = {name: tensor.leaf(self) for name, tensor in self.tensors.items()}
        structure = Structure(manifest.skeleton, manifest.aliases, manifest.parts())
        self._set_state(structure.flat(leaves), self.path / manifests.FILE_NAME)
        self.metadata = manifest.metadata
        if WIDE_DIGESTS in manifest.features:
            self.verifiable = "xxh3-128 of every block"
        if any(place.bases for leaf in manifest.leaves for place in leaf.places):
            self.buffers = 3
        self.step = manifest.step
        places = [place for leaf in manifest.leaves for place in leaf.places]
        self._describe(places, manifest.block_bytes)

    def _stored_tensor(self, leaf: LeafRecord) -> StoredTensor:
        file, blocks = self._opened.stored(leaf, self._opened.files)
        nbytes = leaf.nbytes
        starts = range(0, nbytes, self._manifest.block_bytes)
        return StoredTensor(leaf.name, BY_NAME[leaf.dtype], leaf.shape, nbytes, file, starts, blocks)

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._opened.blocks.read(self.tensors[name], start, stop, out)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        return read_ahead([(self.tensors[name], start, stop) for name, start, stop in ranges])

    def mapped(self, name: str) -> Bytes | None:
        return self.tensors[name].mapped()

    def block_bytes(self, name: str) -> int:
        return self._manifest.block_bytes


def describe(opened: OpenFiles, places: Sequence[PlaceRecord], block_bytes: int) -> dict[str, Any]:
    """Return the details for `info`, as plain values; ``places`` are those of all blocks that have one."""
    manifest, statuses = opened.manifest, [*opened.statuses, *opened.manifest_statuses]
    occupied = sum(map(occupied_bytes, statuses))
    # Removing the checkpoint alone frees the files that nothing else has a link to.
    own = sum(occupied_bytes(status) for status in statuses if status.st_nlink <= 1)
    details: dict[str, Any] = {"version": manifest.version, "writer": manifest.writer}
    if manifest.step is not None:
        details["step"] = msgspec.to_builtins(manifest.step)
    if places or any(file.origin for file in opened.records):
        linked: dict[str, int] = {}
        for file in opened.records:
            if file.origin:
                linked[file.origin] = linked.get(file.origin, 0) + file.bytes
        written = sum(file.bytes for file in opened.records if not file.origin)
        details["history"] = {
            "new_bytes": written + sum(status.st_size for status in opened.manifest_statuses),
            "linked_bytes": linked,
            "deepest_chain": max((len(place.bases) for place in places), default=0),
        }
    return {
        **details,
        "compression": manifest.compression,
        "block_bytes": block_bytes,
        "files": {file.name: file.bytes for file in opened.records},
        "space": {"own_bytes": own, "shared_bytes": occupied - own, "occupied_bytes": occupied},
    }
