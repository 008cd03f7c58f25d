"""How a training process uses a CPU: idle OpenMP threads that spin, and freed memory that is kept."""

import logging
import math
import os
import threading
from collections.abc import Callable

import torch

from tensorkeep.ext import Closing, machine

logger = logging.getLogger(__name__)

# Seconds between two looks at how long the threads of this process waited for a processor.
INTERVAL = 0.25
# Spinning is limited if all threads together wait more seconds per second than this.
_CONTENDED = 0.05
# Spinning is no longer limited if they wait fewer seconds per second than this.
_FREE = 0.02
# So many looks in a row must find that threads wait, so that the save of a small model does not limit spinning.
_LOOKS = 3
_SPIN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# Elements per thread of torch: another thread for as many more (``at::internal::GRAIN_SIZE``).
_GRAIN = 32768

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
# Bytes: glibc takes no larger threshold on 64 bits. Larger blocks are always returned.
_LARGEST_THRESHOLD = 32 << 20
_ALL = 2**31 - 1
_ALLOCATOR_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


# glibc returns large blocks to the kernel when they are freed, and a step frees all of its activations. The next step
# gets fresh pages, and the first access to a page is a page fault: for a tensor of 1.5 MB the faults can take several
# times as long as the operation that writes it, above all in virtual machines. See mallopt(3), "M_MMAP_THRESHOLD" and
# "M_TRIM_THRESHOLD". The resident memory of the process stays at its peak.
def keep_freed_memory() -> None:
    """Let this process keep freed blocks of up to 32 MiB, unless the user has chosen thresholds or an allocator."""
    # Not every C library has mallopt.
    if hasattr(machine.libc(), "mallopt") and not any(name in os.environ for name in _ALLOCATOR_SETTINGS):
        machine.libc().mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        machine.libc().mallopt(_TRIM_THRESHOLD, _ALL)


# torch's CPU wheels compute with libgomp. Its threads spin for about three milliseconds between two parallel regions
# before they sleep. On an idle machine this is fast, as a sleeping thread has to be woken up. Beside a busy process it
# is at most half as fast as sleeping: the spinning uses up the time slices that the threads need for the next region.
# libgomp reads the number of spins once, when it is loaded (``GOMP_SPINCOUNT``). But it spins only 100 times while it
# manages more threads than there are processors (manual of libgomp, "GOMP_SPINCOUNT"), and that can be changed at any
# time: more threads, which only sleep, each start a team of OpenMP threads. The benchmark
# ``cpu_spin.py`` measures it.
class SpinControl(Closing):
    """Limits the spinning of OpenMP threads while other work competes for the processors; a context manager."""

    def __init__(self, waited: Callable[[], float] = machine.thread_wait_seconds) -> None:
        self._waited = waited
        self._idle_teams: _IdleTeams | None = None
        self._contended = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tensorkeep-spinning", daemon=True)
        # One thread has no other to wait for, and the user's own setting counts.
        if torch.get_num_threads() > 1 and not any(name in os.environ for name in _SPIN_SETTINGS):
            self._thread.start()

    def close(self) -> None:
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
        return self._idle_teams is not None

    def _limit(self, limited: bool) -> None:
        if limited == self.limited:
            return
        logger.info("OpenMP threads spin %s", "less: other work competes for the processors" if limited else "again")
        if self._idle_teams is not None:
            self._idle_teams.close()
        self._idle_teams = _IdleTeams() if limited else None


class _IdleTeams(Closing):
    """As many sleeping teams of OpenMP threads as make libgomp manage more threads than there are processors."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        threads = torch.get_num_threads()
        # libgomp counts the processors that the process may use, too. Each team adds all of its threads but the first
        # one to the threads of the main team. If torch was set to one thread meanwhile, no thread spins.
        more = len(machine.usable_processors()) - threads + 1
        count = 0 if threads < 2 else max(1, math.ceil(more / (threads - 1)))
        self._threads = [threading.Thread(target=self._hold_team, args=(threads,), daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _hold_team(self, threads: int) -> None:
        # The team of a thread lives as long as the thread.
        torch.empty(_GRAIN * threads).fill_(0)
        self._ended.wait()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
