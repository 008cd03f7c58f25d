"""Writes safetensors: one file, or a directory of shards with an index."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.formats.base import Structure, WriteResult, WriteSettings
from tensorkeep.formats.blockfile.header import METADATA_KEY
from tensorkeep.formats.blockfile.plan import (
    CODED_SUFFIX,
    FRAMEWORK,
    FRAMEWORK_KEY,
    INDEX_SUFFIX,
    SUFFIX,
    BlockFileOptions,
    FilePlan,
    plan_files,
)
from tensorkeep.formats.blockfile.write import (
    CompressedFile,
    DataFile,
    RawFile,
    WriteContext,
    find_codec,
    index_content,
    write_files,
)
from tensorkeep.formats.model_folder import read_index
from tensorkeep.formats.safetensors.reader import begins_like_safetensors, locate
from tensorkeep.state.leaf import Source
from tensorkeep.state.names import DEFAULT_PART
from tensorkeep.state.tree import Flat
from tensorkeep.storage import file_mode, storage_of
from tensorkeep.storage.base import PendingCommit
from tensorkeep.storage.direct_io import write_small
from tensorkeep.storage.local import LocalDirectory
from tensorkeep.storage.parallel import Cancellation, Meter, Pace


class SafetensorsOptions(BlockFileOptions, frozen=True):
    """The options of the safetensors format.

    Attributes
    ----------
    framework : str or None
        The metadata entry ``format`` of the files: the library of the tensors. None leaves it out.
    force : bool
        Whether to write compressed tensors, which other tools read as tensors of uint8.
    """

    framework: str | None = FRAMEWORK
    force: bool = False


def check_compression(destination: Path, settings: WriteSettings) -> None:
    """Refuse compressed tensors in files that look like weights to other tools, unless they are forced."""
    if settings.compression == "none" or settings.options_as(SafetensorsOptions).force:
        return
    if destination.suffix.lower() != CODED_SUFFIX:
        raise UsageError(
            "compressed tensors in a safetensors file are uint8 bytes to other tools, not weights",
            path=destination,
            remedy=f"leave the compression out, name the file {destination.stem}{CODED_SUFFIX}, or force it "
            "(force=True)",
        )


def check_store(destination: Path, settings: WriteSettings) -> None:
    """Refuse what cannot be written to an object store."""
    if not storage_of(destination).remote:
        return
    remedy = "save in the native format (leave out the suffix and `format`), or to a disk, and upload it"
    if not _is_one_file(destination):
        raise UnsupportedError(
            "several safetensors files do not become visible at once in an object store",
            path=destination,
            remedy=f"name one file, such as {destination}{SUFFIX}; or {remedy}",
        )
    if settings.compression != "none":
        raise UnsupportedError(
            "compressed safetensors files are not written to object stores: their header is known last",
            path=destination,
            remedy=remedy,
        )


def write(flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
    """Write a state as safetensors; see `tensorkeep.formats.base.Format.write`."""
    single = _is_one_file(destination)
    options = settings.options_as(SafetensorsOptions)
    if single and options.shard_bytes is not None:
        raise UsageError(
            "shard_bytes needs a directory, and this names one file",
            path=destination,
            remedy=f"leave {destination.suffix} out",
        )
    codec = find_codec(settings.compression)
    framework = {} if options.framework is None else {FRAMEWORK_KEY: options.framework}
    metadata = _checked_metadata(framework | settings.metadata, destination)
    if single:
        size = sum(leaf.nbytes for leaf in flat.leaves.values()) + 1
        plans = [replace(plan, name=destination.name) for plan in _plans(flat, size, metadata)]
    else:
        plans = _plans(flat, options.shard_bytes, metadata)
    with _commit_to(destination, single=single, overwrite=settings.overwrite) as commit:
        directory = commit.path.parent if single else commit.path
        cancellation = Cancellation()
        context = WriteContext(
            settings.pool,
            Meter(sum(plan.raw_bytes for plan in plans), settings.progress),
            cancellation,
            Pace(cancellation),
            direct=options.direct_io,
            codec=codec,
        )
        kind = RawFile if settings.compression == "none" else CompressedFile
        files: list[DataFile] = [kind(directory, plan, context) for plan in plans]
        write_files(files, context, settings.threads)
        # The index lists tensors in the order of the state.
        index = index_content(files, _flat_order(flat) or flat.leaves) if len(files) > 1 else b""
        if index:
            write_small(directory / f"{DEFAULT_PART}{INDEX_SUFFIX}", index)
        commit.publish()
    stored_bytes = sum(file.size for file in files) + len(index)
    return WriteResult(
        stored_bytes=stored_bytes,
        new_bytes=stored_bytes,
        peak_buffer_bytes=settings.pool.peak_bytes,
        direct_io=all(file.direct for file in files),
    )


def _is_one_file(destination: Path) -> bool:
    return destination.suffix.lower() in (SUFFIX, CODED_SUFFIX)


def _commit_to(destination: Path, *, single: bool, overwrite: bool) -> PendingCommit:
    replaceable = _is_replaceable_file if single else _is_replaceable_directory
    return storage_of(destination).commit(
        destination, directory=not single, overwrite=overwrite, replaceable=replaceable
    )


def _is_replaceable_file(path: Path) -> bool:
    return stat.S_ISREG(file_mode(path)) and begins_like_safetensors(path)


def _is_replaceable_directory(path: Path) -> bool:
    # The directory of a model often holds a tokenizer, a configuration or other weights, which must not be removed.
    place = locate(path)
    if place is None or not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    if not place.name.endswith(INDEX_SUFFIX):
        return names == {place.name}
    with LocalDirectory(path) as directory:
        return names <= {place.name, *read_index(directory, place).files.values()}


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


def _plans(flat: Flat[Source], shard_bytes: int | str | None, metadata: dict[str, str]) -> list[FilePlan]:
    """Return the files to write: all tensors by full name, and the structure of the state in the first file."""
    if "__metadata__" in flat.leaves:
        raise UnsupportedError("safetensors reserves this name", name="__metadata__", remedy="rename the tensor")
    whole = Flat(flat.skeleton, flat.leaves, {}, {name: (DEFAULT_PART, name) for name in flat.leaves})
    plans = plan_files(whole, shard_bytes) or [FilePlan(f"{DEFAULT_PART}{SUFFIX}", DEFAULT_PART, ())]
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
