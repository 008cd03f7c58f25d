"""The ranks that save or load one checkpoint together, and how they exchange values and errors."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from tensorkeep.errors import RanksDisagreeError, TensorkeepError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULT_TIMEOUT = 1800.0
"""Seconds that a rank waits for the others, which may still be writing."""

_GRACE = 1.0
"""Seconds in which ranks that are alive arrive at the exchange in which another one was found to be missing."""


class _Message(msgspec.Struct, array_like=True):
    """What a rank sends: a value, or the class and the text of its error."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # encoded, so that it is decoded once its type is known
    error: tuple[str, str] | None = None


class Channel:
    """Collective exchanges of plain values, one at a time, on a gloo group of its own.

    Every rank calls the same methods in the same order. A rank that has failed calls `fail` in place of its next
    exchange, so that no other one waits for it.

    Raises RanksDisagreeError on all others, naming the ranks that have failed, have ended, or do not answer in time.
    """

    def __init__(self, group: "ProcessGroup", timeout: float) -> None:
        from torch import distributed as dist
        from torch.distributed.distributed_c10d import _get_process_group_store

        members = dist.get_process_group_ranks(group)
        with _lost_ranks("while the ranks were connecting"):
            self._group = dist.new_group(
                members, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True
            )
        # Says which ranks have arrived at an exchange: gloo does not name those that it waits for.
        self._store = _get_process_group_store(self._group)
        self.rank = dist.get_rank(self._group)
        self.size = len(members)
        self._timeout = timeout
        self._exchanges = 0
        self._shared_error: BaseException | None = None  # the last one that all ranks know of

    def exchange(self, value: Any, what: str, *, of: Any = Any) -> list[Any]:
        """Return the values of all ranks, by rank; ``what`` says what the ranks are doing, for errors.

        Structs are decoded if ``of`` is their type.
        """
        found = self._gather(_Message(msgspec.Raw(msgspec.msgpack.encode(value))), what)
        for rank, message in enumerate(found):
            if message.error is not None:
                kind, text = message.error
                self._shared_error = known = RanksDisagreeError(
                    f"rank {rank} has failed {what}: {kind}: {text}", remedy="see the error of that rank"
                )
                raise known
        decoder = msgspec.msgpack.Decoder(of)
        return [decoder.decode(message.value) for message in found]

    def fail(self, error: BaseException, what: str) -> None:
        """Report an error to the other ranks in place of the next exchange, unless they know; the caller raises it."""
        if error is self._shared_error:
            return
        text = error.message if isinstance(error, TensorkeepError) else str(error)
        where = [part for part in (getattr(error, "path", None), getattr(error, "name", None)) if part]
        message = _Message(error=(type(error).__name__, ": ".join([*map(str, where), text])))
        with suppress(RanksDisagreeError):  # what the caller raises says more
            self._gather(message, what)
        self._shared_error = error

    def _gather(self, message: _Message, what: str) -> list[_Message]:
        import torch
        from torch import distributed as dist

        self._exchanges += 1
        # Not by torch's collectives of objects, which send pickles.
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(message)), dtype=torch.uint8)
        try:
            self._store.set(f"rank {self.rank}", str(self._exchanges))
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(sizes, torch.tensor([own.numel()]), group=self._group)
            longest = max(int(size) for size in sizes)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: own.numel()] = own
            received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(received, padded, group=self._group)
        except RuntimeError as error:
            self._shared_error = lost = self._lost(error, what)
            raise lost from error
        decoder = msgspec.msgpack.Decoder(_Message)
        return [decoder.decode(each.numpy()[: int(size)]) for each, size in zip(received, sizes, strict=True)]

    def _lost(self, error: RuntimeError, what: str) -> RanksDisagreeError:
        """Return the error of an exchange that some ranks did not take part in."""
        end = time.monotonic() + _GRACE
        while (absent := self._absent()) and time.monotonic() < end:
            time.sleep(0.05)
        names = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}" if absent else "another rank"
        if "Timed out" in str(error):
            problem, remedy = f"did not answer within {self._timeout:g} s", "if it is only slow, give a longer timeout"
        else:
            problem, remedy = "has ended", "start the ranks again"
        return RanksDisagreeError(f"{names} {problem}, {what}", remedy=f"see the output of that rank; {remedy}")

    def _absent(self) -> list[int]:
        """Return the ranks that have not arrived at this exchange; none if that cannot be known."""
        try:
            return [rank for rank in range(self.size) if self._arrived(rank) < self._exchanges]
        except RuntimeError:  # the process that serves the store has ended
            return []

    def _arrived(self, rank: int) -> int:
        key = f"rank {rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


class Ranks:
    """The ranks of a process group, as they save and load.

    ``caller`` is the channel of the threads that call `save` or `load`, ``writer`` that of the threads that write,
    which may be busy with an earlier save. ``remembered`` is for what all ranks agreed on in the save before.
    """

    def __init__(self, group: "ProcessGroup", timeout: float) -> None:
        self.caller = Channel(group, timeout)
        self.writer = Channel(group, timeout)
        self.rank, self.size = self.caller.rank, self.caller.size
        self.remembered: dict[str, Any] = {}

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the rank that makes checkpoints visible."""
        return self.rank == 0


@contextmanager
def reported_to_others(ranks: Ranks | None, what: str) -> Iterator[None]:
    """Report what the block raises to the other ranks, which wait in an exchange of their callers."""
    try:
        yield
    except BaseException as error:
        if ranks is not None:
            ranks.caller.fail(error, what)
        raise


@contextmanager
def together(ranks: Ranks | None, what: str) -> Iterator[None]:
    """Wait at the end of the block until all ranks are there; if one of them has raised in it, all raise."""
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
        of_group[seconds] = Ranks(group, seconds)
    return of_group[seconds]


def forget(ranks: Ranks) -> None:
    """Drop the connections of ranks one of which was lost: the next call connects those that there are then."""
    for of_group in _known.values():
        for seconds, known in list(of_group.items()):
            if known is ranks:
                del of_group[seconds]


@contextmanager
def _lost_ranks(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RanksDisagreeError(
            f"another rank has ended or does not answer, {what}: {str(error).splitlines()[0]}",
            remedy="see the output of the other ranks; all of them must call save and load",
        ) from error
