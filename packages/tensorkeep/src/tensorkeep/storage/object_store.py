"""Object stores: requests for ranges of objects, uploads in parts, and the objects below a prefix as a directory."""

import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Self, Unpack

import numpy as np

from tensorkeep.errors import CorruptCheckpointError, NotFoundError, StoreError, TensorkeepError, UnsupportedError
from tensorkeep.paths import StorePath, check_url
from tensorkeep.state.leaf import Bytes
from tensorkeep.storage import store_requests
from tensorkeep.storage.base import (
    MANIFEST_NAME,
    WELL_KNOWN,
    CommitOptions,
    Directory,
    OutputFile,
    PendingCommit,
    SourceFile,
    Storage,
)
from tensorkeep.storage.buffers import Buffer, BufferPool, round_up
from tensorkeep.storage.clock import clock
from tensorkeep.storage.direct_io import OutputOptions
from tensorkeep.storage.parallel import POLL_SECONDS, Cancellation, Cancelled, start_thread
from tensorkeep.storage.store_commit import StoreCommit, save_of

_FIRST_BYTES = 64 * 1024
_APPEND_ATTEMPTS = 10
_AGAIN_SECONDS = 0.05
_MOST_OBJECTS = 8
# Tags and first bytes of the objects that `first_bytes` read last.
_first: dict[StorePath, tuple[str, bytes]] = {}


def first_bytes(path: StorePath, count: int) -> bytes:
    """Raises NotFoundError if the object does not exist. The bytes are kept as long as the object has the same tag."""
    if count > _FIRST_BYTES:
        return store_requests.read(path, count)[0]
    known = _first.get(path)
    if not known or store_requests.head(path).tag != known[0]:
        content, status = store_requests.read(path, _FIRST_BYTES)
        known = status.tag or "", content
        # Listed by one call of C code: other threads change the dictionary, which must not happen within an iteration.
        for oldest in list(_first)[: 1 - _MOST_OBJECTS]:
            _first.pop(oldest, None)
        _first[path] = known
    return known[1][:count]


@dataclass
class _Window:
    start: int
    stop: int
    content: memoryview | None = None


class StoreFile(SourceFile):
    """Raises StoreError if the object was replaced since it was opened. With ``content``, it makes no request."""

    ranges_are_requests = True

    def __init__(
        self, path: StorePath, found: store_requests.ObjectStatus | None = None, content: bytes | None = None
    ) -> None:
        self.path = self._url = path
        self._content = content
        found = found or store_requests.head(path)
        self.size = found.size
        self.status = found.as_stat()
        self._tag = found.tag
        self._windows: dict[int, list[_Window]] = {}  # by thread

    @contextmanager
    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        # By thread, without a lock: each thread changes only its own entry, which is one atomic operation.
        self._windows[get_ident()] = [_Window(start, stop) for start, stop in ranges]
        try:
            yield
        finally:
            del self._windows[get_ident()]

    def read_into(self, offset: int, out: Bytes) -> None:
        out[:] = self.fetch(offset, len(out), out)

    def bypasses_cache(self, offset: int, count: int) -> bool:
        # One request for a whole range, not one for each piece.
        return True

    def fetch(self, offset: int, count: int, scratch: Bytes) -> Bytes:
        if not count:
            return scratch[:0]
        for window in self._windows.get(get_ident(), ()):
            if window.start <= offset and offset + count <= window.stop:
                # The first read within a window fetches the whole window; the others are slices.
                if window.content is None:
                    window.content = self._get(window.start, window.stop)
                found = window.content[offset - window.start :][:count]
                break
        else:
            found = self._get(offset, offset + count)
        if len(found) != count:
            raise CorruptCheckpointError(
                f"the object ends at byte {offset + len(found):,}, inside the data", path=self.path
            )
        return np.frombuffer(found, np.uint8)

    def _get(self, start: int, stop: int) -> memoryview:
        if self._content is not None:
            return memoryview(self._content)[start:stop]
        tag, known = _first.get(self._url, ("", b""))
        if tag and tag == self._tag and stop <= len(known):
            return memoryview(known)[start:stop]
        # A range that begins at the end or later is an error of the request, one that ends later is cut short.
        return store_requests.get(self._url, start, stop, tag=self._tag) if start < self.size else memoryview(b"")

    def close(self) -> None: ...


class StoreDirectory(Directory):
    """The objects below a prefix.

    ``../NAME/FILE`` means an object of another checkpoint in the same run. With ``known``, a listing's objects by key,
    no status is requested.
    """

    def __init__(self, path: StorePath, known: Mapping[str, store_requests.ObjectStatus] | None = None) -> None:
        self.path = self._url = path
        self._known = known
        # By name, as first seen: a save replaces the manifest, which then names other objects.
        self._seen: dict[str, store_requests.ObjectStatus] = {}
        self._contents: dict[str, bytes] = {}

    def open(self, name: str, *, follow_links: bool = True, page_cache: bool = True, one_of: int = 1) -> SourceFile:
        # The same object for as long as this directory is open: if it was replaced, reading it is an error.
        found = self._seen.get(name) or self._look_at(name)
        self._seen.setdefault(name, found)
        return StoreFile(self.path_of(name), found, self._contents.get(name))

    def read_once(self, name: str) -> bytes:
        file = self.open(name)
        self._contents[name] = file.read(0, file.size)
        return self._contents[name]

    def status(self, name: str) -> os.stat_result:
        try:
            return (self._seen.get(name) or self._look_at(name)).as_stat()
        except NotFoundError as error:
            raise FileNotFoundError(str(error)) from error

    def path_of(self, name: str) -> StorePath:
        return self._url.parent / name[3:] if name.startswith("../") else self._url / name

    def _look_at(self, name: str) -> store_requests.ObjectStatus:
        path = self.path_of(name)
        if self._known is None:
            # An object of another checkpoint has that as well.
            return store_requests.head(path)._replace(links=2 if name.startswith("../") else 1)
        # `known` is a complete listing, so an absent key is an absent object.
        if path.key not in self._known:
            raise NotFoundError("does not exist", path=path)
        return self._known[path.key]

    def changed(self, names: Iterable[str]) -> str | None:
        for name in names:
            try:
                # The tag changes with the content. The size and the time need not.
                if store_requests.head(self.path_of(name)).tag != self._seen[name].tag:
                    return name
            except NotFoundError:
                return name
        return None

    def was_replaced(self) -> bool:
        try:
            return self.changed(self._seen) is not None
        except StoreError:
            return False  # the error that was raised before says more

    def close(self) -> None: ...


# Writing a new object of a store from many threads, in parts that are on their way while others are still computed.
#
# obstore takes the bytes of an object in order, from one iterator, and sends several parts at once, from the memory in
# which they are: nothing is copied. A buffer therefore returns to its pool when obstore has dropped its last reference
# to it, and so what is on its way counts within the pool's budget.
#
# A thread never waits for memory that only a later write could free. What does not fill a part is copied to a buffer of
# the upload, and everything else is sent without waiting for more.

_PART_BYTES = 8 * 1024**2
# The parts that S3 allows for an object.
_MOST_PARTS = 10_000
# Parts of one object that are on their way. A network of 1.2 MB/s sends them in time: see
# `store_requests.GIVE_UP_SECONDS`.
_PARTS_AT_ONCE = 8


def part_bytes(most_bytes: int) -> int:
    """Return the size of the parts of an object of at most so many bytes."""
    # In whole MiB, and so large that the most parts are enough.
    return max(_PART_BYTES, round_up(-(-most_bytes // _MOST_PARTS), 1024**2))


class Upload:
    """An object that many threads write at once, every byte once; it appears in `finish`, complete."""

    # The page cache is not concerned.
    direct = False

    def __init__(
        self, path: StorePath, pool: BufferPool, cancellation: Cancellation, **options: Unpack[OutputOptions]
    ) -> None:
        self.path = path
        self._part_bytes = part_bytes(options["most_bytes"])
        self._pool = pool
        self._cancellation = cancellation
        self._pieces = _Pieces(cancellation)
        self._changed = self._pieces.changed
        self._progress: Callable[[int], None] = options.get("progress", lambda count: None)
        self._next = 0  # the first byte that was not written
        self._sent = 0  # bytes; parts that overtook others are counted as if they had not
        self._counts: deque[tuple[int, int]] = deque()  # where the data of a `write` ends, and its count
        self._rest: Buffer | None = None  # bytes that do not fill a part yet
        self._rest_bytes = 0
        self._thread: threading.Thread | None = None
        self._over = False
        self._error: BaseException | None = None

    def write(self, offset: int, data: Bytes, memory: Buffer | None = None, *, counts: int = 0) -> None:
        """Waits until everything before ``offset`` is written; copies the data without ``memory``. Raises Cancelled."""
        if not len(data):
            self._progress(counts)
            return
        self._wait_until(lambda: self._next == offset)
        # No other thread is here: it waits for these bytes.
        done = 0
        while done < len(data):
            done += self._add(data[done:], memory)
        with self._changed:
            self._next += len(data)
            self._counts.append((self._next, counts))
            self._changed.notify_all()

    def _add(self, data: Bytes, memory: Buffer | None) -> int:
        missing = self._part_bytes - self._rest_bytes
        if memory is not None and len(data) >= missing:
            count = missing + (len(data) - missing) // self._part_bytes * self._part_bytes
            # The rest comes first: obstore takes the bytes in order.
            self._send_rest()
            self._send(data[:count], memory)
            return count
        count = min(missing, len(data))
        if self._rest is None:
            # `Storage.buffer_bytes` adds this buffer to the budget, so the wait cannot deadlock.
            self._rest = self._pool.acquire(self._part_bytes, self._cancellation)
        self._rest.array[self._rest_bytes : self._rest_bytes + count] = data[:count]
        self._rest_bytes += count
        if count == missing:
            self._send_rest()
        return count

    def _send_rest(self, *, start: bool = True) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self._send(rest.array[: self._rest_bytes], rest, start=start)
            rest.release()
        self._rest_bytes = 0

    def _send(self, piece: Bytes, memory: Buffer, *, start: bool = True) -> None:
        memory.lend()
        # When nobody refers to this array any more; obstore does until the part was sent.
        weakref.finalize(piece, self._was_sent, memory, len(piece)).atexit = False
        self._pieces.add(piece)
        if start and self._thread is None:
            thread = threading.Thread(target=self._upload, args=(self._part_bytes,), daemon=True)
            thread.name = "tensorkeep-upload"
            start_thread(thread)
            self._thread = thread

    def _was_sent(self, memory: Buffer, count: int) -> None:
        # Called by the garbage collector in any thread, also in obstore's.
        memory.give_back()
        with self._changed:
            self._sent += count

    def _report(self) -> None:
        # Not in the thread of obstore: the callback may raise.
        with self._changed:
            done = 0
            while self._counts and self._counts[0][0] <= self._sent:
                done += self._counts.popleft()[1]
        if done:
            self._progress(done)

    def preallocate(self, size: int) -> None: ...

    def finish(self, size: int) -> None:
        """Waits until the object is there, of ``size`` bytes. Raises StoreError; Cancelled."""
        try:
            self._check()
            if self._next != size:
                raise AssertionError(f"{self._next} bytes were written, not {size}")
            # Everything fits into a part: one request is enough, and it is made in this thread.
            alone = self._thread is None
            self._send_rest(start=False)
            self._pieces.end()
            if alone:
                self._upload(None)
            self._wait_until(lambda: self._over)
            self._check()
            # Finalizers of the last parts may run later than the answer of the store.
            self._sent = size
            self._report()
        finally:
            self.close()

    def close(self) -> None:
        """Drop an object that is not finished. Waits until nothing is on its way."""
        self._pieces.drop()
        if self._thread is not None:
            self._thread.join()
        if self._rest is not None:
            self._rest.release()
            self._rest = None

    def _upload(self, size_of_parts: int | None) -> None:
        try:
            store_requests.put_pieces(self.path, iter(self._pieces), part_bytes=size_of_parts, at_once=_PARTS_AT_ONCE)
        except BaseException as error:
            if isinstance(error, UnsupportedError) or not self._is_there():
                self._error = error
        finally:
            self._pieces.drop()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _is_there(self) -> bool:
        """Return whether the object is there although its upload failed: the answer to the last request was lost."""
        # Some stores refuse a second request to complete an upload. Objects appear complete or not at all. Only a name
        # with the id of this save is surely ours; any other may belong to an older object.
        if not self._pieces.exhausted or save_of(self.path.name) is None:
            return False
        try:
            return store_requests.head(self.path).size == self._pieces.nbytes
        except TensorkeepError:
            return False

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._report()
            with self._changed:
                self._check()
                if condition():
                    return
                # With a timeout: neither cancellation nor the end of a part notifies this condition.
                self._changed.wait(POLL_SECONDS)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        self._cancellation.check()


class ObjectCommit(PendingCommit):
    """The commit of one object, by its upload; of two saves, the last wins. Raises DestinationExistsError."""

    is_staged = False

    def __enter__(self) -> Self:
        try:
            store_requests.head(_url(self.destination))
        except NotFoundError:
            return self
        self._check_replaceable()
        return self

    def publish(self, manifest: bytes | None = None) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _Pieces:
    def __init__(self, cancellation: Cancellation) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0
        self.exhausted = False
        self._cancellation = cancellation
        self._waiting: deque[Bytes] = deque()
        self._ended = False
        self._dropped = False

    def add(self, piece: Bytes) -> None:
        # After a drop, nothing is queued: the reference would keep the buffer from its pool.
        with self.changed:
            if not self._dropped:
                self._waiting.append(piece)
                self.nbytes += len(piece)
                self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def drop(self) -> None:
        """Drop what still waits. The iteration then raises Cancelled."""
        with self.changed:
            self._dropped = True
            self._waiting.clear()
            self.changed.notify_all()

    def __iter__(self) -> Iterator[Bytes]:
        return self

    def __next__(self) -> Bytes:
        with self.changed:
            while True:
                if self._dropped:
                    raise Cancelled
                self._cancellation.check()
                if self._waiting:
                    break
                if self._ended:
                    self.exhausted = True
                    raise StopIteration
                self.changed.wait(POLL_SECONDS)
            # Not by way of a variable, which would keep it while this waits for the next one.
            return self._waiting.popleft()


class ObjectStorage(Storage):
    remote = True
    writes_in_order = True
    small_reads_at_once = store_requests.SMALL_REQUESTS
    # One web address may lead to several servers, and their tags of a file may differ for ever.
    read_attempts = 5

    def mode(self, path: Path, *, follow_links: bool = True) -> int:
        url = _url(path)
        if url.key:
            try:
                store_requests.head(url)
                return stat.S_IFREG
            except NotFoundError:
                pass
        try:
            return stat.S_IFDIR if self.names(url) else 0
        # Stores have no folders: a prefix exists while an object has it.
        except UnsupportedError:
            if not url.has_listing:
                raise
            return stat.S_IFDIR  # with an object that cannot be listed

    def names(self, directory: Path) -> list[str]:
        url = _url(directory)
        if url.has_listing:
            return sorted({name for name, _ in store_requests.children(url)})
        return [name for name in sorted(WELL_KNOWN) if self.first_bytes(url / name, 1) is not None]

    def folders(self, directory: Path) -> list[str]:
        url = _url(directory)
        children = store_requests.children(url) if url.has_listing else ()
        return sorted(name for name, status in children if status is None)

    def lists(self, directory: Path) -> bool:
        return _url(directory).has_listing

    def first_bytes(self, path: Path, count: int) -> bytes | None:
        url = _url(path)
        # A bucket itself is not an object.
        if not url.key:
            return None
        try:
            return first_bytes(url, count)
        except NotFoundError:
            return None
        except UnsupportedError:
            # A web server may answer with a page of its own where nothing is.
            if store_requests.begins_as(url, b"<"):
                return None
            raise

    def is_taken(self, path: Path) -> bool:
        # What lies below the prefix without a manifest are objects of saves that did not end.
        return any(self.first_bytes(each, 1) is not None for each in (path / MANIFEST_NAME, path) if _url(path).key)

    def open_file(self, path: Path) -> SourceFile:
        return StoreFile(_url(path))

    def open_directory(self, path: Path) -> Directory:
        return StoreDirectory(_url(path))

    def write_small(self, path: Path, content: bytes) -> None:
        # One request, which is atomic.
        store_requests.put(_url(path), content)

    def append_lines(self, path: Path, lines: bytes) -> None:
        url = _url(path)
        # A store cannot append: the object is written again, unless another process has changed it meanwhile.
        for attempt in range(_APPEND_ATTEMPTS):
            try:
                content, seen = store_requests.read(url)
            except NotFoundError:
                content, seen = b"", None
            # The answer to the request before may have been lost although the store has carried it out.
            if attempt and lines in content:
                return
            end = b"\n" if content and not content.endswith(b"\n") else b""
            if store_requests.put_unless_changed(url, content + end + lines, seen):
                return
            clock().sleep(_AGAIN_SECONDS)
        raise StoreError("changes faster than it can be written", path=path, remedy="try again")

    def create(
        self, path: Path, pool: BufferPool, cancellation: Cancellation, **options: Unpack[OutputOptions]
    ) -> OutputFile:
        return Upload(_url(path), pool, cancellation, **options)

    def buffer_bytes(self, most_bytes: int) -> int:
        return part_bytes(most_bytes)

    def check_writable(self, path: Path) -> None:
        url = _url(path)
        check_url(url)
        if not url.has_listing:
            raise UnsupportedError(
                f"{url.scheme}:// is only read from", path=path, remedy="save to s3://, gs://, az:// or a disk"
            )

    def commit(self, destination: Path, *, directory: bool, **options: Unpack[CommitOptions]) -> PendingCommit:
        # A single object needs no manifest: its upload is the commit.
        return StoreCommit(_url(destination), **options) if directory else ObjectCommit(destination, **options)


def _url(path: Path) -> StorePath:
    # `storage_of` chose this storage by the class of the path.
    assert isinstance(path, StorePath)
    return path
