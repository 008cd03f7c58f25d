"""Writing many arrays into one directory, with one limit on the memory of all that are in flight.

An array is written in regions of whole chunks, so that TensorStore never reads a chunk back. A thread waits until the
budget has room for a region, hands it to TensorStore and goes on; TensorStore gives the bytes back when the region is
written. Where the state's own memory is what is stored, TensorStore is handed that memory.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.formats.tensorstore import specs
from tensorkeep.formats.tensorstore.budget import ByteBudget
from tensorkeep.formats.tensorstore.failures import tensorstore, write_error
from tensorkeep.formats.tensorstore.regions import Box, box_shape, grown, regions, runs
from tensorkeep.formats.tensorstore.settings import ArraySettings
from tensorkeep.formats.tensorstore.specs import Layout, Place, layout_of
from tensorkeep.formats.tensorstore.stored_types import StoredType, stored_type
from tensorkeep.io import parallel
from tensorkeep.io.files import Bytes
from tensorkeep.state.leaf import Source

_SHARE = 4
"""A region is at most this part of the budget, if a chunk is, so that several are in flight."""

_CREATED_AHEAD = 16

MOST_DIMENSIONS = 32
"""TensorStore's limit."""


@dataclass(frozen=True, slots=True)
class WrittenArray:
    """An array that was written: its key in the directory, its dtypes, and how it is cut."""

    key: str
    types: StoredType
    layout: Layout


def write_arrays(
    place: Place,
    arrays: Mapping[str, Source],
    settings: ArraySettings,
    *,
    budget: ByteBudget,
    threads: int,
    meter: parallel.Meter,
    directory: Path,
) -> dict[str, WrittenArray]:
    """Write each source as a new array under its key.

    The files are durable on return if the settings say so; the names of new directories are not, see
    `sync_directories`. The state must not change meanwhile.

    Parameters
    ----------
    place : Place
    arrays : dict of str to Source
        By key, which is the name of the array's directory (or its prefix in the database).
    budget : ByteBudget
        Over the bytes of all regions in flight: copies made here, and what TensorStore encodes.
    threads : int
        Threads that gather and convert what cannot be handed over as it is.
    meter : parallel.Meter
        Counts the state's bytes that are written.
    directory : Path
        What errors call the place.

    Raises
    ------
    UnsupportedLeafError
        If an array has more than 32 dimensions; nothing was written.
    StoreError, MissingExtraError
    """
    for source in arrays.values():
        if len(source.shape) > MOST_DIMENSIONS:
            raise UnsupportedLeafError(
                f"TensorStore's arrays have at most {MOST_DIMENSIONS} dimensions, this has {len(source.shape)}",
                name=source.name,
                remedy="reshape it",
            )
    writer = _Writer(place, settings, budget, meter)
    jobs = [writer.job(key, source) for key, source in arrays.items()]
    try:
        if settings.in_flight == "one":
            parallel.run((functools.partial(writer.write_alone, job) for job in jobs), 1, writer.cancellation)
        else:
            parallel.run(writer.tasks(jobs), threads, writer.cancellation)
    except Exception as error:
        writer.failure = writer.failure or (error, None)
    finally:
        # TensorStore reads the state's memory until the last region is written, also after a failure.
        parallel.run([budget.wait_until_empty], 1)
    if writer.failure:
        cause, name = writer.failure
        ours = write_error(cause, directory, place.root, name)
        raise ours from (None if ours is cause else cause)
    return {job.key: WrittenArray(job.key, job.types, job.layout) for job in jobs}


@dataclass(frozen=True, slots=True)
class _Job:
    """One array: where it comes from, how it is cut, and how to open it."""

    key: str
    source: Source
    host: Bytes | None
    types: StoredType
    layout: Layout
    opening: _Opening


class _Writer:
    """What all arrays of one call share."""

    def __init__(self, place: Place, settings: ArraySettings, budget: ByteBudget, meter: parallel.Meter) -> None:
        self.failure: tuple[BaseException, str | None] | None = None
        self.cancellation = parallel.Cancellation()
        self._place = place
        self._settings = settings
        self._budget = budget
        self._meter = meter
        self._lock = threading.Lock()
        self._context = specs.context(
            concurrency=settings.concurrency, copy_concurrency=settings.copy_concurrency, sync=settings.sync
        )

    def job(self, key: str, source: Source) -> _Job:
        types = stored_type(source.dtype, self._settings.dtype)
        layout = layout_of(types.stored, source.shape, self._settings)
        spec = specs.create_spec(self._place, key, layout, self._settings)
        start = functools.partial(tensorstore().open, spec, create=True, open=False, context=self._context)
        return _Job(key, source, source.host_bytes(), types, layout, _Opening(start))

    def tasks(self, jobs: list[_Job]) -> Iterator[Callable[[], None]]:
        """Yield a task for each region of all arrays, and one for each that has none."""
        # Creating an array waits for the disk, so a few are created ahead.
        for number, job in enumerate(jobs):
            for later in jobs[number : number + _CREATED_AHEAD]:
                later.opening.begin()
            found = [functools.partial(self.submit, job, box) for box in self._regions(job)]
            yield from found or [functools.partial(self._create, job)]

    def write_alone(self, job: _Job) -> None:
        """Write one array to the end before the next begins."""
        self._create(job)
        for box in self._regions(job):
            self.cancellation.check()
            self.submit(job, box)
        self._budget.wait_until_empty()
        if self.failure:
            raise self.failure[0]

    def _create(self, job: _Job) -> None:
        try:
            job.opening.result()
        except BaseException as error:
            self._fail(error, job)
            raise

    def _regions(self, job: _Job) -> Iterator[Box]:
        """Yield the regions of an array; one, if arrays are written one by one and it fits the budget."""
        most = self._budget.limit // (_cost(job, 1))
        if self._settings.in_flight == "all" or prod(job.layout.shape) > most:
            most //= _SHARE
        return regions(job.layout.shape, grown(job.layout.shape, job.layout.shard, most))

    def submit(self, job: _Job, box: Box) -> None:
        """Hand a region to TensorStore as soon as the budget has room for it."""
        count = prod(box_shape(box))
        cost = _cost(job, count)
        self._budget.acquire(cost)
        try:
            array = _content(job, box)
            store = job.opening.result()
            target = store[box] if box else store
            future = target.write(array, can_reference_source_data_indefinitely=True).commit
            future.force()
        except BaseException as error:
            self._fail(error, job)
            self._budget.release(cost)
            raise

        def finish(done: Any, array: npt.NDArray[Any] = array) -> None:
            # The array is held until here: TensorStore reads its memory.
            try:
                done.result()
                self._meter.add(count * job.source.dtype.itemsize)
            except BaseException as error:
                self._fail(error, job)
            finally:
                self._budget.release(cost)

        future.add_done_callback(finish)

    def _fail(self, error: BaseException, job: _Job) -> None:
        with self._lock:
            if self.failure is None and not isinstance(error, parallel.Cancelled):
                self.failure = error, job.source.name
        self.cancellation.cancel()
        self._budget.cancel()


class _Opening:
    """An array that is created at most once."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._future: Any = None

    def begin(self) -> Any:
        """Begin to create it, unless that was begun already, and return the future."""
        with self._lock:
            if self._future is None:
                self._future = self._start()
            return self._future

    def result(self) -> Any:
        """Return the open array."""
        return self.begin().result()


def _cost(job: _Job, count: int) -> int:
    """Return the bytes that so many elements take on their way: encoded, converted and gathered."""
    stored, own = job.layout.dtype.itemsize, job.source.dtype.itemsize
    gathered = own if job.host is None else 0
    converted = stored if job.types.converts else 0
    return count * (stored + converted + gathered)


def _content(job: _Job, box: Box) -> npt.NDArray[Any]:
    """Return a region as it is stored; a view of the state's memory where that is so already."""
    host = job.host
    if host is None:
        return job.types.to_stored(_gathered(job, box)).reshape(box_shape(box))
    if not job.types.converts:
        found = host.view(job.types.stored.numpy).reshape(job.layout.shape)[box]
        return found if found.flags.aligned else found.copy()
    whole = host.view(job.types.dtype.numpy).reshape(job.layout.shape)[box]
    part = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
    return job.types.to_stored(part).reshape(box_shape(box))


def _gathered(job: _Job, box: Box) -> Bytes:
    """Return the bytes of a region, read run by run."""
    size = job.source.dtype.itemsize
    out = np.empty(prod(box_shape(box)) * size, np.uint8)
    at = 0
    for start, stop in runs(job.layout.shape, box):
        length = (stop - start) * size
        job.source.read(start * size, stop * size, out[at : at + length])
        at += length
    return out
