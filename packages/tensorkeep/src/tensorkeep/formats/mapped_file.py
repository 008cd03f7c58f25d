"""Files of checkpoints as memory: mapped from a disk, or fetched from an object store when they are used."""

import ctypes
import io
import itertools
import mmap
import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorkeep.errors import StoreError
from tensorkeep.machine import libc, memory_file
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import parallel
from tensorkeep.storage.base import SourceFile
from tensorkeep.storage.store_requests import SMALL_REQUESTS
from tensorkeep.storage.system_errors import close, store_errors

# The unit of fetching and freeing; a multiple of the page size, because freeing works on pages.
_PIECE = 16 * 1024
_MOST_PIECES = 8 * 1024**2 // _PIECE  # in one request

_MISSING, _COMING, _HERE = range(3)


class MappedFile:
    """A file as memory; read ``content`` only inside ``with file.needed(...)`` or ``with file.needed_by(view)``."""

    def __init__(self, path: Path, content: Bytes) -> None:
        self.path = path
        self.size = len(content)
        self.content = content

    def needed(self, start: int, stop: int) -> AbstractContextManager[None]:
        """Use a range of the file in a block; from any thread."""
        return nullcontext()

    def needed_by(self, view: npt.NDArray[Any]) -> AbstractContextManager[None]:
        """Use a view of ``content`` in a block; its strides must not be negative. From any thread."""
        return nullcontext()

    def all_needed(self, ranges: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Use several ranges in a block; many requests at once fetch them."""
        return nullcontext()

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges that are needed soon, with many requests at once."""

    def stream(self, start: int = 0, stop: int | None = None) -> io.BufferedReader:
        return io.BufferedReader(_Part(self, start, self.size if stop is None else stop))


class FetchedParts:
    """The fetched pieces of all files of a checkpoint: about ``budget`` bytes, and everything that is in use."""

    def __init__(self, budget: int) -> None:
        self.changed = threading.Condition()
        self._budget = budget
        self._bytes = 0
        self._pieces: Counter[int] = Counter()  # present pieces, by file
        self._collected: deque[int] = deque()
        self._time = 0
        self._numbers = itertools.count()
        self._files: weakref.WeakValueDictionary[int, FetchedFile] = weakref.WeakValueDictionary()
        self._idle: OrderedDict[tuple[int, int, int], int] = OrderedDict()

    def add(self, file: "FetchedFile") -> int:
        number = next(self._numbers)
        self._files[number] = file
        # The memory is freed with the file. Garbage collection may run inside the lock, so it is counted later.
        weakref.finalize(file, self._collected.append, number).atexit = False
        return number

    def came(self, number: int, count: int) -> None:
        """Count fetched pieces of a file; the lock is held."""
        self._count(number, count)
        self.changed.notify_all()

    def _count(self, number: int, pieces: int) -> None:
        self._pieces[number] += pieces
        self._bytes += pieces * _PIECE

    def used(self, number: int, first: int, last: int) -> int:
        """Record the last use of pieces, and return its time; the lock is held."""
        # A range that was needed once is then read in smaller ranges: with a smaller budget, every small read would
        # fetch it again.
        self._budget = max(self._budget, (last - first) * _PIECE)
        self._time += 1
        # Sorted by time: the oldest use is the first to be freed.
        self._idle[number, first, last] = self._time
        self._idle.move_to_end((number, first, last))
        return self._time

    def give_back(self) -> None:
        """Free the least recently used pieces, down to the budget; the lock is held."""
        while self._collected:
            self._bytes -= self._pieces.pop(self._collected.popleft(), 0) * _PIECE
        while self._bytes > self._budget and self._idle:
            (number, first, last), time = self._idle.popitem(last=False)
            file = self._files.get(number)
            if file is not None:
                self._count(number, -file.give_back(first, last, time))


# The memory of a fetched object is as long as the object, and sparse: pieces appear when they are needed, and are
# punched out again over the budget. Parsers see one array in both cases.
class FetchedFile(MappedFile):
    """An object of a store as memory."""

    def __init__(self, file: SourceFile, parts: FetchedParts) -> None:
        self.source = file
        self._parts = parts
        self._number = parts.add(self)
        count = -(-file.size // _PIECE)
        self._states = np.zeros(count, np.uint8)
        # Guarded by ``parts.changed``, as are all states: one lock for all files of a checkpoint.
        self._users = np.zeros(count, np.int32)
        self._times = np.zeros(count, np.int64)
        self._failure: BaseException | None = None
        super().__init__(file.path, _reserve(file) if file.size else np.empty(0, np.uint8))

    @contextmanager
    def needed(self, start: int, stop: int) -> Iterator[None]:
        """Fetch the missing pieces of a range and use it in a block; raises the errors of `SourceFile.read_into`."""
        start, stop = max(start, 0), min(stop, self.size)
        first, last = start // _PIECE, -(-stop // _PIECE)
        if start >= stop:
            yield
            return
        with self._parts.changed:
            # Counted before fetching, so that no other thread frees a piece in between.
            self._users[first:last] += 1
            # A failure from before this call does not count: the store may answer again.
            known = self._failure
        try:
            self._fetch(first, last, known)
            yield
        finally:
            with self._parts.changed:
                self._users[first:last] -= 1
                self._times[first:last] = self._parts.used(self._number, first, last)
                self._parts.give_back()

    def needed_by(self, view: npt.NDArray[Any]) -> AbstractContextManager[None]:
        steps = zip(view.shape, view.strides, strict=True)
        start = view.ctypes.data - self.content.ctypes.data
        # The last byte of a view with gaps: everything between its first and last element counts.
        end = start + sum((length - 1) * stride for length, stride in steps) + view.itemsize
        return self.needed(start, end) if view.size else nullcontext()

    @contextmanager
    def all_needed(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        ranges = [*ranges]
        if len(ranges) > 1:
            self.prefetch(ranges)
        with ExitStack() as stack:
            for start, stop in ranges:
                stack.enter_context(self.needed(start, stop))
            yield

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        parallel.run((partial(self._touch, start, stop) for start, stop in ranges), SMALL_REQUESTS)

    def _touch(self, start: int, stop: int) -> None:
        with self.needed(start, stop):
            pass

    def _fetch(self, first: int, last: int, known: BaseException | None) -> None:
        # The run of pieces that this thread fetches. After any exception, Ctrl-C included, other threads must not wait
        # for them forever.
        taken: list[tuple[int, int]] = []
        try:
            while self._take(first, last, known, taken):
                begin, end = taken[0]
                start, stop = begin * _PIECE, min(end * _PIECE, self.size)
                # Outside the lock: requests of several threads run at the same time.
                self.source.read_into(start, self.content[start:stop])
                with self._parts.changed:
                    self._states[begin:end] = _HERE
                    taken.clear()
                    self._parts.came(self._number, end - begin)
        except BaseException as error:
            with self._parts.changed:
                # Not Ctrl-C: an interrupt of this thread says nothing about the store.
                if taken and isinstance(error, Exception):
                    self._failure = error
                for begin, end in taken:
                    self._states[begin:end] = _MISSING
                # Waiting threads look again: they raise the failure, or fetch the pieces themselves.
                self._parts.changed.notify_all()
            raise

    def _take(self, first: int, last: int, known: BaseException | None, taken: list[tuple[int, int]]) -> bool:
        """Reserve a run of missing pieces for the caller to fetch; return False once all pieces are present."""
        with self._parts.changed:
            while True:
                # Another thread has used up all retries: trying again here would take as long and fail as well.
                if self._failure is not None and self._failure is not known:
                    raise self._failure
                states = self._states[first:last]
                missing = np.flatnonzero(states == _MISSING)
                if missing.size:
                    # Neighbouring pieces come in one request.
                    run = states[missing[0] :][:_MOST_PIECES]
                    begin = first + int(missing[0])
                    end = begin + (int(np.argmax(run != _MISSING)) or run.size)
                    taken.append((begin, end))
                    self._states[begin:end] = _COMING
                    return True
                if not (states == _COMING).any():
                    return False
                self._parts.changed.wait()

    def give_back(self, first: int, last: int, time: int) -> int:
        """Free pieces last used at ``time`` and not in use; return their number. The lock is held."""
        part = slice(first, last)
        # A piece that was used again since has a later time, and stays.
        idle = (self._states[part] == _HERE) & (self._users[part] == 0) & (self._times[part] == time)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], idle.view(np.int8), [0]))))
        count = 0
        for begin, end in (edges.reshape(-1, 2) + first).tolist():
            address = ctypes.c_void_p(self.content.ctypes.data + begin * _PIECE)
            if libc().madvise(address, ctypes.c_size_t((end - begin) * _PIECE), mmap.MADV_REMOVE) == 0:
                self._states[begin:end] = _MISSING
                count += end - begin
        return count


def _reserve(file: SourceFile) -> Bytes:
    import torch

    with store_errors(file.path, "reserve memory for it"):
        # A file in memory: unlike anonymous memory, its missing pieces do not count as committed.
        fd = memory_file()
        try:
            os.ftruncate(fd, file.size)
            # Unlike Python's, torch's mapping does not keep a descriptor open.
            return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=file.size, dtype=torch.uint8).numpy()
        except RuntimeError as error:
            raise StoreError(f"cannot reserve memory for it ({error})", path=file.path) from error
        finally:
            close(fd)


def stream_of(file: SourceFile) -> io.BufferedReader:
    if not file.ranges_are_requests:
        return open(file.fd_path, "rb")
    return map_file(file, FetchedParts(0)).stream()


def map_file(file: SourceFile, parts: FetchedParts) -> MappedFile:
    if file.ranges_are_requests:
        return FetchedFile(file, parts)
    # Mapping an empty file is an error.
    return MappedFile(file.path, file.map_private() if file.size else np.empty(0, np.uint8))


class _Part(io.RawIOBase):
    def __init__(self, file: MappedFile, start: int, stop: int) -> None:
        self._file = file
        self._start = start
        self._size = stop - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if origin + offset < 0:
            raise ValueError("a seek before the beginning")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        start = self._start + self._position
        with self._file.needed(start, start + count):
            buffer[:count] = memoryview(self._file.content[start : start + count])
        self._position += count
        return count
