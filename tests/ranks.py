"""Ranks of a process group for tests: long-lived gloo processes, which call functions of the tests together.

The processes are forks of the server of `forked`; they are started when a test first needs so many, and again after
one was killed or did not answer. Each call makes a new process group, so that no call meets what another left.
"""

import os
import shutil
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from forked import kill, start


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


def run_ranks(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 60,
    group_seconds: float = 30,
    **options: Any,
) -> list[Any]:
    """Call a function on ranks, and return their values by rank; it must return on all of them. See `outcomes`."""
    found = outcomes(count, function, *arguments, seconds=seconds, group_seconds=group_seconds, **options)
    failed = [f"rank {rank}: {each.trace or each.message}" for rank, each in enumerate(found) if not each.returned]
    assert not failed, "\n".join(failed)
    return [each.value for each in found]


def outcomes(
    count: int,
    function: Callable[..., Any],
    *arguments: Any,
    seconds: float = 60,
    group_seconds: float = 30,
    **options: Any,
) -> list[Outcome]:
    """Call a function on ranks, each a process with one thread of torch, and return what became of each call.

    The function is one of a module; `torch.distributed` is initialised when it begins, with gloo and a timeout of
    ``group_seconds``. Arguments, keyword arguments (``options``) and values are pickled: tensors should be numpy arrays
    or lists. After ``seconds`` the processes that have not answered are killed.
    """
    while len(_ranks) < count:
        _ranks.append(_Rank())
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    call = (
        function.__module__,
        function.__qualname__,
        arguments,
        options,
        count,
        str(folder / uuid.uuid4().hex),
        group_seconds,
    )
    try:
        for rank in range(count):
            _ranks[rank].call(rank, call)
        deadline = time.monotonic() + seconds
        found = [_ranks[rank].outcome(deadline) for rank in range(count)]
        for rank, outcome in enumerate(found):
            if outcome.hung or outcome.exit_code is not None:
                _ranks[rank].close()
                _ranks[rank] = _Rank()
        return found
    except BaseException:
        close_ranks()
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def close_ranks() -> None:
    """End all processes; the next call starts new ones, in which nothing has run."""
    while _ranks:
        _ranks.pop().close()


class _Rank:
    """A process, and the pipe to it."""

    def __init__(self) -> None:
        descriptor, output = tempfile.mkstemp(prefix="rank-output-")
        os.close(descriptor)
        self._output = Path(output)
        self._pipe, theirs = Pipe()
        self._process = start(_serve, theirs, output=self._output)
        theirs.close()

    def call(self, rank: int, call: tuple[Any, ...]) -> None:
        self._pipe.send((rank, *call))

    def outcome(self, deadline: float) -> Outcome:
        with suppress(EOFError, ConnectionResetError):
            if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return Outcome(hung=True, message=f"did not answer in time\n{self._tail()}")
            return Outcome(*self._pipe.recv())
        self._process.join()
        code = self._process.exitcode
        return Outcome(exit_code=code, message=f"its process ended with {code}\n{self._tail()}")

    def close(self) -> None:
        kill(self._process)
        self._pipe.close()
        self._output.unlink()

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]


_ranks: list[_Rank] = []


def _serve(calls: Connection) -> None:
    """Do the calls of a test process until it ends."""
    import torch

    # pytest imports test files as modules of `tests`, which names the functions and classes that it sends.
    sys.path.append(str(Path(__file__).parents[1]))
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            calls.send(_answer(*calls.recv()))


def _answer(
    rank: int,
    module: str,
    name: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    count: int,
    store: str,
    group_seconds: float,
) -> tuple[Any, ...]:
    from torch import distributed as dist

    try:
        function: Any = import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        timeout = timedelta(seconds=group_seconds)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timeout
        )
        dist.barrier()  # a rank that ended before the others were connected to it would fail them
        return (function(*arguments, **options),)
    except BaseException as error:
        return None, type(error).__name__, str(error), traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
