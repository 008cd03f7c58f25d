"""When to save: rules that are asked after every training step, and combinations of rules."""

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tensorkeep.closing import Closing
from tensorkeep.errors import UsageError
from tensorkeep.storage.parallel import reset_in_child
from tensorkeep.units import check_count, parse_seconds


class SaveWhen(ABC):
    """A rule that decides when to save; ``first | second`` saves when either rule does.

    A rule of your own implements `due`, and `saved` if it depends on earlier saves.

    Examples
    --------
    >>> from tensorkeep import EverySteps, EveryTime
    >>> rule = EverySteps(1000) | EveryTime("30min")
    >>> rule.due(999), rule.due(1000)
    (False, True)
    """

    @property
    def is_by_number(self) -> bool:
        """Whether `due` depends on the step number alone. If not, the ranks of a group exchange their answers."""
        return False

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to save after this step."""

    def saved(self, step: int) -> None:
        """Called by the manager after a save, whatever its reason."""
        return

    def __or__(self, other: "SaveWhen") -> "SaveWhen":
        return AnyOf((self, other))


@dataclass(frozen=True)
class AnyOf(SaveWhen):
    rules: tuple[SaveWhen, ...]

    @property
    def is_by_number(self) -> bool:
        return all(rule.is_by_number for rule in self.rules)

    def due(self, step: int) -> bool:
        # Every rule is asked, because some have state.
        answers = [rule.due(step) for rule in self.rules]
        return any(answers)

    def saved(self, step: int) -> None:
        for rule in self.rules:
            rule.saved(step)


@dataclass(frozen=True)
class EverySteps(SaveWhen):
    """Saves after every step with a number that is a multiple of ``interval``, but not after step 0.

    UsageError is raised if the interval is below 1.

    Examples
    --------
    >>> from tensorkeep import EverySteps
    >>> [step for step in range(7) if EverySteps(3).due(step)]
    [3, 6]
    """

    interval: int

    def __post_init__(self) -> None:
        check_count("the interval", self.interval)

    @property
    def is_by_number(self) -> bool:
        return True

    def due(self, step: int) -> bool:
        return step > 0 and step % self.interval == 0


class EveryTime(SaveWhen):
    """Saves when this much time has passed since the last save, or since the rule was made.

    The interval is a text such as ``"10min"``, or seconds; UsageError if it is negative or not a duration. ``clock``
    returns monotonic seconds.

    Examples
    --------
    >>> from tensorkeep import EveryTime
    >>> EveryTime("10min").due(1)
    False
    """

    def __init__(self, interval: str | float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = interval
        self._interval = parse_seconds(interval)
        self._clock = clock
        self._last = clock()

    def __repr__(self) -> str:
        return f"EveryTime({self._text!r})"

    def due(self, step: int) -> bool:
        return self._clock() - self._last >= self._interval

    def saved(self, step: int) -> None:
        self._last = self._clock()


class OnSignal(Closing, SaveWhen):
    """Saves after the step during which a signal arrived, such as the ``SIGTERM`` or ``SIGUSR1`` of a batch system.

    A context manager, made in the main thread; without arguments it handles these two signals. The handler only records
    the signal. After each step, the training loop saves if `due` returns True or ``received`` is set, and ends if
    ``received`` is set. A second signal of the same kind goes to the previous handler: a second ``SIGTERM`` ends the
    process as usual. Only ``SIGUSR1`` and ``SIGUSR2`` are recorded again after a save. `close` restores the previous
    handlers; a forked child restores them at once. UsageError is raised in another thread, and for a signal that cannot
    be handled.

    Examples
    --------
    >>> import signal
    >>> from tensorkeep import OnSignal
    >>> with OnSignal(signal.SIGUSR1) as stop:
    ...     signal.raise_signal(signal.SIGUSR1)
    ...     stop.due(1), stop.received
    (True, True)
    """

    def __init__(self, *signals: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signals are handled in the main thread only", remedy="make the OnSignal there")
        self.received = False
        self._waiting = False
        self._closed = False
        self._noted: set[int] = set()
        self._before: dict[int, Any] = {}
        # A child has no training loop: a signal to end it, from multiprocessing for example, would only be recorded.
        reset_in_child(self, OnSignal.close)
        try:
            for number in signals or (signal.SIGTERM, signal.SIGUSR1):
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, self._note)
        except (OSError, TypeError, ValueError) as error:
            self.close()
            raise UsageError(f"the signal {number} cannot be handled ({error})", remedy="give others") from error

    def __repr__(self) -> str:
        return f"OnSignal({', '.join(signal.Signals(number).name for number in self._before)})"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._closed or number in self._noted:
            self._pass_on(number, frame)
            return
        self._noted.add(number)
        # Only noted: a save in the handler would see a state in the middle of a step.
        self.received = self._waiting = True

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # To the handler that was there before, or to the default action.
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
        # A second SIGTERM must end the process as usual, so it stays noted.
        self._noted -= {signal.SIGUSR1, signal.SIGUSR2}

    def close(self) -> None:
        """Restore the previous handlers; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        for number, before in self._before.items():
            # A handler that was set later is kept; if it calls this one, the signal is passed on.
            if signal.getsignal(number) == self._note:
                # None stands for a handler that was not set from Python, and cannot be restored.
                signal.signal(number, signal.SIG_DFL if before is None else before)
