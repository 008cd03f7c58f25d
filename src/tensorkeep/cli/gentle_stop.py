"""The signals after which a training run saves and ends: Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tensorkeep.checkpoint.manager.triggers import OnSignal


@contextmanager
def gentle_stop() -> Iterator[Callable[[], bool]]:
    """Lend a question: has one of the signals come?

    A second Ctrl-C or SIGTERM does what it would have done before. SIGHUP may come any number of times, as shells and
    the kernel both send it; a process that is to outlive its terminal (``nohup``) stays as deaf to it as it was.
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
    """Notes SIGHUP; what is printed to the terminal from then on goes nowhere, instead of failing."""

    def __init__(self) -> None:
        self.came = False
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for terminal in self._terminals:
            os.dup2(nowhere, terminal)
        os.close(nowhere)
