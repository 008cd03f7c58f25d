"""Ranks of a process group for tests: long-lived gloo processes, which call functions of the tests together.

The processes are forks of the server of `forked`; they are started when a test first needs so many, and again after
one was killed or did not answer. Each call makes a new process group, so that no call meets what another left.
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from forked import Server


class Outcome(NamedTuple):
    """What became of the call on one rank: a value, an error, the end of its process, or nothing in time."""

    value: Any = None
    error: str | None = None  # name of its class
    message: str = ""  # its text; without an error, why there is no value
    trace: str = ""  # its traceback
    exit_code: int | None = None  # of a process that ended; minus the signal that killed it
    hung: bool = False  # still running after the timeout; it was killed then

    @property
    def returned(self) -> bool:
        return self.error is None and self.exit_code is None and not self.hung


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """Call a function on ranks, and return their values by rank; it must return on all of them. See `outcomes`."""
    found = outcomes(count, function, *arguments, **options)
    failed = [f"rank {rank}: {each.trace or each.message}" for rank, each in enumerate(found) if not each.returned]
    assert not failed, "\n".join(failed)
    return [each.value for each in found]


def outcomes(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 200,
    group_seconds: float = 100,
    **options: Any,
) -> list[Outcome]:
    """Call a function on ranks, each a process with one thread of torch, and return what became of each call.

    The function is one of a module; `torch.distributed` is initialised when it begins, with gloo and a timeout of
    ``group_seconds``. Arguments, keyword arguments (``options``) and values are pickled: tensors should be numpy arrays
    or lists. After ``seconds`` the processes that have not answered are killed.
    """
    while len(_ranks) < count:
        _ranks.append(_Rank())
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        call = (count, f"{folder}/store", group_seconds, partial(function, *arguments, **options))
        try:
            for rank in range(count):
                _ranks[rank].pipe.send((rank, *call))
            deadline = time.monotonic() + seconds
            found = [_ranks[rank].outcome(deadline) for rank in range(count)]
            for rank, outcome in enumerate(found):
                if outcome.hung or outcome.exit_code is not None:
                    _ranks[rank].close()
                    _ranks[rank] = _Rank()
        except BaseException:
            close_ranks()
            raise
    return found


def close_ranks() -> None:
    """End all processes; the next call starts new ones, in which nothing has run."""
    while _ranks:
        _ranks.pop().close()


class _Rank(Server):
    def __init__(self) -> None:
        super().__init__(_serve)

    def outcome(self, deadline: float) -> Outcome:
        with suppress(EOFError, ConnectionResetError):
            if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
                return Outcome(hung=True, message=f"did not answer in time\n{self.tail()}")
            return Outcome(*self.pipe.recv())
        self.process.join()
        code = self.process.exitcode
        return Outcome(exit_code=code, message=f"its process ended with {code}\n{self.tail()}")


_ranks: list[_Rank] = []


def serve(calls: Connection, work: Callable[..., Any]) -> None:
    """Do the calls of a test process until it ends."""
    import torch

    # pytest imports test files by their path below the root, which names the functions and classes that it sends.
    sys.path.append(str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            calls.send(work(*calls.recv()))


def answer(rank: int, count: int, store: str, group_seconds: float, work: Callable[[], Any]) -> tuple[Any, ...]:
    """Call a function as a rank of a new process group; return what became of the call, for an `Outcome`."""
    from torch import distributed as dist

    try:
        shared, timeout = dist.FileStore(store, count), timedelta(seconds=group_seconds)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=count, timeout=timeout)
        return (work(),)
    except BaseException as error:
        return None, type(error).__name__, str(error), traceback.format_exc()


def _serve(calls: Connection) -> None:
    serve(calls, _answer)


def _answer(rank: int, count: int, store: str, group_seconds: float, function: Callable[[], Any]) -> tuple[Any, ...]:
    from torch import distributed as dist

    def work() -> Any:
        dist.barrier()  # a rank that ended before the others were connected to it would fail them
        return function()

    try:
        return answer(rank, count, store, group_seconds, work)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
