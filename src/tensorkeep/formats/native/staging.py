"""Copies of a state's blocks, made before the caller continues and written later."""

import functools
import threading

from tensorkeep.formats.blockfile.plan import Block
from tensorkeep.formats.blockfile.write import stage, staging_bytes
from tensorkeep.storage import parallel
from tensorkeep.storage.buffers import Buffer, BufferPool
from tensorkeep.storage.parallel import POLL_SECONDS, Cancellation, Order


class Staging:
    """The copies of one save, in the order in which they are written.

    Buffers are acquired in the order of the tasks, so that a state larger than the pool's budget streams through it:
    the copying waits for buffers that the writing releases, and never for one that a later task holds. The writing
    shares the cancellation, so that the failure of one ends the other.
    """

    def __init__(self, groups: list[list[Block]], pool: BufferPool, cancellation: Cancellation) -> None:
        self._groups = groups
        self._pool = pool
        self._cancellation = cancellation
        self._order = Order(cancellation)
        self._ready: dict[int, Buffer] = {}
        self._closed = False
        self._changed = threading.Condition()

    def copy(self, threads: int) -> None:
        """Copy all blocks; when this returns, the state may change.

        Raises Cancelled if the writing has failed.
        """
        tasks = (functools.partial(self._copy, number) for number in range(len(self._groups)))
        parallel.run(tasks, threads, self._cancellation)
        self._cancellation.check()

    def _copy(self, number: int) -> None:
        blocks = self._groups[number]
        with self._order.turn(number):
            buffer = self._pool.acquire(staging_bytes(blocks), self._cancellation)
        try:
            stage(blocks, buffer.array)
        except BaseException:
            buffer.release()
            raise
        with self._changed:
            if self._closed:
                buffer.release()
            else:
                self._ready[number] = buffer
            self._changed.notify_all()

    def take(self, number: int) -> Buffer:
        """Wait for the copy of a task's blocks and return it; the caller releases it."""
        with self._changed:
            while number not in self._ready:
                self._cancellation.check()
                self._changed.wait(timeout=POLL_SECONDS)
            return self._ready.pop(number)

    def close(self) -> None:
        """Release the copies that were not taken."""
        with self._changed:
            self._closed = True
            for buffer in self._ready.values():
                buffer.release()
            self._ready.clear()
