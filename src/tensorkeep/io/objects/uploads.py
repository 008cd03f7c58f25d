"""Writing a new object of a store from many threads, in parts that are on their way while others are still computed.

obstore takes the bytes of an object in order, from one iterator, and sends several parts at once, from the memory in
which they are: nothing is copied. A buffer therefore returns to its pool when obstore has dropped its last reference
to it, and so what is on its way counts within the pool's budget.

A thread never waits for memory that only a later write could free. What does not fill a part is copied to a buffer of
the upload, and everything else is sent without waiting for more.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from tensorkeep.errors import NotFoundError, TensorkeepError, UnsupportedError
from tensorkeep.io.buffers import Buffer, BufferPool, round_up
from tensorkeep.io.files import Bytes
from tensorkeep.io.objects import stores
from tensorkeep.io.objects.store_commit import check_replaceable, save_of
from tensorkeep.io.parallel import POLL_SECONDS, Cancellation, Cancelled
from tensorkeep.io.threads import start_thread
from tensorkeep.paths import StorePath

_PART_BYTES = 8 * 1024**2
_MOST_PARTS = 10_000
"""The parts that S3 allows for an object."""

_PARTS_AT_ONCE = 8
"""Parts of one object that are on their way. A network of 1.2 MB/s sends them in time: see `stores.GIVE_UP_SECONDS`."""


def part_bytes(most_bytes: int) -> int:
    """Return the size of the parts of an object of at most so many bytes.

    Examples
    --------
    >>> part_bytes(4 * 1024**3) // 1024**2, part_bytes(200 * 1024**3) // 1024**2
    (8, 21)
    """
    return max(_PART_BYTES, round_up(-(-most_bytes // _MOST_PARTS), 1024**2))


class Upload:
    """A new object that many threads write at once, every byte once; see `tensorkeep.io.files.DirectFile`.

    It has at most ``most_bytes``. It appears in `finish`, complete; what was sent before is dropped if it is closed
    without. One that fits into a part is sent by one request. ``progress`` is called with the ``counts`` of `write`
    when its data was sent, from the threads that write.
    """

    direct = False
    """The page cache is not concerned."""

    def __init__(
        self,
        path: StorePath,
        pool: BufferPool,
        cancellation: Cancellation,
        *,
        most_bytes: int,
        progress: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.path = path
        self._part_bytes = part_bytes(most_bytes)
        self._pool = pool
        self._cancellation = cancellation
        self._pieces = _Pieces(cancellation)
        self._changed = self._pieces.changed
        self._progress = progress
        self._next = 0  # the first byte that was not written
        self._sent = 0  # bytes; parts that overtook others are counted as if they had not
        self._counts: deque[tuple[int, int]] = deque()  # where the data of a `write` ends, and its count
        self._rest: Buffer | None = None  # bytes that do not fill a part yet
        self._rest_bytes = 0
        self._thread: threading.Thread | None = None
        self._over = False
        self._error: BaseException | None = None

    def write(self, offset: int, data: Bytes, memory: Buffer | None = None, *, counts: int = 0) -> None:
        """Write all of ``data``; waits until everything before it was written.

        ``memory`` is the buffer in which it is. It is lent until the data was sent; without it, the data is copied.
        Raises the error of the upload; Cancelled.
        """
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
        """Send whole parts from where they are, or copy what does not fill one; return the bytes that were used."""
        missing = self._part_bytes - self._rest_bytes
        if memory is not None and len(data) >= missing:
            count = missing + (len(data) - missing) // self._part_bytes * self._part_bytes
            self._send_rest()
            self._send(data[:count], memory)
            return count
        count = min(missing, len(data))
        if self._rest is None:
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
        memory.give_back()
        with self._changed:
            self._sent += count

    def _report(self) -> None:
        """Report what was sent since the last call; not in the thread of obstore, as the function may raise."""
        with self._changed:
            done = 0
            while self._counts and self._counts[0][0] <= self._sent:
                done += self._counts.popleft()[1]
        if done:
            self._progress(done)

    def finish(self, size: int) -> None:
        """Send the rest and wait until the object is there; it has ``size`` bytes.

        Raises StoreError if the store refuses, or does not answer in time; Cancelled.
        """
        try:
            self._check()
            if self._next != size:
                raise AssertionError(f"{self._next} bytes were written, not {size}")
            alone = self._thread is None
            self._send_rest(start=False)
            self._pieces.end()
            if alone:
                self._upload(None)
            self._wait_until(lambda: self._over)
            self._check()
            self._sent = size
            self._report()
        finally:
            self.close()

    def close(self) -> None:
        """Drop an object that is not finished; a second call does nothing. Waits until nothing is on its way."""
        self._pieces.drop()
        if self._thread is not None:
            self._thread.join()
        if self._rest is not None:
            self._rest.release()
            self._rest = None

    def _upload(self, size_of_parts: int | None) -> None:
        try:
            stores.put_pieces(self.path, iter(self._pieces), part_bytes=size_of_parts, at_once=_PARTS_AT_ONCE)
        except BaseException as error:
            if isinstance(error, UnsupportedError) or not self._is_there():
                self._error = error
        finally:
            self._pieces.drop()
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _is_there(self) -> bool:
        """Return whether the object is there although its upload failed: the answer to the last request was lost.

        A second request to complete an upload is refused by some stores. Objects appear complete or not at all, and one
        whose name holds the id of this save can be of no other; any other name may be that of an older object.
        """
        if not self._pieces.exhausted or save_of(self.path.name) is None:
            return False
        try:
            return stores.head(self.path).size == self._pieces.nbytes
        except TensorkeepError:
            return False

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._report()
            with self._changed:
                self._check()
                if condition():
                    return
                self._changed.wait(POLL_SECONDS)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        self._cancellation.check()


class ObjectCommit:
    """A checkpoint of one object: a context manager like `tensorkeep.io.objects.store_commit.StoreCommit`.

    ``path`` is the object, which its upload makes visible, complete; so there is nothing to publish or to remove. Its
    name has no id: if another save creates it meanwhile, the one that ends last replaces the other.

    Raises DestinationExistsError if something is there and may not be replaced.
    """

    def __init__(self, destination: StorePath, *, overwrite: bool, replaceable: Callable[[Path], bool]) -> None:
        self.path = destination
        self._overwrite = overwrite
        self._replaceable = replaceable

    def __enter__(self) -> Self:
        try:
            stores.head(self.path)
        except NotFoundError:
            return self
        check_replaceable(self.path, self._replaceable, overwrite=self._overwrite)
        return self

    def publish(self) -> None:
        """Do nothing: the end of the upload was the commit."""

    def __exit__(self, *error: object) -> None:
        """Do nothing: an upload that was not finished has left nothing."""


class _Pieces:
    """The pieces of an object, in order: an iterator, which waits for those that are still to be added."""

    def __init__(self, cancellation: Cancellation) -> None:
        self.changed = threading.Condition()
        self.nbytes = 0
        self.exhausted = False
        self._cancellation = cancellation
        self._waiting: deque[Bytes] = deque()
        self._ended = False
        self._dropped = False

    def add(self, piece: Bytes) -> None:
        with self.changed:
            if not self._dropped:
                self._waiting.append(piece)
                self.nbytes += len(piece)
                self.changed.notify_all()

    def end(self) -> None:
        """End the iteration after the pieces that were added."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def drop(self) -> None:
        """Drop what still waits; the iteration then raises Cancelled."""
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
