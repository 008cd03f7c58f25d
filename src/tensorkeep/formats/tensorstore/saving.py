"""Writing a state as TensorStore's arrays: the arrays, then the file that says what they are, then one rename."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from tensorkeep.errors import DestinationExistsError, TensorkeepError, UsageError
from tensorkeep.formats import sealed
from tensorkeep.formats.base import WriteResult, WriteSettings
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.tensorstore import sidecar as sidecars
from tensorkeep.formats.tensorstore.budget import ByteBudget
from tensorkeep.formats.tensorstore.failures import reading, tensorstore, write_error
from tensorkeep.formats.tensorstore.keys import array_keys
from tensorkeep.formats.tensorstore.places import held
from tensorkeep.formats.tensorstore.settings import ArraySettings, TensorStoreOptions
from tensorkeep.formats.tensorstore.sidecar import ArrayRecord, Sidecar
from tensorkeep.formats.tensorstore.specs import METADATA_FILE, Place, context
from tensorkeep.formats.tensorstore.walking import files_below, walk
from tensorkeep.formats.tensorstore.writer import WrittenArray, write_arrays
from tensorkeep.io.commit import Commit
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import DirectFile, store_error, sync_directory, write_small
from tensorkeep.io.parallel import Meter
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.version import __version__


def write(flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
    """Write a state; see `tensorkeep.formats.base.Format.write`."""
    given = ArraySettings.of(settings.options_as(TensorStoreOptions).given())
    if settings.compression != "none":
        raise UsageError(
            f"TensorStore's arrays cannot be compressed with {settings.compression!r}",
            path=destination,
            remedy='leave `compression` out and give the option `compressor`, for example compressor="zstd:1"',
        )
    tensorstore()
    keys = array_keys(flat.leaves)
    budget = ByteBudget(settings.pool.budget)
    meter = Meter(sum(leaf.nbytes for leaf in flat.leaves.values()), settings.progress)
    with (
        Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=is_replaceable) as commit,
        held(commit.path) as root,
    ):
        arrays = {keys[name]: leaf for name, leaf in flat.leaves.items()}
        place = Place(root, given.kvstore)
        written = write_arrays(
            place, arrays, given, budget=budget, threads=settings.threads, meter=meter, directory=destination
        )
        _write_group(place, given, commit.path)
        found = _sidecar(flat, keys, written, given, settings, commit.path, place)
        _write_file(commit.path / sidecars.FILE_NAME, sealed.seal(found), sync=given.sync)
        if given.sync:
            sync_directories(commit.path)
        stored_bytes = _total_bytes(commit.path, found)
        commit.publish()
    return WriteResult(stored_bytes=stored_bytes, new_bytes=stored_bytes, peak_buffer_bytes=budget.peak)


def _total_bytes(directory: Path, found: Sidecar) -> int:
    if found.kvstore == "ocdbt":
        return sum(files_below(directory).values())
    own = sum(entry.stat().st_size for entry in os.scandir(directory) if entry.is_file())
    return own + sum(array.stored_bytes for array in found.arrays.values())


def sync_directories(path: Path) -> None:
    """Make the names in a directory and in all those below it durable.

    Raises
    ------
    StoreError
    """
    try:
        for folder, _, _ in walk(path, bottom_up=True):
            sync_directory(Path(folder))
    except OSError as error:
        raise store_error(error, path, "make the directories durable") from error


def _write_file(path: Path, content: bytes, *, sync: bool) -> None:
    if sync:
        write_small(path, content)
        return
    file = DirectFile(path, direct=False)
    try:
        file.write(0, np.frombuffer(content, np.uint8))
    finally:
        file.close()


def _write_group(place: Place, given: ArraySettings, directory: Path) -> None:
    """Write what makes a group of the arrays, into the directory or the database."""
    if given.kvstore == "file":
        for name, content in sidecars.GROUP_FILES[given.zarr].items():
            _write_file(directory / name, content, sync=given.sync)
        return
    try:
        store = tensorstore().KvStore.open(place.store(), context=context(sync=given.sync)).result()
        for name, content in sidecars.GROUP_FILES[given.zarr].items():
            store.write(name, content).result()
    except ValueError as error:
        raise write_error(error, directory, place.root) from error


def _sidecar(
    flat: Flat[Source],
    keys: dict[str, str],
    written: dict[str, WrittenArray],
    given: ArraySettings,
    settings: WriteSettings,
    directory: Path,
    place: Place,
) -> Sidecar:
    sizes = _stored_bytes(flat, keys, directory, given)
    digests = _metadata_digests(place, given.zarr, list(keys.values()), directory)
    records = {}
    for name, leaf in flat.leaves.items():
        types = written[keys[name]].types
        records[name] = ArrayRecord(
            keys[name], types.dtype.name, types.stored.name, leaf.shape, sizes[name], digests[keys[name]]
        )
    return Sidecar(
        format=sidecars.FORMAT,
        version=sidecars.VERSION,
        writer=f"tensorkeep {__version__}",
        zarr=given.zarr,
        kvstore=given.kvstore,
        settings=dict(sorted(settings.options_as(TensorStoreOptions).given().items())),
        arrays=records,
        structure=Structure.of_state(flat),
        files=files_below(directory) if given.kvstore == "ocdbt" else {},
        metadata=settings.metadata,
    )


def _stored_bytes(flat: Flat[Source], keys: dict[str, str], directory: Path, given: ArraySettings) -> dict[str, int]:
    """Return the bytes of each array's files; those of a database are shared out by the size of the tensors."""
    if given.kvstore == "file":
        return {name: sum(files_below(directory / keys[name]).values()) for name in flat.leaves}
    total = sum(files_below(directory).values())
    nbytes = max(1, sum(leaf.nbytes for leaf in flat.leaves.values()))
    return {name: total * leaf.nbytes // nbytes for name, leaf in flat.leaves.items()}


def _metadata_digests(place: Place, zarr: int, keys: list[str], directory: Path) -> dict[str, str]:
    if not keys:
        return {}
    with reading(directory, place.root):
        store = tensorstore().KvStore.open(place.store(), context=context()).result()
        futures = {key: store.read(f"{key}/{METADATA_FILE[zarr]}") for key in keys}
        return {key: sealed.digest(future.result().value) for key, future in futures.items()}


def is_replaceable(path: Path) -> bool:
    """Say whether a path is a checkpoint that we wrote as TensorStore's arrays, and nothing else.

    Raises
    ------
    DestinationExistsError
        If it holds files that are no part of the checkpoint, which nobody asked to remove.
    """
    if not sidecars.is_ours(path):
        return False
    try:
        with Directory(path) as directory:
            found = sidecars.read(directory)
    except TensorkeepError:
        # What a damaged file lists is not known, so whose the rest is, isn't either.
        return False
    names = {record.key for record in found.arrays.values()} if found.kvstore == "file" else {"manifest.ocdbt", "d"}
    listed = {sidecars.FILE_NAME, *sidecars.GROUP_FILES[found.zarr], *names}
    foreign = [entry.name for entry in path.iterdir() if entry.name not in listed]
    if foreign:
        raise DestinationExistsError(
            f"holds {min(foreign)!r}, which is no part of the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True


def as_details(found: Sidecar) -> dict[str, Any]:
    """Return what `info` shows of a checkpoint besides its tensors."""
    return {
        "version": found.version,
        "writer": found.writer,
        "zarr": found.zarr,
        "kvstore": found.kvstore,
        "settings": found.settings,
    }
