"""The ranks that save or load one checkpoint together: exchanges of values and errors, and the order of saves."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from tensorkeep.errors import RanksDisagreeError, TensorkeepError, UsageError
from tensorkeep.storage.parallel import answer_within
from tensorkeep.structs import prepared

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")
# The ranks that save or load together; one process alone if it is None.
Group: TypeAlias = "ProcessGroup | None"

# Seconds that a rank waits for the other ranks, which may still be writing.
DEFAULT_TIMEOUT = 1800.0
# Seconds until ranks that wait in the same exchange notice that a connection was closed.
_GRACE = 1.0
# The store of the process group must answer within so many seconds.
_STORE_SECONDS = 5.0
_INTERRUPTED = "was interrupted"
# Values are padded to the longest one for a single all-gather, unless that adds more than this many bytes.
_PADDING_BYTES = 64 * 1024


class RankCoordinator:
    """One process alone: rank 0 of 1. `GroupCoordinator` has the ranks of a process group."""

    # Every rank calls the same methods in the same order, with the same text of ``what`` the ranks are doing.
    rank = 0
    size = 1
    # Rank 0 alone makes checkpoints visible and deletes steps.
    is_main = True
    # Whether the caller gave a process group, even one of a single rank: only then can a state be sharded.
    is_distributed = False
    # Held for all exchanges of one operation.
    lock: AbstractContextManager[object] = nullcontext()
    # The error that ended the last connection to the other ranks.
    lost: RanksDisagreeError | None = None
    # Reports an error of the block to the other ranks, which wait in their next exchange.
    reporting_errors: Callable[[str], AbstractContextManager[object]] = nullcontext
    # Waits for all ranks at the end of the block; if it raised on one rank, it raises on all.
    collective: Callable[[str], AbstractContextManager[object]] = nullcontext

    def gather(self, value: Any, what: str, *, of: Any = Any) -> list[Any]:
        """Return the values of all ranks, by rank; ``of`` is the type of a msgspec struct."""
        return [value]

    def broadcast(self, value: Any, what: str) -> Any:
        return self.gather(value if self.is_main else None, what)[0]


ONE_RANK = RankCoordinator()


# A save of a process group among the saves that are being written.


class SaveTicket:
    """The place of a save in the queue of its group: two saves at once would mix their exchanges."""

    def __init__(self, queue: list[threading.Event]) -> None:
        self._queue = queue
        self._earlier: list[threading.Event] = []
        self._released = threading.Event()

    # A save may be dropped before it begins, and must not block the later ones.
    def __del__(self) -> None:
        self._released.set()

    def enqueue(self) -> None:
        # All ranks enqueue in the same order, so all have the same queue.
        self._earlier = [each for each in self._queue if not each.is_set()]
        self._queue[:] = [*self._earlier, self._released]

    def wait(self) -> None:
        """Wait until all earlier saves are over, whether they succeed or fail."""
        for each in self._earlier:
            each.wait()

    def release(self) -> None:
        self._released.set()


# Exchanges over gloo. All ranks close a connection when one rank is missing.


class GlooConnection:
    """Gathers bytes and numbers of all ranks over gloo."""

    # When a rank does not answer in time, or is interrupted in an exchange, all ranks close the connection, and the
    # next exchange opens a new one. When a rank has ended, every later exchange fails at once.

    def __init__(self, group: "ProcessGroup", name: str) -> None:
        from torch import distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        # Held for all exchanges of one operation. Operations begin in the same order on all ranks.
        self.lock = threading.RLock()
        # The error of the last closing, and the last error that all ranks know.
        self.lost: RanksDisagreeError | None = None
        self.shared_error: BaseException | None = None
        self.has_ended = False
        # Not `new_group`: it numbers the groups of a process, and ranks with different numbers would never meet.
        self._name = name
        self._group_store = _get_process_group_store(group)
        self._store: Store = self._group_store  # of this connection
        self._gloo: Any = None  # a ProcessGroupGloo; its stubs lack the collectives
        self._connections = 0

    def open(self, what: str, timeout: float) -> None:
        """Connect all ranks; RanksDisagreeError if a rank does not connect, or has ended in an earlier call."""
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        if self._gloo is not None:
            return
        if self.has_ended and self.lost is not None:
            raise RanksDisagreeError(f"{self.lost.message}, in an earlier call", remedy=self.lost.remedy)
        try:
            self._store = _ask_store(self._next_store, _STORE_SECONDS)
            self._gloo = ProcessGroupGloo(self._store, self.rank, self.size, timedelta(seconds=timeout))
            # Gloo lets a rank continue while its peers still connect. If that rank ended now, the peers would try until
            # the timeout. After this gather, all ranks are connected and notice at once when one ends.
            self.gather_numbers([self.rank], timeout)
        except RuntimeError as error:
            raise self.close_after(error, what, timeout) from error
        except BaseException as error:
            self.close_after(error, what, timeout)
            raise

    def _next_store(self) -> "Store":
        from torch.distributed.distributed_c10d import PrefixStore

        # A slow rank skips the connections that the others have closed meanwhile.
        while True:
            self._connections += 1
            store = PrefixStore(f"tensorkeep/{self._name}/{self._connections}", self._group_store)
            if not store.check(["closed"]):
                return store

    def gather_numbers(self, own: Sequence[int], timeout: float) -> list[list[int]]:
        """Return the integers of all ranks, the same count from each; RuntimeError if a rank is missing."""
        import torch

        received = [torch.zeros(len(own), dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(received, torch.tensor(own, dtype=torch.int64), timeout)
        return [each.tolist() for each in received]

    def gather_bytes(self, value: bytes, sizes: Sequence[int], timeout: float, *, to_main: bool = False) -> list[bytes]:
        """Return the bytes of all ranks; with ``to_main`` only rank 0 gets them. RuntimeError if a rank is missing."""
        import torch
        from torch._C._distributed_c10d import BroadcastOptions

        # A bytearray, because torch warns of a tensor over memory that cannot be written.
        own = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        longest = max(sizes)
        received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        received[self.rank] = own
        if to_main:
            # The reports of all ranks are long, and only rank 0 needs them.
            limit = timedelta(seconds=timeout)
            if self.rank != 0:
                self._gloo.send([own], 0, 0).wait(limit)
                return []
            for work in [self._gloo.recv([received[rank]], rank, 0) for rank in range(1, self.size)]:
                work.wait(limit)
        elif longest * self.size > 2 * sum(sizes) + _PADDING_BYTES:
            # One broadcast from each rank: padded to the longest value, most bytes would be zeros.
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

    def close_after(self, error: BaseException, what: str, timeout: float) -> RanksDisagreeError:
        """Close the connection, so that no rank waits; return the error that names the missing ranks."""
        reason = None
        if not isinstance(error, RuntimeError):
            reason = _INTERRUPTED
        # Gloo raises RuntimeError for everything: only the text shows a timeout.
        elif "timed out" in str(error).lower() or "timeout" in str(error).lower():
            reason = f"did not answer within {timeout:g} s"
        try:
            absent, reason = _ask_store(lambda: self._ask_who_is_there(reason), _GRACE + _STORE_SECONDS)
            absent_text = _ranks_text(absent)
        except RuntimeError:
            absent_text = "another rank, perhaps the one that serves the store of the process group,"
        self._abort()
        # Without a timeout or an interrupt, gloo has failed because the process of a rank has ended.
        self.has_ended = reason is None
        remedy = "if it is only slow, give a longer timeout" if reason else "start the ranks again"
        self.lost = RanksDisagreeError(
            f"{absent_text} {reason or 'has ended'}, {what}", remedy=f"see the output of that rank; {remedy}"
        )
        return self.lost

    def _ask_who_is_there(self, reason: str | None) -> tuple[list[int], str | None]:
        """Report that this rank is there; return the missing ranks, and why the first rank closed the connection."""
        store = self._store
        # The keys of the store outlive the connection: ranks that wait in gloo find them when their wait fails.
        store.set("closed", "")
        if reason is not None:
            store.set("reason", reason)
        # An interrupted rank does not report itself, so the other ranks name it as missing.
        if reason is not _INTERRUPTED:
            store.set(f"rank {self.rank}", "there")
            store.add("there", 1)
        # This wakes the ranks that wait for this one in gloo. They report themselves within the grace.
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


def _ask_store(question: Callable[[], T], seconds: float) -> T:
    """Return an answer of the process group's store; RuntimeError if the process that serves it has hung or ended."""
    try:
        # In another thread: some calls of `TCPStore` wait without limit.
        return answer_within(seconds, question)
    except TimeoutError as error:
        raise RuntimeError("the store of the process group timed out") from error


def _ranks_text(ranks: Sequence[int]) -> str:
    if not ranks:
        return "another rank"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    # At least one of several is lost; others may only be busy.
    return f"rank {shown}" if len(ranks) == 1 else f"one or more of the ranks {shown}"


# Exchanges of plain values and errors over a connection.


class _State(msgspec.Struct, array_like=True):
    doing: str
    # The class and the text of its error.
    error: tuple[str, str] | None


class Channel:
    """Exchanges plain values on a connection, with one timeout in seconds."""

    # A rank that has failed calls `report` in place of its next exchange. The exchange then raises RanksDisagreeError
    # on all other ranks; so it does if ranks have ended, do not answer in time, or are doing something else.
    def __init__(self, connection: GlooConnection, timeout: float) -> None:
        self.connection = connection
        self._timeout = timeout

    def connect(self, what: str) -> None:
        """Connect the ranks unless they are connected; no rank continues before all are connected."""
        self.connection.open(what, self._timeout)

    def gather(self, value: Any, what: str, *, of: Any = Any, to_main: bool = False) -> list[Any]:
        """Return the values of all ranks, by rank; with ``to_main`` the other ranks get an empty list."""
        self.connect(what)
        decoder = msgspec.msgpack.Decoder(prepared(of))
        found = self._gather(msgspec.msgpack.encode(value), what, to_main=to_main)
        return [decoder.decode(each) for each in found]

    def report(self, error: BaseException, what: str) -> None:
        """Report an error to the other ranks, unless they know it; the caller raises it."""
        connection = self.connection
        if error is connection.shared_error or error is connection.lost or connection.has_ended:
            return
        text = error.message if isinstance(error, TensorkeepError) else str(error)
        where = [part for part in (getattr(error, "path", None), getattr(error, "name", None)) if part]
        described = type(error).__name__, ": ".join([*map(str, where), text])
        with suppress(RanksDisagreeError):  # the error that the caller raises says more
            self.connect(what)
            self._gather(b"", what, described)
        connection.shared_error = error

    def _gather(
        self, value: bytes, doing: str, error: tuple[str, str] | None = None, *, to_main: bool = False
    ) -> list[bytes]:
        connection, timeout = self.connection, self._timeout
        try:
            # Not by torch's collectives of objects, which send pickles. The first gather has a fixed size: the length
            # of the value, a digest of what this rank is doing, and whether it has failed. So ranks in different
            # operations notice it here, before they read values of the wrong kind.
            digest = xxhash.xxh3_64_intdigest(doing.encode()) >> 1  # 63 bits: gloo sends int64
            heads = connection.gather_numbers([len(value), digest, error is not None], timeout)
            if len({digest for _, digest, _ in heads}) == 1 and not any(failed for *_, failed in heads):
                sizes = [size for size, *_ in heads]
                return connection.gather_bytes(value, sizes, timeout, to_main=to_main)
            own = msgspec.msgpack.encode(_State(doing, error))
            sizes = [size for (size,) in connection.gather_numbers([len(own)], timeout)]
            found = connection.gather_bytes(own, sizes, timeout)
        except RuntimeError as raised:
            raise connection.close_after(raised, doing, timeout) from raised
        except BaseException as raised:
            # An interrupt: the other ranks may be anywhere in this exchange, so no other exchange can follow on this
            # connection.
            connection.close_after(raised, doing, timeout)
            connection.shared_error = raised
            raise
        connection.shared_error = known = _disagreement(
            msgspec.msgpack.decode(each, type=prepared(_State)) for each in found
        )
        raise known


def _disagreement(states: Iterable[_State]) -> RanksDisagreeError:
    """Return the error of an exchange if a rank has failed, or the ranks are doing different things."""
    by_rank = list(states)
    for rank, state in enumerate(by_rank):
        if state.error is not None:
            kind, text = state.error
            message = f"rank {rank} has failed {state.doing}: {kind}: {text}"
            return RanksDisagreeError(message, remedy="see the error of that rank")
    first, other = by_rank[0], next(each for each in by_rank if each.doing != by_rank[0].doing)
    message = f"rank 0 is {first.doing}, and rank {by_rank.index(other)} is {other.doing}"
    remedy = "save and load in the same order on all ranks, with into= on all ranks or on none"
    return RanksDisagreeError(message, remedy=remedy)


# What all operations of a process group share, with any timeout.
class _GroupState:
    def __init__(self, group: "ProcessGroup") -> None:
        # Two connections: the threads that call `save` and the threads that write run at the same time.
        self.caller, self.writer = GlooConnection(group, "caller"), GlooConnection(group, "writer")
        # What all ranks agreed on in the last save, so that an equal state is not merged again.
        self.remembered: dict[str, Any] = {}
        self.tickets: list[threading.Event] = []


class GroupCoordinator(Channel, RankCoordinator):
    """The ranks of a process group, for the threads that call `save`; those that write use ``writer``."""

    is_distributed = True

    def __init__(self, state: _GroupState, timeout: float) -> None:
        super().__init__(state.caller, timeout)
        self.writer = Channel(state.writer, timeout)
        self.rank, self.size, self.lock = state.caller.rank, state.caller.size, state.caller.lock
        self.is_main = self.rank == 0
        self.remembered = state.remembered
        self._tickets = state.tickets

    @property
    def lost(self) -> RanksDisagreeError | None:  # type: ignore[override]  # read only
        return self.connection.lost

    def ticket(self) -> SaveTicket:
        return SaveTicket(self._tickets)

    @contextmanager
    def reporting_errors(self, what: str) -> Iterator[None]:
        with self.lock:
            try:
                yield
            except BaseException as error:
                self.report(error, what)
                raise

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        with self.lock:
            with self.reporting_errors(what):
                yield
            self.gather(None, what)


_groups: "WeakKeyDictionary[ProcessGroup, _GroupState]" = WeakKeyDictionary()


def ranks_of(group: Group, timeout: float | None) -> RankCoordinator:
    """Return the ranks of a group, connected; `ONE_RANK` without a group. Raises UsageError for wrong arguments."""
    if group is None:
        if timeout is not None:
            raise UsageError("a timeout is for many ranks", remedy="give group= as well, or leave timeout out")
        return ONE_RANK
    from torch import distributed as dist

    if not isinstance(group, dist.ProcessGroup) or not dist.is_initialized() or dist.get_rank(group) < 0:
        remedy = "call torch.distributed.init_process_group(), and give group=torch.distributed.group.WORLD"
        raise UsageError(f"group is {group!r}, which is not a process group that this process is in", remedy=remedy)
    seconds = DEFAULT_TIMEOUT if timeout is None else float(timeout)
    if not seconds > 0:
        raise UsageError(f"timeout is {timeout!r}", remedy="give a positive number of seconds")
    # All operations of a group share its two connections.
    state = _groups.get(group)
    if state is not None:
        return GroupCoordinator(state, seconds)
    _groups[group] = state = _GroupState(group)
    ranks = GroupCoordinator(state, seconds)
    # At once, so that a rank that ends later is missed immediately and not at the timeout.
    for channel in (ranks, ranks.writer):
        channel.connect("connecting")
    return ranks
