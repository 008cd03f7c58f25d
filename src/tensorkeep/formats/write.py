"""A write in two halves for formats that cannot be written block by block: copy the whole state, then write that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tensorkeep.errors import UsageError
from tensorkeep.formats.base import BLOCK_BYTES, Format, Write, WriteSettings, Written
from tensorkeep.io import parallel
from tensorkeep.io.buffers import BufferPool, Loan, buffer_bytes
from tensorkeep.io.files import Bytes
from tensorkeep.io.parallel import LOOK_AGAIN, Cancellation
from tensorkeep.state.cuda import beside_the_caller
from tensorkeep.state.dtypes import DType
from tensorkeep.state.source import Source
from tensorkeep.state.tree import Flat
from tensorkeep.units import format_bytes


class HostCopy:
    """A leaf's bytes in a buffer; see `tensorkeep.state.source.Source`."""

    def __init__(self, source: Source, loan: Loan) -> None:
        self.name: str = source.name
        self.dtype: DType = source.dtype
        self.shape: tuple[int, ...] = source.shape
        self.nbytes: int = source.nbytes
        self._source: Source | None = source
        self._loan = loan

    def host_bytes(self) -> Bytes | None:
        return self._loan.array[: self.nbytes]

    def read(self, start: int, stop: int, out: Bytes) -> None:
        out[:] = self._loan.array[start:stop]

    def copy(self, start: int, stop: int) -> None:
        """Copy a range of the leaf."""
        if self._source is not None:
            with beside_the_caller(self._source):
                self._source.read(start, stop, self._loan.array[start:stop])

    def forget(self) -> None:
        """Let go of the leaf, whose memory the caller may want back."""
        self._source = None

    def release(self) -> None:
        self._loan.release()


class WholeCopy(Write):
    """See `tensorkeep.formats.base.Write`."""

    def __init__(self, format: Format, flat: Flat[Source], destination: Path, settings: WriteSettings) -> None:
        self._format = format
        self._flat = flat
        self._destination = destination
        self._settings = settings
        self._pool: BufferPool | None = None
        self._copies: dict[str, HostCopy] = {}
        self._copied = threading.Event()
        self._cancellation = Cancellation()

    def staging_bytes(self) -> int:
        return sum(buffer_bytes(leaf.nbytes) for leaf in self._flat.leaves.values())

    def prepare(self, pool: BufferPool) -> None:
        needed = self.staging_bytes()
        if needed > pool.budget:
            raise UsageError(
                f"format {self._format.name!r} needs a copy of the whole state to save it in the background, which "
                f"takes {format_bytes(needed)}, and {format_bytes(pool.budget)} are allowed",
                path=self._destination,
                remedy="give a larger memory_budget, save in the native format, or call tensorkeep.save",
            )
        self._pool = pool

    def stage(self, threads: int) -> None:
        if self._pool is None:
            raise AssertionError("prepare comes before stage")
        for name, leaf in self._flat.leaves.items():
            self._copies[name] = HostCopy(leaf, self._pool.acquire(leaf.nbytes, self._cancellation))
        parallel.run(self._tasks(), threads, self._cancellation)
        self._cancellation.check()
        for copy in self._copies.values():
            copy.forget()
        self._flat = replace(self._flat, leaves=self._copies)
        self._copied.set()

    def _tasks(self) -> list[Callable[[], None]]:
        return [
            functools.partial(copy.copy, start, min(start + BLOCK_BYTES, copy.nbytes))
            for copy in self._copies.values()
            for start in range(0, copy.nbytes, BLOCK_BYTES)
        ]

    def run(self) -> Written:
        try:
            while self._pool is not None and not self._copied.wait(LOOK_AGAIN):
                self._cancellation.check()
            return self._format.write(self._flat, self._destination, self._settings)
        finally:
            self._cancellation.cancel()
            self.abandon()

    def cancel(self) -> None:
        self._cancellation.cancel()

    def abandon(self) -> None:
        for copy in self._copies.values():
            copy.release()
