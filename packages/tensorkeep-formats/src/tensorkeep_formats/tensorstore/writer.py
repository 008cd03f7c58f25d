"""Writes states as TensorStore arrays: arrays, sidecar, then one rename."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import DestinationExistsError, TensorkeepError, UnsupportedLeafError, UsageError
from tensorkeep.ext.formats import (
    Box,
    Structure,
    WriteResult,
    WriteSettings,
    box_shape,
    box_to_ranges,
    checksummed_json,
    grid,
    grow,
    sidecar,
)
from tensorkeep.ext.state import Flat, Leaf, Source
from tensorkeep.ext.storage import (
    Bytes,
    Cancelled,
    Commit,
    LocalDirectory,
    Meter,
    names_in,
    parallel,
    store_errors,
    write_small,
)
from tensorkeep_formats.tensorstore import library, specs
from tensorkeep_formats.tensorstore.library import ArrayDirectory, tensorstore
from tensorkeep_formats.tensorstore.reader import TensorStoreSidecar

# A region takes at most a quarter of the budget, unless a chunk is larger, so that several are in flight.
_REGIONS = 4
_CREATED_AHEAD = 16


# A region acquires all its bytes at once and holds nothing while it waits. Regions are admitted in the order of their
# requests, so none waits forever. A region larger than the limit is admitted alone. The budget allocates nothing: the
# memory belongs to the state or to TensorStore.
class ByteBudget:
    """A limit on the bytes of all regions in flight; ``peak`` is the most bytes at one moment."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._used = 0
        self._waiting: deque[object] = deque()
        self._cancelled = False
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> None:
        """Wait until so many bytes are free, after all earlier requests, and take them; Cancelled after `cancel`."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._cancelled or (self._waiting[0] is ticket and self._fits(nbytes)))
                if self._cancelled:
                    raise Cancelled
                self._used += nbytes
                self.peak = max(self.peak, self._used)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        return self._used == 0 or self._used + nbytes <= self.limit

    def release(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make all waiting and later requests fail; bytes in flight must still be released."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0)


def write_arrays(
    directory: ArrayDirectory,
    arrays: Mapping[str, Source],
    options: specs.TensorStoreOptions,
    *,
    budget: ByteBudget,
    threads: int,
    meter: parallel.Meter,
) -> dict[str, specs.ArrayLayout]:
    """Write each source as a new array under its key, and return how the arrays are stored.

    With ``sync``, the files are durable on return, but not the names of new directories (see `sync_directories`). The
    state must not change during the call.
    """
    for source in arrays.values():
        if len(source.shape) > specs.MAX_DIMENSIONS:
            raise UnsupportedLeafError(
                f"this tensor has {len(source.shape)} dimensions, a TensorStore array at most {specs.MAX_DIMENSIONS}",
                name=source.name,
                remedy="reshape it",
            )
    context = library.context(
        concurrency=options.concurrency, copy_concurrency=options.copy_concurrency, sync=options.sync
    )
    writer = _ArrayWriter(directory, options, budget, meter, context)
    # Host memory is looked up once: a tensor on a GPU has none and is gathered region by region.
    jobs = [_Job(key, source, options) for key, source in arrays.items()]
    try:
        if options.in_flight == "one":
            parallel.run((functools.partial(writer.write_alone, job) for job in jobs), 1, writer.cancellation)
        else:
            parallel.run(writer.tasks(jobs), threads, writer.cancellation)
    except Exception as error:
        # The first failure caused the others, such as Cancelled.
        writer.failure = writer.failure or (error, None)
    finally:
        # TensorStore reads the state's memory until the last region is written, even after a failure.
        parallel.run([budget.wait_until_empty], 1)
    if writer.failure:
        cause, name = writer.failure
        raised = directory.write_error(cause, name)
        raise raised from (None if raised is cause else cause)
    return {job.key: job.layout for job in jobs}


class _Job:
    def __init__(self, key: str, source: Source, options: specs.TensorStoreOptions) -> None:
        self.key = key
        self.source = source
        self.host = source.host_bytes()
        self.layout = specs.layout_of(source.dtype, source.shape, options)
        self.types = self.layout.types
        # The future of the TensorStore array, once its creation has started.
        self.array: Any = None
        in_place = self.host is not None and not self.types.converts
        # TensorStore reads a chunk more than once when it encodes it; the tensors of a state may change meanwhile.
        self.copied = in_place and options.encodes and isinstance(source, Leaf)

    def cost(self, elements: int) -> int:
        """Return the bytes in flight for a number of elements: encoded, copied or converted, and gathered."""
        stored, own = self.types.stored.itemsize, self.source.dtype.itemsize
        gathered = own if self.host is None else 0
        copied = stored if self.copied or self.types.converts else 0
        return elements * (stored + copied + gathered)

    def content(self, box: Box) -> npt.NDArray[Any]:
        """Return a region in its stored form; a view of the state's memory if possible."""
        if self.host is None:
            data = self._gather(box)
        elif not self.types.converts:
            view = self.host.view(self.types.stored.numpy).reshape(self.layout.shape)[box]
            # TensorStore needs aligned elements.
            return view if view.flags.aligned else view.copy()
        else:
            elements = self.host.view(self.types.dtype.numpy).reshape(self.layout.shape)[box]
            data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        return self.types.to_stored(data).reshape(box_shape(box))

    def _gather(self, box: Box) -> Bytes:
        size, at = self.source.dtype.itemsize, 0
        out = np.empty(prod(box_shape(box)) * size, np.uint8)
        for start, stop in box_to_ranges(self.layout.shape, box):
            nbytes = (stop - start) * size
            self.source.read(start * size, stop * size, out[at : at + nbytes])
            at += nbytes
        return out


@dataclass
class _ArrayWriter:
    directory: ArrayDirectory
    options: specs.TensorStoreOptions
    budget: ByteBudget
    meter: parallel.Meter
    context: Any
    failure: tuple[BaseException, str | None] | None = None
    cancellation: parallel.Cancellation = field(default_factory=parallel.Cancellation)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tasks(self, jobs: list[_Job]) -> Iterator[Callable[[], None]]:
        # Creating an array waits for the disk, so the creation of the next arrays starts ahead.
        for number, job in enumerate(jobs):
            for later in jobs[number : number + _CREATED_AHEAD]:
                self._start_creating(later)
            regions = [functools.partial(self.submit, job, box) for box in self._regions(job)]
            yield from regions or [functools.partial(self._create, job)]

    def write_alone(self, job: _Job) -> None:
        self._create(job)
        for box in self._regions(job):
            self.cancellation.check()
            self.submit(job, box)
        self.budget.wait_until_empty()
        if self.failure:
            raise self.failure[0]

    def _start_creating(self, job: _Job) -> None:
        """Start to create an array once; called by one thread at a time."""
        if job.array is None:
            spec = specs.create_spec(self.directory, job.key, job.layout, self.options)
            job.array = tensorstore().open(spec, create=True, open=False, context=self.context)

    def _create(self, job: _Job) -> None:
        try:
            self._start_creating(job)
            job.array.result()
        except BaseException as error:
            self._fail(error, job)
            raise

    def _regions(self, job: _Job) -> Iterator[Box]:
        # One element costs more than its bytes if it is copied or encoded.
        elements = self.budget.limit // job.cost(1)
        if self.options.in_flight == "all" or prod(job.layout.shape) > elements:
            elements //= _REGIONS
        # Regions of full chunks, or TensorStore would read a chunk back to write its other part.
        return grid(job.layout.shape, grow(job.layout.shape, job.layout.shard, elements))

    def submit(self, job: _Job, box: Box) -> None:
        elements = prod(box_shape(box))
        cost = job.cost(elements)
        # Before the content is made: the copy counts as well.
        self.budget.acquire(cost)
        try:
            content = job.content(box)
            store = job.array.result()
            target = store[box] if box else store
            future = target.write(content, can_reference_source_data_indefinitely=not job.copied).commit
            # Without this, TensorStore may delay the write until its result is asked for.
            future.force()
        except BaseException as error:
            self._fail(error, job)
            self.budget.release(cost)
            raise

        def finish(done: Any, content: npt.NDArray[Any] = content) -> None:
            # The default argument keeps the content alive until here: TensorStore reads its memory.
            try:
                done.result()
                self.meter.add(elements * job.source.dtype.itemsize)
            except BaseException as error:
                self._fail(error, job)
            finally:
                self.budget.release(cost)

        future.add_done_callback(finish)

    def _fail(self, error: BaseException, job: _Job) -> None:
        with self.lock:
            if self.failure is None and not isinstance(error, Cancelled):
                self.failure = error, job.source.name
        # No thread starts another region, also not a thread that waits for the budget now.
        self.cancellation.cancel()
        self.budget.cancel()


def write(flat: Flat[Source], destination: Path, settings: WriteSettings) -> WriteResult:
    options = settings.options_as(specs.TensorStoreOptions)
    refuse_compression(settings, destination, 'compressor="zstd:1"')
    tensorstore()
    keys = specs.array_keys(flat.leaves)
    budget = ByteBudget(settings.pool.budget)
    meter = Meter(sum(leaf.nbytes for leaf in flat.leaves.values()), settings.progress)
    with (
        Commit(destination, directory=True, overwrite=settings.overwrite, replaceable=is_replaceable) as commit,
        LocalDirectory(commit.path) as open_directory,
    ):
        directory = ArrayDirectory(destination, f"{open_directory.stable_path}/", options.kvstore)
        sources = {keys[name]: leaf for name, leaf in flat.leaves.items()}
        written = write_arrays(directory, sources, options, budget=budget, threads=settings.threads, meter=meter)
        _write_group(directory, options, commit.path)
        arrays = library.list_tree(str(commit.path), commit.path)[0]
        if options.kvstore == "ocdbt":
            files = {name: sidecar.SidecarFile(size) for name, size in sorted(arrays.items())}
        else:
            names = specs.GROUP_FILES[options.zarr]
            files = {name: sidecar.describe_file(commit.path / name, hashed=True) for name in names}
        notes = _describe_tensors(flat, keys, written, arrays, directory, options)
        content = checksummed_json.seal(
            TensorStoreSidecar(
                format="tensorstore",
                structure=Structure.of_state(flat),
                tensors=notes,
                files=files,
                metadata=settings.metadata,
                zarr=options.zarr,
                kvstore=options.kvstore,
                options=options.non_default(),
            )
        )
        # The sidecar describes all other files, so it comes last.
        _write_file(commit.path / sidecar.FILE_NAME, content, sync=options.sync)
        # TensorStore syncs files, but not the names of new directories.
        if options.sync:
            library.sync_directories(commit.path)
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
    """Return whether Tensorkeep wrote a checkpoint there; DestinationExistsError if other files would be removed."""
    if not sidecar.lies_in(path, "tensorstore"):
        return False
    try:
        with LocalDirectory(path) as directory:
            notes = sidecar.read(directory, "tensorstore", TensorStoreSidecar)
    except TensorkeepError:
        # Without an intact sidecar it is unknown which files belong to the checkpoint.
        return False
    # A database mixes its files; a directory has one folder per array.
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


def _write_group(directory: ArrayDirectory, options: specs.TensorStoreOptions, path: Path) -> None:
    if options.kvstore == "file":
        for name, content in specs.GROUP_FILES[options.zarr].items():
            _write_file(path / name, content, sync=options.sync)
        return
    try:
        store = directory.open_store(sync=options.sync)
        for name, content in specs.GROUP_FILES[options.zarr].items():
            store.write(name, content).result()
    except ValueError as error:
        raise directory.write_error(error) from error


def _describe_tensors(
    flat: Flat[Source],
    keys: Mapping[str, str],
    written: Mapping[str, specs.ArrayLayout],
    files: Mapping[str, int],
    directory: ArrayDirectory,
    options: specs.TensorStoreOptions,
) -> dict[str, sidecar.SidecarTensor]:
    digests: dict[str, str] = {}
    if keys:
        with directory.reading():
            store = directory.open_store()
            futures = {name: store.read(f"{key}/{library.METADATA_FILE[options.zarr]}") for name, key in keys.items()}
            # TensorStore wrote the metadata, so its bytes have to be read back.
            digests = {name: checksummed_json.digest(future.result().value) for name, future in futures.items()}
    # A database mixes all arrays in its files; their bytes are attributed by the sizes of the tensors.
    total = sum(files.values()) if options.kvstore == "ocdbt" else 0
    nbytes = max(1, sum(leaf.nbytes for leaf in flat.leaves.values()))
    notes = {}
    for name, leaf in flat.leaves.items():
        types = written[keys[name]].types
        notes[name] = sidecar.SidecarTensor(
            leaf.dtype.name,
            tuple(leaf.shape),
            place=(keys[name],),
            stored_dtype="" if types.stored is types.dtype else types.stored.name,
            stored_bytes=total * leaf.nbytes // nbytes,
            xxh3_64=digests[name],
        )
    return notes
