"""The ranks that save or load one checkpoint together, and how they exchange values and errors."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
import xxhash

from tensorkeep.checkpoint.ranks.connection import Connection
from tensorkeep.checkpoint.ranks.turns import Turn
from tensorkeep.errors import RanksDisagreeError, TensorkeepError, UsageError
from tensorkeep.structs import prepared

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
