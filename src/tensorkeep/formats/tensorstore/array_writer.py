"""Writing many arrays into one directory, within one memory budget.

An array is written in regions of full chunks, so that TensorStore never reads a chunk back. A thread waits until the
budget admits a region and hands it to TensorStore, which releases the bytes when the region is written. If the memory
of the state already has the stored form, TensorStore reads it without a copy.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.formats.boxes import Box, box_shape, box_to_ranges, grid, grow
from tensorkeep.formats.tensorstore import library
from tensorkeep.formats.tensorstore.library import ArrayDirectory, tensorstore
from tensorkeep.formats.tensorstore.options import TensorStoreOptions
from tensorkeep.formats.tensorstore.specs import MAX_DIMENSIONS, Layout, create_spec, layout_of
from tensorkeep.io import parallel
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import Cancelled
from tensorkeep.state.leaf import Leaf, Source

_REGIONS = 4
"""A region takes at most this fraction of the budget, unless a chunk is larger, so that several are in flight."""

_CREATED_AHEAD = 16


class ByteBudget:
    """A limit on the bytes of all regions in flight.

    A region acquires all its bytes at once and holds nothing while it waits, and regions are admitted in the order of
    their requests, so none waits forever. A region larger than the limit is admitted alone. The memory belongs to the
    state or to TensorStore; `tensorkeep.io.buffers.BufferPool`, in contrast, allocates the buffers that it returns.
    ``peak`` is the most bytes that were in flight at one moment.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.peak = 0
        self._used = 0
        self._waiting: deque[object] = deque()
        self._cancelled = False
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> None:
        """Wait until so many bytes are free, after all earlier requests, and take them.

        Raises Cancelled if `cancel` was called.
        """
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
        """Free bytes that were acquired."""
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def cancel(self) -> None:
        """Make all waiting and later requests fail; bytes in flight must still be released."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def wait_until_empty(self) -> None:
        """Wait until nothing is in flight."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0)


def write_arrays(
    directory: ArrayDirectory,
    arrays: Mapping[str, Source],
    options: TensorStoreOptions,
    *,
    budget: ByteBudget,
    threads: int,
    meter: parallel.Meter,
) -> dict[str, Layout]:
    """Write each source as a new array under its key, and return how it is stored.

    The files are durable on return if the options ask for it, but not the names of new directories (see
    `sync_directories`). The state must not change during the call. The budget counts the bytes of all regions in
    flight: copies made here, and what TensorStore encodes. The threads gather and convert what it cannot read in place.

    Raises UnsupportedLeafError if an array has more than 32 dimensions; nothing was written; StoreError if the disk
    fails.
    """
    for source in arrays.values():
        if len(source.shape) > MAX_DIMENSIONS:
            raise UnsupportedLeafError(
                f"a TensorStore array has at most {MAX_DIMENSIONS} dimensions, this tensor has {len(source.shape)}",
                name=source.name,
                remedy="reshape it",
            )
    context = library.context(
        concurrency=options.concurrency, copy_concurrency=options.copy_concurrency, sync=options.sync
    )
    writer = _ArrayWriter(directory, options, budget, meter, context)
    jobs = [_Job(key, source, options) for key, source in arrays.items()]
    try:
        if options.in_flight == "one":
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
        raised = directory.write_error(cause, name)
        raise raised from (None if raised is cause else cause)
    return {job.key: job.layout for job in jobs}


class _Job:
    """One array: its source, how it is cut, and the future of the array itself once its creation was started."""

    def __init__(self, key: str, source: Source, options: TensorStoreOptions) -> None:
        self.key = key
        self.source = source
        self.host = source.host_bytes()
        self.layout = layout_of(source.dtype, source.shape, options)
        self.types = self.layout.types
        self.array: Any = None
        in_place = self.host is not None and not self.types.converts
        # TensorStore reads a chunk that it encodes more than once; the tensors of a state may change meanwhile.
        self.copied = in_place and options.encodes and isinstance(source, Leaf)

    def cost(self, elements: int) -> int:
        """Return the bytes in flight for so many elements: encoded, copied or converted, and gathered."""
        stored, own = self.types.stored.itemsize, self.source.dtype.itemsize
        gathered = own if self.host is None else 0
        copied = stored if self.copied or self.types.converts else 0
        return elements * (stored + copied + gathered)

    def content(self, box: Box) -> npt.NDArray[Any]:
        """Return a region as it is stored; a view of the state's memory if that has the stored form."""
        if self.host is None:
            data = self._gather(box)
        elif not self.types.converts:
            view = self.host.view(self.types.stored.numpy).reshape(self.layout.shape)[box]
            return view if view.flags.aligned else view.copy()
        else:
            elements = self.host.view(self.types.dtype.numpy).reshape(self.layout.shape)[box]
            data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        return self.types.to_stored(data).reshape(box_shape(box))

    def _gather(self, box: Box) -> Bytes:
        """Return the bytes of a region, read range by range."""
        size, at = self.source.dtype.itemsize, 0
        out = np.empty(prod(box_shape(box)) * size, np.uint8)
        for start, stop in box_to_ranges(self.layout.shape, box):
            nbytes = (stop - start) * size
            self.source.read(start * size, stop * size, out[at : at + nbytes])
            at += nbytes
        return out


@dataclass
class _ArrayWriter:
    """Writes the arrays of one call of `write_arrays`."""

    directory: ArrayDirectory
    options: TensorStoreOptions
    budget: ByteBudget
    meter: parallel.Meter
    context: Any
    failure: tuple[BaseException, str | None] | None = None
    cancellation: parallel.Cancellation = field(default_factory=parallel.Cancellation)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tasks(self, jobs: list[_Job]) -> Iterator[Callable[[], None]]:
        """Yield a task for each region of all arrays, and one for each empty array."""
        # Creating an array waits for the disk, so a few are created ahead.
        for number, job in enumerate(jobs):
            for later in jobs[number : number + _CREATED_AHEAD]:
                self._start_creating(later)
            regions = [functools.partial(self.submit, job, box) for box in self._regions(job)]
            yield from regions or [functools.partial(self._create, job)]

    def write_alone(self, job: _Job) -> None:
        """Write one array completely before the next is created."""
        self._create(job)
        for box in self._regions(job):
            self.cancellation.check()
            self.submit(job, box)
        self.budget.wait_until_empty()
        if self.failure:
            raise self.failure[0]

    def _start_creating(self, job: _Job) -> None:
        """Start to create an array, unless that was started before; called by one thread at a time."""
        if job.array is None:
            spec = create_spec(self.directory, job.key, job.layout, self.options)
            job.array = tensorstore().open(spec, create=True, open=False, context=self.context)

    def _create(self, job: _Job) -> None:
        try:
            self._start_creating(job)
            job.array.result()
        except BaseException as error:
            self._fail(error, job)
            raise

    def _regions(self, job: _Job) -> Iterator[Box]:
        """Yield the regions of an array: a single one, if arrays are written one by one and it fits the budget."""
        elements = self.budget.limit // job.cost(1)
        if self.options.in_flight == "all" or prod(job.layout.shape) > elements:
            elements //= _REGIONS
        return grid(job.layout.shape, grow(job.layout.shape, job.layout.shard, elements))

    def submit(self, job: _Job, box: Box) -> None:
        """Hand a region to TensorStore as soon as the budget admits it."""
        elements = prod(box_shape(box))
        cost = job.cost(elements)
        self.budget.acquire(cost)
        try:
            content = job.content(box)
            store = job.array.result()
            target = store[box] if box else store
            future = target.write(content, can_reference_source_data_indefinitely=not job.copied).commit
            future.force()
        except BaseException as error:
            self._fail(error, job)
            self.budget.release(cost)
            raise

        def finish(done: Any, content: npt.NDArray[Any] = content) -> None:
            # The content stays referenced until here: TensorStore reads its memory.
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
        self.cancellation.cancel()
        self.budget.cancel()
