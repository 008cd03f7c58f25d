"""Writer of native checkpoints: data files, indexes, manifest, then the commit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tensorkeep.formats import checksummed_json
from tensorkeep.formats.base import BLOCK_BYTES, AliasRecord, WriteResult, WriteSettings
from tensorkeep.formats.blockfile.plan import CODED_SUFFIX, INDEX_SUFFIX, SUFFIX, plan_files
from tensorkeep.formats.blockfile.write import DataFile, index_content
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native import manifest as manifests
from tensorkeep.formats.native.block_write import BlockFilesWrite, features_of, stored_blocks
from tensorkeep.formats.native.directory import commit_to
from tensorkeep.formats.native.options import NativeOptions
from tensorkeep.formats.native.records import VERSION, FileRecord, LeafRecord, Manifest
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.storage import write_file
from tensorkeep.storage.store_commit import object_name
from tensorkeep.version import __version__


class NativeWrite(BlockFilesWrite):
    """The writing of a native checkpoint by one process; see `tensorkeep.formats.base.StagedWrite`."""

    def __init__(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> None:
        suffix = SUFFIX if settings.compression == "none" else CODED_SUFFIX
        shard_bytes = settings.options_as(NativeOptions).shard_bytes
        super().__init__(plan_files(flat, shard_bytes, suffix=suffix), destination, settings)
        self._flat = flat

    def _write(self) -> WriteResult:
        settings = self._settings
        self._check_budget()
        with commit_to(self._destination, overwrite=settings.overwrite) as commit:
            written = self._write_over_base(commit.path, save_id=commit.save_id)
            records = list(written.records)
            if not written.reused and settings.compression == "none":
                records += _write_indexes(commit.path, written.files, commit.save_id)
            content = checksummed_json.seal(self._manifest(written.files, records + written.linked, written.numbers))
            with as_a_reader():
                manifests.parse(content, self._destination / manifests.FILE_NAME)
            self._cancellation.check()
            commit.publish(content)
        return replace(written, records=records).result(settings, len(content))

    def _manifest(self, files: Sequence[DataFile], records: list[FileRecord], numbers: dict[int, int]) -> Manifest:
        """Return the manifest of the finished files of this save.

        ``records`` are those of these files, the indexes and the linked files; ``numbers`` are the numbers of the
        linked files by those in the earlier manifest.
        """
        flat, settings = self._flat, self._settings
        by_name: dict[str, LeafRecord] = {}
        for number, file in enumerate(files):
            for leaf in file.plan.leaves:
                source, stored = leaf.source, stored_blocks(leaf, number, file, numbers)
                by_name[source.name] = LeafRecord(
                    source.name, leaf.part, leaf.key, source.dtype.name, source.shape, *stored
                )
        leaves = [by_name[name] for name in flat.leaves]
        return Manifest(
            format="tensorkeep",
            version=VERSION,
            writer=f"tensorkeep {__version__}",
            features=features_of(records, leaves, wide=self._options.wide_digests),
            block_bytes=BLOCK_BYTES,
            compression=settings.compression,
            files=records,
            leaves=leaves,
            aliases={name: AliasRecord.of_alias(alias, *flat.parts[name]) for name, alias in flat.aliases.items()},
            skeleton=flat.skeleton,
            metadata=settings.metadata,
            step=settings.step,
        )


def _write_indexes(directory: Path, files: Sequence[DataFile], save_id: str) -> Iterator[FileRecord]:
    """Write the index that Hugging Face tools read, for each part that has several files."""
    parts: dict[str, list[DataFile]] = {}
    for file in files:
        parts.setdefault(file.plan.part, []).append(file)
    for shards in parts.values():
        if len(shards) > 1:
            name = object_name(shards[0].name.rsplit("-00001-of-", 1)[0] + INDEX_SUFFIX, save_id)
            content = index_content(shards)
            write_file(directory / name, content)
            yield FileRecord(name, len(content), len(content), checksummed_json.digest(content))
