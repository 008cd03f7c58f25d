"""Ranks that live for one call, so that they can be killed and stopped at will: forks of one process.

That process is a fork of the server of `forked`; it imports what ranks need, and never uses a process group itself, so
that a rank costs a few milliseconds.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forked import kill, start
from ranks import Outcome


class ForkedRanks:
    """A process whose forks call functions of the tests as ranks of a gloo group; a context manager."""

    def __enter__(self) -> "ForkedRanks":
        descriptor, output = tempfile.mkstemp(prefix="ranks-output-")
        os.close(descriptor)
        self.output = Path(output)
        self._pipe, theirs = Pipe()
        self._process = start(_serve, theirs, output=self.output)
        theirs.close()
        return self

    def __exit__(self, *error: object) -> None:
        kill(self._process)
        self._pipe.close()
        self.output.unlink()

    def run(
        self,
        count: int,
        function: Callable[..., Any],
        *arguments: Any,
        hung: int | None = None,
        resumed: bool = False,
        seconds: float = 40,
    ) -> list[Outcome]:
        """Call ``function(rank, *arguments)`` on ranks, and return what became of each call.

        A rank that will hang is not waited for; it is killed when the others have ended, or then ``resumed``.
        """
        self._pipe.send((count, function.__module__, function.__name__, arguments, hung, resumed, seconds))
        found: list[Outcome] = self._pipe.recv()
        return found


class _Fork:
    """A rank that is running."""

    def __init__(self, rank: int, count: int, store: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.pipe, theirs = Pipe(duplex=False)
        self.process = os.fork()
        if self.process == 0:
            # Not sys.exit: neither the tests' nor torch's exit handlers are this process's.
            try:
                theirs.send_bytes(pickle.dumps(_answer(rank, count, store, work, arguments)))
            finally:
                os._exit(0)
        theirs.close()

    def outcome(self, deadline: float) -> Outcome:
        """Wait for the rank, which is killed if it does not answer in time."""
        with suppress(EOFError):
            if self.pipe.poll(max(0.0, deadline - time.monotonic())):
                answer = Outcome(*pickle.loads(self.pipe.recv_bytes()))
                self._end()
                return answer
            os.kill(self.process, signal.SIGKILL)
            self._end()
            return Outcome(hung=True, message="did not answer in time")
        return Outcome(exit_code=os.waitstatus_to_exitcode(self._end()))

    def resume(self, deadline: float) -> None:
        """Continue the rank once it has stopped, which the others need not wait for."""
        states = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        while not os.waitid(os.P_PID, self.process, states) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(self.process, signal.SIGCONT)

    def _end(self) -> int:
        self.pipe.close()
        return os.waitpid(self.process, 0)[1]


def _serve(calls: Connection) -> None:
    """Do the calls of a test process until it ends."""
    import torch
    import torch.distributed.tensor

    import tensorkeep

    # Forks would import again and again what these import on first use.
    for used in ("save", "save_async", "load", "CheckpointManager"):
        getattr(tensorkeep, used)
    # pytest imports test files as modules of `tests`, which names the functions that it sends.
    sys.path.append(str(Path(__file__).parents[3]))
    torch.set_num_threads(1)
    with suppress(EOFError):
        while True:
            calls.send(_run(*calls.recv()))


def _run(
    count: int,
    module: str,
    name: str,
    arguments: tuple[Any, ...],
    hung: int | None,
    resumed: bool,
    seconds: float,
) -> list[Outcome]:
    work = getattr(import_module(module), name)
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        forks = [_Fork(rank, count, f"{folder}/store", work, arguments) for rank in range(count)]
        if hung is not None:
            _wait([fork for rank, fork in enumerate(forks) if rank != hung], deadline)
            if resumed:
                forks[hung].resume(deadline)
            else:
                os.kill(forks[hung].process, signal.SIGKILL)
        return [fork.outcome(deadline) for fork in forks]


def _wait(forks: list[_Fork], deadline: float) -> None:
    """Wait until all of these have answered or ended."""
    pipes = [fork.pipe for fork in forks]
    while pipes and time.monotonic() < deadline:
        ready = wait(pipes, max(0.0, deadline - time.monotonic()))
        pipes = [pipe for pipe in pipes if pipe not in ready]


def _answer(rank: int, count: int, store: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    from torch import distributed as dist

    try:
        group_store = dist.FileStore(store, count)
        dist.init_process_group("gloo", store=group_store, rank=rank, world_size=count, timeout=timedelta(seconds=30))
        return (work(rank, *arguments),)
    except BaseException as error:
        return None, type(error).__name__, str(error), traceback.format_exc()
