"""How long idle OpenMP threads spin: long on an idle machine, hardly at all beside other work.

torch's CPU wheels compute with libgomp, whose threads spin for about three milliseconds between two parallel regions
before they sleep. On an idle machine this is fast, as a thread that sleeps has to be woken up. Beside a busy process it
is at most half as fast as sleeping: the spinning uses up the time slices that the threads need for the next region. The
number of spins is read once, when the library is loaded (``GOMP_SPINCOUNT``). But libgomp spins only 100 times while
it manages more threads than there are processors (manual of libgomp, "GOMP_SPINCOUNT"), and that can be changed at any
time: further threads, which only sleep, each start a team of OpenMP threads of their own. ``benchmarks/cpu_spin.py``
measures it. Results of computations do not depend on it.
"""

import logging
import math
import os
import threading
from collections.abc import Callable

import torch

from tensorkeep.closing import Closing
from tensorkeep.machine import thread_wait_seconds, usable_processors

logger = logging.getLogger(__name__)

INTERVAL = 0.25
"""Seconds between two looks at how long the threads of this process waited for a processor."""
_CONTENDED = 0.05
_FREE = 0.02
"""Seconds waited per second, of all threads together: above the first one spinning is limited, below the second not."""
_LOOKS = 3
"""So many looks in a row must find that threads wait, so that the save of a small model does not limit spinning."""

_CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

_GRAIN = 32768
"""Elements for which torch uses one thread, and another one for as many more (``at::internal::GRAIN_SIZE``)."""


class SpinControl(Closing):
    """Limits the spinning of OpenMP threads while other work competes for the processors; a context manager.

    It does nothing if torch uses one thread, or the user has chosen how threads wait.
    """

    def __init__(self, waited: Callable[[], float] = thread_wait_seconds) -> None:
        self._waited = waited
        self._idle_teams: _IdleTeams | None = None
        self._contended = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tensorkeep-spinning", daemon=True)
        if torch.get_num_threads() > 1 and not any(name in os.environ for name in _CHOSEN_BY_USER):
            self._thread.start()

    def close(self) -> None:
        """Stop watching, and let threads spin again; a second call does nothing."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._limit(False)

    def _watch(self) -> None:
        before = self._waited()
        while not self._stopped.wait(INTERVAL):
            now = self._waited()
            self.update((now - before) / INTERVAL)
            before = now

    def update(self, waited: float) -> None:
        """Limit spinning, or no longer, by the seconds that threads waited for a processor per second."""
        self._contended = self._contended + 1 if waited > _CONTENDED else 0
        if self._contended >= _LOOKS:
            self._limit(True)
        elif waited < _FREE:
            self._limit(False)

    @property
    def limited(self) -> bool:
        """Whether spinning is limited at the moment."""
        return self._idle_teams is not None

    def _limit(self, limited: bool) -> None:
        if limited == self.limited:
            return
        logger.info("OpenMP threads spin %s", "less: other work competes for the processors" if limited else "again")
        if self._idle_teams is not None:
            self._idle_teams.close()
        self._idle_teams = _IdleTeams() if limited else None


def _teams(threads: int, processors: int) -> int:
    """Return how many teams of so many threads are needed beside the main team."""
    if threads < 2:
        # torch was set to one thread meanwhile: no thread spins.
        return 0
    # Each team adds all of its threads but the first one to those of the main team.
    return max(1, math.ceil((processors - threads + 1) / (threads - 1)))


class _IdleTeams(Closing):
    """As many sleeping teams of OpenMP threads as make libgomp manage more threads than there are processors."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        threads = torch.get_num_threads()
        # libgomp counts the processors that the process may use, too.
        count = _teams(threads, len(usable_processors()))
        self._threads = [threading.Thread(target=self._hold_team, args=(threads,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _hold_team(self, threads: int) -> None:
        # The team of a thread lives as long as the thread.
        torch.empty(_GRAIN * threads).fill_(0)
        self._ended.wait()

    def close(self) -> None:
        """End the teams."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
