"""Ranks that live for one call, so that they can be killed and stopped at will: forks of one process.

That process is a fork of the server of `forked`; it imports what ranks need, and never uses a process group itself, so
that a rank costs a few milliseconds.
"""

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from forked import Server
from ranks import Outcome, answer, serve


class ForkedRanks(Server):
    """A process whose forks call functions of the tests as ranks of a gloo group."""

    def __init__(self) -> None:
        super().__init__(_serve)

    def run(
        self, count: int, function: Callable[..., Any], *arguments: Any, hung: int | None = None, resumed: bool = False
    ) -> list[Outcome]:
        """Call ``function(rank, *arguments)`` on ranks, and return what became of each call.

        A rank that will hang is not waited for; it is killed when the others have ended, or then ``resumed``.
        """
        self.pipe.send((count, function, arguments, hung, resumed))
        return self.pipe.recv()


class _Fork:
    """A rank that is running."""

    def __init__(self, rank: int, count: int, store: str, work: Callable[[], Any]) -> None:
        self.pipe, theirs = Pipe(duplex=False)
        self.process = os.fork()
        if self.process == 0:
            # Not sys.exit: neither the tests' nor torch's exit handlers are this process's.
            try:
                theirs.send_bytes(pickle.dumps(answer(rank, count, store, 100, work)))
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
    import tensorkeep

    # Forks would import again and again what these import on first use.
    for used in ("save", "save_async", "load", "CheckpointManager"):
        getattr(tensorkeep, used)
    serve(calls, _run)


def _run(count: int, function: Any, arguments: tuple[Any, ...], hung: int | None, resumed: bool) -> list[Outcome]:
    deadline = time.monotonic() + 200
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        forks = [_Fork(rank, count, f"{folder}/store", partial(function, rank, *arguments)) for rank in range(count)]
        if hung is not None:
            for rank, fork in enumerate(forks):
                if rank != hung:
                    fork.pipe.poll(max(0.0, deadline - time.monotonic()))  # until it has answered or ended
            if resumed:
                forks[hung].resume(deadline)
            else:
                os.kill(forks[hung].process, signal.SIGKILL)
        return [fork.outcome(deadline) for fork in forks]
