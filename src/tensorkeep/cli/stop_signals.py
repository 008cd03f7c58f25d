"""The signals on which a training run saves and ends: Ctrl-C, SIGTERM and SIGHUP."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tensorkeep.checkpoint.manager.triggers import OnSignal


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether one of the signals was received.

    A second Ctrl-C or SIGTERM has its usual effect. SIGHUP may be received repeatedly, as both shells and the kernel
    send it; it stays ignored in a process that ignores it (``nohup``).
    """
    with OnSignal(signal.SIGINT, signal.SIGTERM) as signals:
        before = signal.getsignal(signal.SIGHUP)
        if before == signal.SIG_IGN:
            yield lambda: signals.came
            return
        hangup = _Hangup()
        signal.signal(signal.SIGHUP, hangup)
        try:
            yield lambda: signals.came or hangup.came
        finally:
            signal.signal(signal.SIGHUP, before)


class _Hangup:
    """Records SIGHUP, and from then on discards output to the terminal, which would fail."""

    def __init__(self) -> None:
        self.came = False
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in self._terminals:
            os.dup2(nowhere, terminal)
        os.close(nowhere)
