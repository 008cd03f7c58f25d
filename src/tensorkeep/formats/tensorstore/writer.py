"""Writer of states as TensorStore arrays: arrays, sidecar, then one rename."""

from collections.abc import Mapping
from pathlib import Path

from tensorkeep.errors import DestinationExistsError, TensorkeepError, UsageError
from tensorkeep.formats import sealed, sidecar
from tensorkeep.formats.probe import names_in
from tensorkeep.formats.sidecar import FileNote, TensorNote, note_file
from tensorkeep.formats.structure import Structure
from tensorkeep.formats.tensorstore.array_writer import ByteBudget, write_arrays
from tensorkeep.formats.tensorstore.library import ArrayDirectory, tensorstore
from tensorkeep.formats.tensorstore.listing import list_tree, sync_directories
from tensorkeep.formats.tensorstore.options import TensorStoreOptions
from tensorkeep.formats.tensorstore.reader import TensorStoreSidecar
from tensorkeep.formats.tensorstore.specs import GROUP_FILES, METADATA_FILE, Layout, array_keys
from tensorkeep.formats.write import WriteResult, WriteSettings
from tensorkeep.io.commit import Commit
from tensorkeep.io.directory import Directory
from tensorkeep.io.files import store_errors, write_small
from tensorkeep.io.parallel import Meter
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat


def write(flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
    """Write a state; see `tensorkeep.formats.base.Format.write`."""
    options = settings.options_as(TensorStoreOptions)
    refuse_compression(settings, destination, 'compressor="zstd:1"')
    tensorstore()
    keys = array_keys(flat.leaves)
    budget = ByteBudget(settings.pool.budget)
    meter = Meter(sum(leaf.nbytes for leaf in flat.leaves.values()), settings.progress)
    with (
        Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=is_replaceable) as commit,
        Directory(commit.path) as open_directory,
    ):
        directory = ArrayDirectory(destination, f"{open_directory.fd_path}/", options.kvstore)
        sources = {keys[name]: leaf for name, leaf in flat.leaves.items()}
        written = write_arrays(directory, sources, options, budget=budget, threads=settings.threads, meter=meter)
        _write_group(directory, options, commit.path)
        arrays, _ = list_tree(str(commit.path), commit.path)
        notes = _describe_tensors(flat, keys, written, arrays, directory, options)
        content = sealed.seal(
            TensorStoreSidecar(
                format="tensorstore",
                structure=Structure.of_state(flat),
                tensors=notes,
                files=_note_files(options, commit.path, arrays),
                metadata=settings.metadata,
                zarr=options.zarr,
                kvstore=options.kvstore,
                options=options.non_default(),
            )
        )
        _write_file(commit.path / sidecar.FILE_NAME, content, sync=options.sync)
        if options.sync:
            sync_directories(commit.path)
        stored_bytes = sum(arrays.values()) + len(content)
        commit.publish()
    return WriteResult(stored_bytes=stored_bytes, new_bytes=stored_bytes, peak_buffer_bytes=budget.peak)


def refuse_compression(settings: WriteSettings, destination: Path, example: str) -> None:
    """Raise UsageError for the argument ``compression``: arrays are compressed by an option of the format."""
    if settings.compression != "none":
        raise UsageError(
            f"TensorStore arrays cannot be compressed with {settings.compression!r}",
            path=destination,
            remedy=f"leave `compression` out and give the option `compressor`, for example {example}",
        )


def is_replaceable(path: Path) -> bool:
    """Return whether a path is a checkpoint of TensorStore arrays that Tensorkeep wrote, and nothing else.

    Raises DestinationExistsError if there are other files, which would be removed.
    """
    if not sidecar.lies_in(path, "tensorstore"):
        return False
    try:
        with Directory(path) as directory:
            notes = sidecar.read(directory, "tensorstore", TensorStoreSidecar)
    except TensorkeepError:
        # Without an intact sidecar it is unknown which files belong to the checkpoint.
        return False
    own = {sidecar.FILE_NAME, *(name.split("/")[0] for name in notes.files)}
    if notes.kvstore == "file":
        own |= {key for note in notes.tensors.values() for key in note.place}
    others = [name for name in names_in(path) if name not in own]
    if others:
        raise DestinationExistsError(
            f"holds {others[0]!r}, which is not part of the checkpoint, so it is not replaced",
            path=path,
            remedy="move that elsewhere, or save under another name",
        )
    return True


def _write_file(path: Path, content: bytes, *, sync: bool) -> None:
    if sync:
        write_small(path, content)
        return
    with store_errors(path, "write the file"):
        path.write_bytes(content)


def _write_group(directory: ArrayDirectory, options: TensorStoreOptions, path: Path) -> None:
    """Write the metadata of the group of all arrays, into the directory or the database."""
    if options.kvstore == "file":
        for name, content in GROUP_FILES[options.zarr].items():
            _write_file(path / name, content, sync=options.sync)
        return
    try:
        store = directory.open_store(sync=options.sync)
        for name, content in GROUP_FILES[options.zarr].items():
            store.write(name, content).result()
    except ValueError as error:
        raise directory.write_error(error) from error


def _describe_tensors(
    flat: Flat[Source],
    keys: Mapping[str, str],
    written: Mapping[str, Layout],
    files: Mapping[str, int],
    directory: ArrayDirectory,
    options: TensorStoreOptions,
) -> dict[str, TensorNote]:
    digests: dict[str, str] = {}
    if keys:
        with directory.reading():
            store = directory.open_store()
            futures = {name: store.read(f"{key}/{METADATA_FILE[options.zarr]}") for name, key in keys.items()}
            digests = {name: sealed.digest(future.result().value) for name, future in futures.items()}
    # The files of a database are not separable; their bytes are attributed by the sizes of the tensors.
    total = sum(files.values()) if options.kvstore == "ocdbt" else 0
    nbytes = max(1, sum(leaf.nbytes for leaf in flat.leaves.values()))
    notes = {}
    for name, leaf in flat.leaves.items():
        types = written[keys[name]].types
        notes[name] = TensorNote(
            leaf.dtype.name,
            tuple(leaf.shape),
            place=(keys[name],),
            stored_dtype="" if types.stored is types.dtype else types.stored.name,
            stored_bytes=total * leaf.nbytes // nbytes,
            xxh3_64=digests[name],
        )
    return notes


def _note_files(options: TensorStoreOptions, path: Path, files: Mapping[str, int]) -> dict[str, FileNote]:
    if options.kvstore == "ocdbt":
        return {name: FileNote(size) for name, size in sorted(files.items())}
    return {name: note_file(path / name, hashed=True) for name in GROUP_FILES[options.zarr]}
