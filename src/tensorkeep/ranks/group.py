"""The order in which the saves of a process group are written: one after another, the same on all ranks."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from tensorkeep.errors import RanksDisagreeError, TensorkeepError, UsageError
from tensorkeep.structs import prepared

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup


# The order in which the saves of a process group are written: one after another, the same on all ranks.


class Turn:
    """The place of a save among those of its group, whose exchanges would mix if two of them were written at once.

    ``queue`` is the list of the group. `take` is called on all ranks in the same order. The turn ends with `end`, or
    when the save is dropped without being written.
    """

    def __init__(self, queue: list[threading.Event]) -> None:
        self._queue = queue
        self._earlier: list[threading.Event] = []
        self._ended = threading.Event()

    def __del__(self) -> None:
        self._ended.set()

    def take(self) -> None:
        """Queue the save behind those that were begun before it."""
        self._earlier = [each for each in self._queue if not each.is_set()]
        self._queue[:] = [*self._earlier, self._ended]

    def wait(self) -> None:
        """Wait until all earlier saves are over, whether they succeed or fail."""
        for each in self._earlier:
            each.wait()

    def end(self) -> None:
        """Let the next save be written."""
        self._ended.set()


# A gloo connection between the ranks of a process group, closed by all of them when one is missing.

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


# The ranks that save or load one checkpoint together, and how they exchange values and errors.

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for the others, which may still be writing."""


class _State(msgspec.Struct, array_like=True):
    """What a rank is doing, and the class and the text of its error."""

    doing: str
    error: tuple[str, str] | None


class Channel:
    """Collective exchanges of plain values on a connection, with one timeout in seconds.

    Every rank calls the same methods in the same order. A rank that has failed calls `fail` in place of its next
    exchange, so that no other one waits for it.

    Raises RanksDisagreeError on all others, naming the ranks that have failed, have ended, or do not answer in time.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self.rank, self.size, self.lock = connection.rank, connection.size, connection.lock
        self._connection = connection
        self._timeout = timeout

    @property
    def lost(self) -> RanksDisagreeError | None:
        """The error with which the connection was closed last."""
        return self._connection.lost

    def connect(self, what: str) -> None:
        """Connect the ranks unless they are connected; none continues before all are."""
        self._connection.open(what, self._timeout)

    def exchange(self, value: Any, what: str, *, of: Any = Any, to_coordinator: bool = False) -> list[Any]:
        """Return the values of all ranks, by rank; ``what`` says what the ranks are doing, the same on all of them.

        Structs are decoded if ``of`` is their type. With ``to_coordinator`` the other ranks get an empty list.
        """
        self.connect(what)
        decoder = msgspec.msgpack.Decoder(prepared(of))
        found = self._gather(msgspec.msgpack.encode(value), what, to_coordinator=to_coordinator)
        return [decoder.decode(each) for each in found]

    def fail(self, error: BaseException, what: str) -> None:
        """Report an error to the other ranks in place of the next exchange, unless they know; the caller raises it."""
        connection = self._connection
        if error is connection.shared_error or error is connection.lost or connection.has_ended:
            return
        text = error.message if isinstance(error, TensorkeepError) else str(error)
        where = [part for part in (getattr(error, "path", None), getattr(error, "name", None)) if part]
        described = type(error).__name__, ": ".join([*map(str, where), text])
        with suppress(RanksDisagreeError):  # what the caller raises says more
            self.connect(what)
            self._gather(b"", what, described)
        connection.shared_error = error

    def _gather(
        self, value: bytes, doing: str, error: tuple[str, str] | None = None, *, to_coordinator: bool = False
    ) -> list[bytes]:
        """Return the values of all ranks; with ``to_coordinator`` the others get none.

        Raises RanksDisagreeError on all ranks alike if one of them has an error, or is doing something else.
        """
        connection, timeout = self._connection, self._timeout
        try:
            # Not by torch's collectives of objects, which send pickles.
            digest = xxhash.xxh3_64_intdigest(doing.encode()) >> 1  # of 63 bits
            heads = connection.gather_numbers([len(value), digest, error is not None], timeout)
            if len({digest for _, digest, _ in heads}) == 1 and not any(failed for *_, failed in heads):
                sizes = [size for size, *_ in heads]
                return connection.gather_bytes(value, sizes, timeout, to_coordinator=to_coordinator)
            own = msgspec.msgpack.encode(_State(doing, error))
            sizes = [size for (size,) in connection.gather_numbers([len(own)], timeout)]
            found = connection.gather_bytes(own, sizes, timeout)
        except RuntimeError as raised:
            raise connection.close(raised, doing, timeout) from raised
        except BaseException as raised:
            # The others may be at any point of this exchange, so that no other one can follow.
            connection.close(raised, doing, timeout)
            connection.shared_error = raised
            raise
        connection.shared_error = known = _refusal(
            msgspec.msgpack.decode(each, type=prepared(_State)) for each in found
        )
        raise known


def _refusal(states: Iterable[_State]) -> RanksDisagreeError:
    """Return the error of an exchange in which a rank has failed, or which is not the same one on all ranks."""
    by_rank = list(states)
    for rank, state in enumerate(by_rank):
        if state.error is not None:
            kind, text = state.error
            return RanksDisagreeError(
                f"rank {rank} has failed {state.doing}: {kind}: {text}", remedy="see the error of that rank"
            )
    first, other = by_rank[0], next(each for each in by_rank if each.doing != by_rank[0].doing)
    return RanksDisagreeError(
        f"rank 0 is {first.doing}, and rank {by_rank.index(other)} is {other.doing}",
        remedy="save and load in the same order on all ranks, all of them with into= or none",
    )


class Ranks:
    """The ranks of a process group, as they save and load with one timeout.

    ``caller`` is the channel of the threads that call `save` or `load`, ``writer`` that of the threads that write,
    which write one save after another: see `Turn`. ``remembered`` is for what all ranks agreed on in the save before.
    """

    def __init__(self, group: "_Group", timeout: float) -> None:
        self.caller, self.writer = Channel(group.caller, timeout), Channel(group.writer, timeout)
        self.rank, self.size = self.caller.rank, self.caller.size
        self.remembered = group.remembered
        self._turns = group.turns

    def turn(self) -> Turn:
        """Return the place of a new save, not taken yet, among those that are being written."""
        return Turn(self._turns)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that makes checkpoints visible."""
        return self.rank == 0


@contextmanager
def reported_to_others(ranks: Ranks | None, what: str) -> Iterator[None]:
    """Report what the block raises to the other ranks, which wait in an exchange of their callers."""
    with ranks.caller.lock if ranks is not None else nullcontext():
        try:
            yield
        except BaseException as error:
            if ranks is not None:
                ranks.caller.fail(error, what)
            raise


@contextmanager
def together(ranks: Ranks | None, what: str) -> Iterator[None]:
    """Wait at the end of the block until all ranks are there; if one of them has raised in it, all raise."""
    with ranks.caller.lock if ranks is not None else nullcontext():
        with reported_to_others(ranks, what):
            yield
        if ranks is not None:
            ranks.caller.exchange(None, what)


class _Group:
    """What all operations of a process group share, whatever their timeouts."""

    def __init__(self, group: "ProcessGroup") -> None:
        self.caller, self.writer = Connection(group, "caller"), Connection(group, "writer")
        self.remembered: dict[str, Any] = {}
        self.turns: list[threading.Event] = []


_known: "WeakKeyDictionary[ProcessGroup, _Group]" = WeakKeyDictionary()


def ranks_of(group: "ProcessGroup | None", timeout: float | None) -> Ranks | None:
    """Return the ranks of a process group, connected on its first use, by all of them; None without a group.

    Raises UsageError if it is not a process group, or this process is not in it, or the timeout is not positive.
    """
    if group is None:
        if timeout is not None:
            raise UsageError("a timeout is for many ranks", remedy="give group= as well, or leave timeout out")
        return None
    from torch import distributed as dist

    if not isinstance(group, dist.ProcessGroup) or not dist.is_initialized() or dist.get_rank(group) < 0:
        raise UsageError(
            f"group is {group!r}, which is not a process group that this process is in",
            remedy="call torch.distributed.init_process_group(), and give group=torch.distributed.group.WORLD",
        )
    seconds = DEFAULT_TIMEOUT if timeout is None else float(timeout)
    if not seconds > 0:
        raise UsageError(f"timeout is {timeout!r}", remedy="give a positive number of seconds")
    known = _known.get(group)
    if known is not None:
        return Ranks(known, seconds)
    _known[group] = known = _Group(group)
    ranks = Ranks(known, seconds)
    # Both now: a rank that is waited for while ranks connect is missed at the timeout only, and later at once.
    for channel in (ranks.caller, ranks.writer):
        channel.connect("connecting")
    return ranks
