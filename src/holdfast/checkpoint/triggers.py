"""When to save: rules that are asked after each training step, and combinations of them."""

from __future__ import annotations

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from holdfast.checkpoint.arguments import check_count
from holdfast.errors import UsageError
from holdfast.units import parse_seconds


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

    The handler only notes the signal; the training loop asks `due`, saves, and ends if `came` holds. What handled the
    signal before comes back with `close`. To be made in the main thread.

    Parameters
    ----------
    *signals : int
        By default ``SIGTERM`` and ``SIGUSR1``.

    Attributes
    ----------
    came : bool
        Whether a signal has come since it was made.
    """

    def __init__(self, *signals: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals are handled in the main thread only", remedy="make the OnSignal there")
        self.came = False
        self._waiting = False
        self._before: dict[int, Any] = {}
        for number in signals or (signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = self._waiting = True

    def due(self, step: int) -> bool:
        return self._waiting

    def saved(self, step: int) -> None:
        self._waiting = False

    def close(self) -> None:
        """Put back what handled the signals before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)
