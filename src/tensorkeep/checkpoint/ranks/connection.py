"""A gloo connection between the ranks of a process group, closed by all of them when one is missing."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tensorkeep.errors import RanksDisagreeError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_GRACE = 1.0
"""Seconds in which ranks that wait in the same exchange find that a connection was closed."""

_STORE_SECONDS = 5.0
"""Seconds in which the store of the process group must answer."""

_INTERRUPTED = "was interrupted"

_PADDING_BYTES = 64 * 1024
"""Values of other lengths are sent as if all had the longest, unless that adds more than so many bytes."""


class Connection:
    """Collective exchanges of bytes and numbers over gloo; every rank calls the same methods in the same order.

    Operations share it, each with a timeout of its own, in seconds. When a rank does not answer in time or is
    interrupted in an exchange, all close the connection, and the next exchange makes a new one; when one has ended,
    every later exchange fails at once. ``lost`` is the error with which it was closed last, ``shared_error`` the last
    one that all ranks know of. Who uses the connection holds ``lock`` for all exchanges of one operation, and begins
    operations in the same order on all ranks.
    """

    def __init__(self, group: "ProcessGroup", name: str) -> None:
        from torch import distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.lock = threading.RLock()
        self.lost: RanksDisagreeError | None = None
        self.shared_error: BaseException | None = None
        self.has_ended = False
        self._name = name
        self._group_store = _get_process_group_store(group)
        self._store: Store = self._group_store  # of the connection
        self._gloo: Any = None  # a ProcessGroupGloo, whose stubs lack its collectives
        self._connections = 0

    def open(self, what: str, timeout: float) -> None:
        """Connect the ranks unless they are connected, and wait for all. ``what`` says what the ranks are doing.

        Raises RanksDisagreeError if a rank does not, or has ended in an earlier call.
        """
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        if self._gloo is not None:
            return
        if self.has_ended and self.lost is not None:
            raise RanksDisagreeError(f"{self.lost.message}, in an earlier call", remedy=self.lost.remedy)
        try:
            self._store = _asked(self._next_store, _STORE_SECONDS)
            self._gloo = ProcessGroupGloo(self._store, self.rank, self.size, timedelta(seconds=timeout))
            # Gloo would let a rank continue whose peers still connect; if it ended then, they would try until the
            # timeout. All that return from here notice it at once.
            self.gather_numbers([self.rank], timeout)
        except RuntimeError as error:
            raise self.close(error, what, timeout) from error
        except BaseException as error:
            self.close(error, what, timeout)
            raise

    def _next_store(self) -> "Store":
        """Return the store of the next connection that no rank has closed, having waited for this one in vain."""
        from torch.distributed.distributed_c10d import PrefixStore

        while True:
            self._connections += 1
            store = PrefixStore(f"tensorkeep/{self._name}/{self._connections}", self._group_store)
            if not store.check(["closed"]):
                return store

    def gather_numbers(self, own: Sequence[int], timeout: float) -> list[list[int]]:
        """Return the integers of all ranks, by rank; as many of each. RuntimeError if a rank is missing."""
        import torch

        received = [torch.zeros(len(own), dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(received, torch.tensor(own, dtype=torch.int64), timeout)
        return [each.tolist() for each in received]

    def gather_bytes(
        self, value: bytes, sizes: Sequence[int], timeout: float, *, to_coordinator: bool = False
    ) -> list[bytes]:
        """Return the bytes of all ranks, whose numbers are ``sizes``; with ``to_coordinator`` the others get none.

        RuntimeError if a rank is missing.
        """
        import torch
        from torch._C._distributed_c10d import BroadcastOptions

        own = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        longest = max(sizes)
        received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        received[self.rank] = own
        if to_coordinator:
            limit = timedelta(seconds=timeout)
            if self.rank != 0:
                self._gloo.send([own], 0, 0).wait(limit)
                return []
            for work in [self._gloo.recv([received[rank]], rank, 0) for rank in range(1, self.size)]:
                work.wait(limit)
        elif longest * self.size > 2 * sum(sizes) + _PADDING_BYTES:
            options = BroadcastOptions()
            options.timeout = timedelta(seconds=timeout)
            for rank, each in enumerate(received):
                options.rootRank = rank
                self._gloo.broadcast([each], options).wait()
        else:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: own.numel()] = own
            received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            self._all_gather(received, padded, timeout)
        return [each.numpy()[:size].tobytes() for each, size in zip(received, sizes, strict=True)]

    def _all_gather(self, received: list[Any], own: Any, timeout: float) -> None:
        from torch._C._distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        options.timeout = timedelta(seconds=timeout)
        self._gloo.allgather([received], [own], options).wait()

    def close(self, error: BaseException, what: str, timeout: float) -> RanksDisagreeError:
        """Close the connection, so that no rank waits; return the error that names the ranks that are missing."""
        reason = None
        if not isinstance(error, RuntimeError):
            reason = _INTERRUPTED
        elif "timed out" in str(error).lower() or "timeout" in str(error).lower():
            reason = f"did not answer within {timeout:g} s"
        try:
            absent, reason = _asked(lambda: self._ask_who_is_there(reason), _GRACE + _STORE_SECONDS)
            absent_text = _ranks_text(absent)
        except RuntimeError:
            absent_text = "another rank, perhaps the one that serves the store of the process group,"
        self._abort()
        self.has_ended = reason is None
        remedy = "if it is only slow, give a longer timeout" if reason else "start the ranks again"
        self.lost = RanksDisagreeError(
            f"{absent_text} {reason or 'has ended'}, {what}", remedy=f"see the output of that rank; {remedy}"
        )
        return self.lost

    def _ask_who_is_there(self, reason: str | None) -> tuple[list[int], str | None]:
        """Report that this rank is there; return the ranks that do not, and why the first one closed the connection."""
        store = self._store
        store.set("closed", "")
        if reason is not None:
            store.set("reason", reason)
        if reason is not _INTERRUPTED:
            store.set(f"rank {self.rank}", "there")
            store.add("there", 1)
        self._abort()
        end = time.monotonic() + _GRACE
        while store.add("there", 0) < self.size and time.monotonic() < end:
            time.sleep(0.05)
        absent = [rank for rank in range(self.size) if not store.check([f"rank {rank}"])]
        return absent, store.get("reason").decode() if store.check(["reason"]) else None

    def _abort(self) -> None:
        gloo, self._gloo = self._gloo, None
        if gloo is not None:
            gloo.abort()


def _asked(ask: Callable[[], T], seconds: float) -> T:
    """Return what the store of the process group answers; RuntimeError if the process that serves it has hung or ended.

    Some calls of `TCPStore` wait without limit.
    """
    found: list[tuple[T | None, RuntimeError | None]] = []

    def run() -> None:
        try:
            found.append((ask(), None))
        except RuntimeError as error:
            found.append((None, error))

    asking = threading.Thread(target=run, daemon=True)
    asking.start()
    asking.join(seconds)
    answer, error = found[0] if found else (None, RuntimeError("the store of the process group timed out"))
    if error is not None:
        raise error
    return cast(T, answer)


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return the subject of a sentence about ranks of which at least one is lost; others may only be busy."""
    if not ranks:
        return "another rank"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"one or more of the ranks {shown}"
