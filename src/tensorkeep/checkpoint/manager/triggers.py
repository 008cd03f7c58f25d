"""When to save: rules that are asked after each training step, and combinations of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from tensorkeep.checkpoint.arguments import check_count
from tensorkeep.errors import UsageError
from tensorkeep.units import parse_seconds


class SaveWhen(ABC):
    """A rule; ``first | second`` saves when either of them says so."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Say whether to save after this step."""

    def saved(self, step: int) -> None:
        """Learn that this step was saved, for whatever reason."""
        return

    def __or__(self, other: SaveWhen) -> SaveWhen:
        return AnyOf((self, other))


@dataclass(frozen=True)
class AnyOf(SaveWhen):
    """Saves when any of several rules says so."""

    rules: tuple[SaveWhen, ...]

    def due(self, step: int) -> bool:
        # Each is asked, because some remember what they were asked.
        answers = [rule.due(step) for rule in self.rules]
        return any(answers)

    def saved(self, step: int) -> None:
        for rule in self.rules:
            rule.saved(step)


@dataclass(frozen=True)
class EverySteps(SaveWhen):
    """Saves after each step whose number is a multiple of ``interval``, but not after step 0.

    Raises
    ------
    UsageError
        If the interval is below 1.
    """

    interval: int

    def __post_init__(self) -> None:
        check_count("the interval", self.interval)

    def due(self, step: int) -> bool:
        return step > 0 and step % self.interval == 0


class EveryTime(SaveWhen):
    """Saves when so much time has passed since the last save, or since the rule was made.

    Parameters
    ----------
    interval : str or float
        Such as ``"10min"``, or seconds.
    clock : callable
        Returns seconds; it must not go back.
    """

    def __init__(self, interval: str | float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = parse_seconds(interval)
        self._clock = clock
        self._last = clock()

    def due(self, step: int) -> bool:
        return self._clock() - self._last >= self._interval

    def saved(self, step: int) -> None:
        self._last = self._clock()


class OnSignal(SaveWhen):
    """Saves after the step during which a signal came, such as the ``SIGTERM`` or ``SIGUSR1`` of a batch system.

    A context manager. The handler only notes the signal; after each step the training loop looks at `came`, saves if
    it holds or `due` says so, and ends if it held. A signal that comes again goes to what handled it before: a second
    ``SIGTERM`` ends the process as it always did. Only ``SIGUSR1`` and ``SIGUSR2`` may come again once there was a
    save, and ask for another one. What handled the signals before comes back with `close`, and in forked children at
    once. To be made in the main thread.

    Parameters
    ----------
    *signals : int
        By default ``SIGTERM`` and ``SIGUSR1``.

    Attributes
    ----------
    came : bool
        Whether a signal has come since it was made.

    Raises
    ------
    UsageError
        If it is made in another thread, or for a signal that cannot be handled.
    """

    def __init__(self, *signals: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals are handled in the main thread only", remedy="make the OnSignal there")
        self.came = False
        self._waiting = False
        self._closed = False
        self._noted: set[int] = set()
        self._before: dict[int, Any] = {}
        _open.append(self)
        try:
            for number in signals or (signal.SIGTERM, signal.SIGUSR1):
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._note)
        except (OSError, TypeError, ValueError) as error:
            self.close()
            raise UsageError(f"the signal {number} cannot be handled ({error})", remedy="give others") from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._closed or number in self._noted:
            self._pass_on(number, frame)
            return
        self._noted.add(number)
        self.came = self._waiting = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def due(self, step: int) -> bool:
        return self._waiting

    def saved(self, step: int) -> None:
        self._waiting = False
        self._noted -= {signal.SIGUSR1, signal.SIGUSR2}

    def close(self) -> None:
        """Put back what handled the signals before; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _open.remove(self)
        for number, before in self._before.items():
            # A handler that was set since stays; where it calls this one, that passes the signal on.
            if signal.getsignal(number) == self._note:
                # None is what was not set from Python, and cannot be put back.
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


_open: list[OnSignal] = []


def _close_in_child() -> None:
    # A child has no loop that asks: the signal that shall end it, from multiprocessing for one, would only be noted.
    for rule in reversed(_open.copy()):
        rule.close()


os.register_at_fork(after_in_child=_close_in_child)
