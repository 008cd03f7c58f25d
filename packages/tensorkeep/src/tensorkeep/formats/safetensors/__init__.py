"""The format ``safetensors``: one file, or a directory of shards with Hugging Face's index."""

import re
import stat
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedError, UsageError
from tensorkeep.formats import model_folder
from tensorkeep.formats.base import BLOCK_BYTES, Format, OpenSettings, Reader, Structure, WriteResult, WriteSettings
from tensorkeep.formats.blockfile import header
from tensorkeep.formats.blockfile import plan as layout
from tensorkeep.formats.blockfile import write as data_files
from tensorkeep.formats.blockfile.header import METADATA_KEY, FileEncoding, Header, TensorRecord, parse
from tensorkeep.formats.blockfile.read import BlockReader, StoredTensor, lay_out, read_ahead
from tensorkeep.formats.decoding import MAX_HEADER_BYTES, decode_json_object
from tensorkeep.formats.finding import check_not_other
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.state.leaf import Bytes, Source
from tensorkeep.state.names import DEFAULT_PART, assign_names
from tensorkeep.state.tree import Flat
from tensorkeep.storage import file_mode, first_bytes, names_in, read_directory, storage_of
from tensorkeep.storage.base import MANIFEST_NAME, Directory, SourceFile
from tensorkeep.storage.direct_io import write_small
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.parallel import Cancellation, Meter, Pace
from tensorkeep.storage.store_commit import save_of

_SHARDING = "DCP_SHARDING_INFO"
# Keys of metadata that ``torch.distributed.checkpoint`` writes about a single file.
_OF_WRITER = (_SHARDING, "DCP_VERSION")
_FULL_TENSORS = re.compile(r"model-\d+-of-\d+\.safetensors")


def locate(path: Path) -> Path | None:
    """Return the file or the index of a path, from names and first bytes; None if it is not safetensors."""
    mode = file_mode(path)
    if stat.S_ISDIR(mode):
        return _locate_in(path)
    if not stat.S_ISREG(mode):
        return None
    if path.name.endswith((layout.SUFFIX, layout.CODED_SUFFIX)) or model_folder.is_index(path.name, layout.SUFFIX):
        return path
    return path if begins_like_safetensors(path) else None


def begins_like_safetensors(path: Path) -> bool:
    start = first_bytes(path, 9)
    # A file begins with the length of the header, then its opening brace.
    return start is not None and start[8:] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER_BYTES


def _locate_in(directory: Path) -> Path | None:
    if file_mode(directory / MANIFEST_NAME):
        return None
    names = names_in(directory)
    if storage_of(directory).remote:
        # Without a manifest, objects with names of a native save belong to an unfinished one.
        names = [name for name in names if save_of(name) is None]
    standard = model_folder.standard_weights(directory, names)
    if standard is not None:
        return directory / standard if standard.endswith((layout.SUFFIX, layout.INDEX_SUFFIX)) else None
    indexes = [name for name in names if model_folder.is_index(name, layout.SUFFIX)]
    found = indexes or [
        name for name in names if name.endswith((layout.SUFFIX, layout.CODED_SUFFIX)) and not model_folder.is_part(name)
    ]
    # A folder may have the name of a file: a Zarr array has the name of its tensor. A link may lead nowhere.
    return directory / found[0] if len(found) == 1 and stat.S_ISREG(file_mode(directory / found[0])) else None


@dataclass(frozen=True, slots=True)
class _DataFile:
    file: SourceFile
    header: Header
    notes: FileEncoding


# A flat dict of tensors is a plain safetensors file. For any other state, the entry ``tensorkeep`` of the file's
# ``__metadata__`` has the structure (``blockfile/header.py``): other tools see all tensors by their dotted names, and
# `tensorkeep.load` returns the nested state. Links are followed: the cache of Hugging Face consists of links.
class SafetensorsReader(Reader):
    """An open safetensors file, or several with an index; the format has no checksums."""

    format = "safetensors"

    def __init__(self, path: Path, settings: OpenSettings) -> None:
        self.path = path
        self._blocks = BlockReader(settings.pool, verify=settings.verify)
        self._page_cache = settings.page_cache
        self._is_folder = stat.S_ISDIR(file_mode(path))
        data = read_directory(path if self._is_folder else path.parent, self._open)
        self.metadata = {}
        # Reversed, so that the first file wins.
        for found in reversed(data):
            self.metadata |= found.header.metadata
        self.metadata.pop(METADATA_KEY, None)
        # By convention the library that wrote the file, and not metadata of the user.
        framework = self.metadata.pop(layout.FRAMEWORK_KEY, None)
        # About single files, so a conversion does not copy it.
        self.written_by = {key: self.metadata.pop(key) for key in _OF_WRITER if key in self.metadata}
        self.details = {"files": {file.path.name: file.size for file in self._files}, "framework": framework}
        if self._unused:
            self.details["unused_files"] = self._unused
        if self._is_folder:
            self.notes = [*self.notes, *model_folder.notes_on_folder(path, self._unused)]

    def _open(self, directory: Directory) -> list[_DataFile]:
        self._directory = directory
        place = locate(self.path)
        if place is None:
            raise NotACheckpointError(
                "is neither a safetensors file, nor a directory with one or with an index",
                path=self.path,
                remedy="check the path; tensorkeep.load reads checkpoints of every format",
            )
        # All files are opened now, so that a checkpoint that is replaced meanwhile is read as it was.
        with ExitStack() as opened:
            index = None
            if model_folder.is_index(place.name, layout.SUFFIX):
                index = model_folder.read_index(directory, place)
                wanted = index.keys_by_file().items()
                shards = (
                    model_folder.open_shard(directory, file, key, len(wanted), page_cache=self._page_cache)
                    for file, key in wanted
                )
                self._files = [opened.enter_context(shard) for shard in shards]
            else:
                self._files = [opened.enter_context(directory.open(place.name, page_cache=self._page_cache))]
            headers = [(file, _header(file)) for file in self._files]
            data = [_DataFile(file, header, parse(header, file.path)) for file, header in headers]
            for found in data:
                _check_is_whole(found, listed=index is not None)
            if index is not None:
                index.check((found.file.path, found.header.records) for found in data)
            self._tensors = self._state(data, place, index)
            self._unused = self._unused_files(place) if self._is_folder else []
            # The index counts bytes in files, and compressed tensors have fewer bytes there than in the state.
            if index is not None and not any(found.notes.tensors for found in data):
                self.notes = [*index.notes(self.flat)]
            # From here on `close` closes the files; until here an error does.
            self._close_files = opened.pop_all().close
        return data

    def _unused_files(self, place: Path) -> list[str]:
        """Return the names in the folder that are not read; NotACheckpointError if they are a second checkpoint."""
        unused = [
            name
            for name in model_folder.unused_files(self.path, {file.path.name for file in self._files} | {place.name})
            if save_of(name) is None
        ]
        # Other tools do not know an index of this name and would read the other file: either may be the checkpoint.
        rivals = [name for name in unused if name.endswith(layout.SUFFIX)]
        if (
            rivals
            and model_folder.is_index(place.name, layout.SUFFIX)
            and model_folder.standard_weights(self.path, [place.name]) is None
        ):
            raise NotACheckpointError(
                f"holds two checkpoints: {place.name}, and {rivals[0]}, which the index does not list",
                path=self.path,
                remedy=f"give the path of one: {place}",
            )
        return unused

    def _state(self, data: list[_DataFile], place: Path, index: model_folder.Index | None) -> dict[str, StoredTensor]:
        homes = {key: found for found in data for key in found.header.records}
        records = {key: found.header.records[key] for key, found in homes.items()}
        structures = [found for found in data if found.notes.structure is not None]
        if len(structures) > 1:
            raise CorruptCheckpointError("a second file has the structure of the state", path=structures[1].file.path)
        structure = structures[0].notes.structure if structures else None
        if structure is None:
            keys = list(homes if index is None else index.files)
            names = dict(zip(assign_names([(key,) for key in keys]) if keys else [], keys, strict=True))
            unread = {name: record for name, key in names.items() if (record := records[key]).dtype is None}
            skeleton: Any = {
                "dict": {
                    key: {"placeholder": _placeholder(name, unread[name])} if name in unread else {"tensor": name}
                    for name, key in names.items()
                }
            }
            names = {name: key for name, key in names.items() if name not in unread}
            # Without a structure, the state is a flat dict in file order, or in the order of the index.
            structure = Structure(skeleton, {}, {name: (DEFAULT_PART, name) for name in names})
        else:
            # The structure names tensors by their full names, which are the keys in the file.
            names = {key: key for key in homes}
            for key, record in records.items():
                if record.dtype is None:
                    text = f"has dtype {record.tag}, which this release does not know"
                    raise UnsupportedError(text, path=homes[key].file.path, name=key)
        files = {id(found): number for number, found in enumerate(data)}
        self._places = {
            name: (files[id(homes[key])], homes[key].header.records[key].start, homes[key].header.records[key].stop)
            for name, key in names.items()
        }
        tensors = {name: _stored(name, key, homes[key]) for name, key in names.items()}
        leaves = {name: tensor.leaf(self) for name, tensor in tensors.items()}
        self._set_state(structure.flat(leaves), structures[0].file.path if structures else place)
        return tensors

    def read(self, name: str, start: int, stop: int, out: Bytes) -> None:
        self._blocks.read(self._tensors[name], start, stop, out)

    def offset_order(self) -> list[str]:
        return sorted(self._places, key=self._places.__getitem__)

    def ahead(self, ranges: Sequence[tuple[str, int, int]]) -> AbstractContextManager[object]:
        return read_ahead([(self._tensors[name], start, stop) for name, start, stop in ranges])

    def mapped(self, name: str) -> Bytes | None:
        return self._tensors[name].mapped()

    def block_bytes(self, name: str) -> int:
        starts = self._tensors[name].starts
        return starts.step if isinstance(starts, range) else BLOCK_BYTES

    def close(self) -> None:
        self._close_files()
        self._directory.close()


def _check_is_whole(data: _DataFile, *, listed: bool) -> None:
    """Refuse the files of single ranks that torch.distributed.checkpoint writes as safetensors."""
    # The metadata has the offset of every shard, but the full shapes nowhere: a shard at offset 0 looks like a full
    # tensor. Files of the writer's other mode, with full tensors, are known by an index or by their name.
    text = data.header.metadata.get(_SHARDING)
    if text is None:
        return
    try:
        entries = decode_json_object(text.encode()).items()
        moved = {name: entry["saved_offsets"] for name, entry in entries if any(entry["saved_offsets"])}
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise UnsupportedError(f"its metadata {_SHARDING} cannot be read ({error})", path=data.file.path) from error
    if not moved and (listed or _FULL_TENSORS.fullmatch(data.file.path.name)):
        return
    name, offsets = next(iter(moved.items()), (None, None))
    part = "may hold shards of tensors" if offsets is None else f"holds the shard of the tensor at {offsets}"
    raise UnsupportedError(
        f"{part}: it is one rank's file of a sharded save by torch.distributed.checkpoint",
        path=data.file.path,
        name=name,
        remedy="load the folder with torch.distributed.checkpoint.load(state, storage_reader="
        "HuggingFaceStorageReader(FOLDER)), and save the state again",
    )


def _header(file: SourceFile) -> Header:
    try:
        return header.read(file)
    except CorruptCheckpointError as error:
        # A damaged header of a real safetensors file stays the error about damage.
        if not begins_like_safetensors(file.path):
            check_not_other(file.path, error)
        raise


def _stored(name: str, key: str, home: _DataFile) -> StoredTensor:
    record = home.header.records[key]
    offset = home.header.nbytes + record.start
    note = home.notes.tensors.get(key)
    if note is not None:
        dtype = BY_NAME[note.dtype]
        nbytes = prod(note.shape) * dtype.itemsize
        blocks = lay_out(home.file, offset, note.blocks)
        starts: Sequence[int] = range(0, nbytes, home.notes.block_bytes)
        if note.raw is not None:
            # Blocks of different raw lengths start at the sums of the lengths before.
            starts = list(accumulate(note.raw[:-1], initial=0))
        return StoredTensor(name, dtype, note.shape, nbytes, home.file, starts, blocks)
    assert record.dtype is not None
    nbytes = record.stop - record.start
    # The format has no blocks: a raw tensor is read in ranges of one block each.
    lengths = [min(BLOCK_BYTES, nbytes - at) for at in range(0, nbytes, BLOCK_BYTES)]
    blocks = lay_out(home.file, offset, [("raw", length) for length in lengths])
    starts = range(0, nbytes, BLOCK_BYTES)
    return StoredTensor(name, record.dtype, record.element_shape, nbytes, home.file, starts, blocks)


def _placeholder(name: str, record: TensorRecord) -> list[str]:
    what = (
        f"a tensor of {record.tag:.50} and shape {list(record.shape)}: neither torch nor numpy has this dtype and shape"
    )
    return [name, what, 'leave out what cannot be read with select="*", or read it with the tool that wrote it']


class SafetensorsOptions(layout.BlockFileOptions, frozen=True):
    """The options of the safetensors format.

    Attributes
    ----------
    framework : str or None
        The metadata entry ``format`` of the files: the library of the tensors. None leaves it out.
    force : bool
        Whether to write compressed tensors, which other tools read as tensors of uint8.
    """

    framework: str | None = layout.FRAMEWORK
    force: bool = False


def write(flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
    single = _is_one_file(destination)
    options = settings.options_as(SafetensorsOptions)
    if single and options.shard_bytes is not None:
        raise UsageError(
            "shard_bytes needs a directory, and this names one file",
            path=destination,
            remedy=f"leave {destination.suffix} out",
        )
    # Refuses an unknown codec before anything is written.
    codec = data_files.find_codec(settings.compression)
    framework = {} if options.framework is None else {layout.FRAMEWORK_KEY: options.framework}
    metadata = _checked_metadata(framework | settings.metadata, destination)
    if single:
        # A limit above the size of the state gives one shard.
        size = sum(leaf.nbytes for leaf in flat.leaves.values()) + 1
        plans = [replace(plan, name=destination.name) for plan in _plans(flat, size, metadata)]
    else:
        plans = _plans(flat, options.shard_bytes, metadata)
    replaceable = _is_replaceable_file if single else _is_replaceable_directory
    with storage_of(destination).commit(
        destination, directory=not single, overwrite=settings.overwrite, replaceable=replaceable
    ) as commit:
        directory = commit.path.parent if single else commit.path
        cancellation = Cancellation()
        context = data_files.WriteContext(
            settings.pool,
            Meter(sum(plan.raw_bytes for plan in plans), settings.progress),
            cancellation,
            Pace(cancellation),
            direct=options.direct_io,
            codec=codec,
        )
        kind = data_files.RawFile if settings.compression == "none" else data_files.CompressedFile
        files: list[data_files.DataFile] = [kind(directory, plan, context) for plan in plans]
        data_files.write_files(files, context, settings.threads)
        # The index lists tensors in the order of the state.
        index = data_files.index_content(files, _flat_order(flat) or flat.leaves) if len(files) > 1 else b""
        if index:
            write_small(directory / f"{DEFAULT_PART}{layout.INDEX_SUFFIX}", index)
        commit.publish()
    stored_bytes = sum(file.size for file in files) + len(index)
    return WriteResult(
        stored_bytes=stored_bytes,
        new_bytes=stored_bytes,
        peak_buffer_bytes=settings.pool.peak_bytes,
        direct_io=all(file.direct for file in files),
    )


def _is_one_file(destination: Path) -> bool:
    return destination.suffix.lower() in (layout.SUFFIX, layout.CODED_SUFFIX)


def _is_replaceable_file(path: Path) -> bool:
    return stat.S_ISREG(file_mode(path)) and begins_like_safetensors(path)


def _is_replaceable_directory(path: Path) -> bool:
    # The directory of a model often holds a tokenizer, a configuration or other weights, which must not be removed.
    place = locate(path)
    if place is None or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    if not place.name.endswith(layout.INDEX_SUFFIX):
        return names == {place.name}
    with LocalDirectory(path) as directory:
        return names <= {place.name, *model_folder.read_index(directory, place).files.values()}


def _checked_metadata(metadata: dict[str, Any], destination: Path) -> dict[str, str]:
    for key, value in metadata.items():
        if key == METADATA_KEY:
            raise UnsupportedError(f"the metadata key {key!r} is reserved", path=destination, remedy="rename it")
        if not isinstance(key, str) or not isinstance(value, str):
            raise UnsupportedError(
                f"safetensors metadata maps strings to strings, and {key!r} does not fit",
                path=destination,
                remedy="give strings, as json.dumps makes them, or leave the metadata out (drop_metadata=True)",
            )
    return metadata


def _plans(flat: Flat[Source], shard_bytes: int | str | None, metadata: dict[str, str]) -> list[layout.FilePlan]:
    if "__metadata__" in flat.leaves:
        raise UnsupportedError("safetensors reserves this name", name="__metadata__", remedy="rename the tensor")
    # All tensors by full name; the structure of the state is in the first file.
    whole = Flat(flat.skeleton, flat.leaves, {}, {name: (DEFAULT_PART, name) for name in flat.leaves})
    plans = layout.plan_files(whole, shard_bytes) or [
        layout.FilePlan(f"{DEFAULT_PART}{layout.SUFFIX}", DEFAULT_PART, ())
    ]
    plans = [replace(plan, metadata=metadata) for plan in plans]
    order = _flat_order(flat)
    if order is None:
        return [replace(plans[0], structure=Structure.of_state(flat)), *plans[1:]]
    homes = {leaf.key: number for number, plan in enumerate(plans) for leaf in plan.leaves}
    return [
        replace(plan, header_order=tuple(name for name in order if homes[name] == number))
        for number, plan in enumerate(plans)
    ]


def _flat_order(flat: Flat[Source]) -> list[str] | None:
    """Return the keys of a flat dict of tensors, which needs no stored structure; None for other states."""
    skeleton: Any = flat.skeleton
    entries = skeleton.get("dict") if isinstance(skeleton, dict) else None
    if entries is None or flat.aliases or any(node != {"tensor": name} for name, node in entries.items()):
        return None
    return list(entries)


class SafetensorsFormat(Format):
    """One safetensors file, or a directory of shards with an index; see `tensorkeep.formats.base.Format`.

    A destination that ends in ``.safetensors`` or ``.tensorkeep`` becomes one file, any other a directory of shards.
    Compressed tensors need the suffix ``.tensorkeep``, or ``force``. Metadata maps strings to strings. In an object
    store, one file of uncompressed tensors is written.
    """

    name = "safetensors"
    options = SafetensorsOptions
    suffixes = (layout.SUFFIX, layout.CODED_SUFFIX)
    writes_to_stores = True

    def recognises(self, path: Path) -> bool:
        return locate(path) is not None

    def open(self, path: Path, settings: OpenSettings) -> Reader:
        return SafetensorsReader(path, settings)

    def check(self, destination: Path, settings: WriteSettings) -> None:
        is_coded = settings.compression != "none"
        # Other tools would take the uint8 bytes of compressed tensors for weights.
        if (
            is_coded
            and destination.suffix.lower() != layout.CODED_SUFFIX
            and not settings.options_as(SafetensorsOptions).force
        ):
            raise UsageError(
                "compressed tensors in a safetensors file are uint8 bytes to other tools, not weights",
                path=destination,
                remedy=f"leave the compression out, name the file {destination.stem}{layout.CODED_SUFFIX}, or force it "
                "(force=True)",
            )
        if not storage_of(destination).remote:
            return
        remedy = "save in the native format (leave out the suffix and `format`), or to a disk, and upload it"
        if not _is_one_file(destination):
            raise UnsupportedError(
                "several safetensors files do not become visible at once in an object store",
                path=destination,
                remedy=f"name one file, such as {destination}{layout.SUFFIX}; or {remedy}",
            )
        if is_coded:
            raise UnsupportedError(
                "compressed safetensors files are not written to object stores: their header is known last",
                path=destination,
                remedy=remedy,
            )

    def write(self, flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
        return write(flat, destination, settings)


FORMAT = SafetensorsFormat()
