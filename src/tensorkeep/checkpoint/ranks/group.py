"""The ranks that save or load one checkpoint together, and how they exchange values and errors."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from tensorkeep.checkpoint.ranks.turns import Turn
from tensorkeep.errors import RanksDisagreeError, TensorkeepError, UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

T = TypeVar("T")

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for the others, which may still be writing."""

_GRACE = 1.0
"""Seconds in which ranks that wait in the same exchange find that a connection was closed."""

_STORE_SECONDS = 5.0
"""Seconds in which the store of the process group must answer."""

_INTERRUPTED = "was interrupted"


_PADDING_BYTES = 64 * 1024
"""Values of other lengths are sent as if all had the longest, unless that adds more than so many bytes."""


class _State(msgspec.Struct, array_like=True):
    """What a rank is doing, and the class and the text of its error."""

    doing: str
    error: tuple[str, str] | None


class Channel:
    """Collective exchanges of plain values, one at a time, on a gloo connection of its own.

    Every rank calls the same methods in the same order. A rank that has failed calls `fail` in place of its next
    exchange, so that no other one waits for it. When a rank does not answer in time or is interrupted in an exchange,
    all close the connection, and the next exchange makes a new one; when one has ended, every later exchange fails at
    once. ``lost`` is the error of the connection that was closed last. Threads that share a channel hold ``lock`` for
    all exchanges of one operation, and begin their operations in the same order on all ranks.

    Raises RanksDisagreeError on all others, naming the ranks that have failed, have ended, or do not answer in time.
    """

    def __init__(self, group: "ProcessGroup", name: str, timeout: float) -> None:
        from torch import distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.lost: RanksDisagreeError | None = None
        self.lock = threading.RLock()
        self._name = name
        self._timeout = timeout
        self._group_store = _get_process_group_store(group)
        self._store: Store = self._group_store  # of the connection
        self._gloo: Any = None  # a ProcessGroupGloo, whose stubs lack its collectives
        self._connections = 0
        self._has_ended = False
        self._shared_error: BaseException | None = None  # the last one that all ranks know of

    def exchange(self, value: Any, what: str, *, of: Any = Any, to_coordinator: bool = False) -> list[Any]:
        """Return the values of all ranks, by rank; ``what`` says what the ranks are doing, the same on all of them.

        Structs are decoded if ``of`` is their type. With ``to_coordinator`` the other ranks get an empty list.
        """
        if self._gloo is None:
            self.connect(what)
        decoder = msgspec.msgpack.Decoder(of)
        found = self._gather(msgspec.msgpack.encode(value), what, to_coordinator=to_coordinator)
        return [decoder.decode(each) for each in found]

    def fail(self, error: BaseException, what: str) -> None:
        """Report an error to the other ranks in place of the next exchange, unless they know; the caller raises it."""
        if error is self._shared_error or error is self.lost or self._has_ended:
            return
        text = error.message if isinstance(error, TensorkeepError) else str(error)
        where = [part for part in (getattr(error, "path", None), getattr(error, "name", None)) if part]
        described = type(error).__name__, ": ".join([*map(str, where), text])
        with suppress(RanksDisagreeError):  # what the caller raises says more
            if self._gloo is None:
                self.connect(what)
            self._gather(b"", what, described)
        self._shared_error = error

    def connect(self, what: str) -> None:
        """Connect the ranks; all of them do so."""
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        if self._has_ended and self.lost is not None:
            raise RanksDisagreeError(f"{self.lost.message}, in an earlier call", remedy=self.lost.remedy)
        try:
            self._store = _asked(self._next_store, _STORE_SECONDS)
            self._gloo = ProcessGroupGloo(self._store, self.rank, self.size, timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise self._close(error, what) from error

    def _next_store(self) -> "Store":
        """Return the store of the next connection that no rank has closed, having waited for this one in vain."""
        from torch.distributed.distributed_c10d import PrefixStore

        while True:
            self._connections += 1
            store = PrefixStore(f"tensorkeep/{self._name}/{self._connections}", self._group_store)
            if not store.check(["closed"]):
                return store

    def _gather(
        self, value: bytes, doing: str, error: tuple[str, str] | None = None, *, to_coordinator: bool = False
    ) -> list[bytes]:
        """Return the values of all ranks; with ``to_coordinator`` the others get none.

        Raises RanksDisagreeError on all ranks alike if one of them has an error, or is doing something else.
        """
        try:
            # Not by torch's collectives of objects, which send pickles.
            digest = xxhash.xxh3_64_intdigest(doing.encode()) >> 1  # of 63 bits
            heads = self._gather_numbers([len(value), digest, error is not None])
            if len({digest for _, digest, _ in heads}) == 1 and not any(failed for *_, failed in heads):
                return self._gather_bytes(value, [size for size, *_ in heads], to_coordinator=to_coordinator)
            own = msgspec.msgpack.encode(_State(doing, error))
            found = self._gather_bytes(own, [size for (size,) in self._gather_numbers([len(own)])])
        except RuntimeError as raised:
            raise self._close(raised, doing) from raised
        except BaseException as raised:
            # The others may be at any point of this exchange, so that no other one can follow.
            self._close(raised, doing)
            self._shared_error = raised
            raise
        self._shared_error = known = _refusal(msgspec.msgpack.decode(each, type=_State) for each in found)
        raise known

    def _gather_numbers(self, own: Sequence[int]) -> list[list[int]]:
        import torch

        received = [torch.zeros(len(own), dtype=torch.int64) for _ in range(self.size)]
        self._gloo.allgather([received], [torch.tensor(own, dtype=torch.int64)]).wait()
        return [each.tolist() for each in received]

    def _gather_bytes(self, value: bytes, sizes: Sequence[int], *, to_coordinator: bool = False) -> list[bytes]:
        import torch

        own = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        longest = max(sizes)
        received = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        received[self.rank] = own
        if to_coordinator:
            if self.rank != 0:
                self._gloo.send([own], 0, 0).wait()
                return []
            for work in [self._gloo.recv([received[rank]], rank, 0) for rank in range(1, self.size)]:
                work.wait()
        elif longest * self.size > 2 * sum(sizes) + _PADDING_BYTES:
            for rank, each in enumerate(received):
                self._gloo.broadcast(each, rank).wait()
        else:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: own.numel()] = own
            received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            self._gloo.allgather([received], [padded]).wait()
        return [each.numpy()[:size].tobytes() for each, size in zip(received, sizes, strict=True)]

    def _close(self, error: BaseException, what: str) -> RanksDisagreeError:
        """Close the connection, so that no rank waits; return the error that names the ranks that are missing."""
        reason = None
        if not isinstance(error, RuntimeError):
            reason = _INTERRUPTED
        elif "timed out" in str(error).lower() or "timeout" in str(error).lower():
            reason = f"did not answer within {self._timeout:g} s"
        try:
            absent, reason = _asked(lambda: self._ask_who_is_there(reason), _GRACE + _STORE_SECONDS)
            absent_text = _ranks_text(absent)
        except RuntimeError:
            absent_text = "another rank, perhaps the one that serves the store of the process group,"
        self._abort()
        self._has_ended = reason is None
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


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return the subject of a sentence about ranks of which at least one is lost; others may only be busy."""
    if not ranks:
        return "another rank"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"one or more of the ranks {shown}"


class Ranks:
    """The ranks of a process group, as they save and load.

    ``caller`` is the channel of the threads that call `save` or `load`, ``writer`` that of the threads that write,
    which write one save after another: see `Turn`. ``remembered`` is for what all ranks agreed on in the save before.
    """

    def __init__(self, group: "ProcessGroup", timeout: float) -> None:
        self.caller = Channel(group, f"caller {timeout}", timeout)
        self.writer = Channel(group, f"writer {timeout}", timeout)
        self.rank, self.size = self.caller.rank, self.caller.size
        self.remembered: dict[str, Any] = {}
        self._turns: list[threading.Event] = []

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


_known: "WeakKeyDictionary[ProcessGroup, dict[float, Ranks]]" = WeakKeyDictionary()


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
    of_group = _known.setdefault(group, {})
    if seconds not in of_group:
        of_group[seconds] = known = Ranks(group, seconds)
        # Both now: a rank that is waited for while ranks connect is missed at the timeout only, and later at once.
        for channel in (known.caller, known.writer):
            channel.connect("connecting")
    return of_group[seconds]
