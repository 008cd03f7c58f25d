"""What a signal does while an `OnSignal` is open, and afterwards."""

import os
import signal
from collections.abc import Iterator

import pytest

from faults import injection as faults
from tensorkeep import EverySteps, OnSignal, UsageError
from tensorkeep.testing.cases import case


@pytest.fixture(autouse=True)
def handlers_as_a_program_finds_them() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.integration
def test_a_second_sigterm_ends_the_process_and_the_first_one_a_forked_child() -> None:
    def child() -> None:
        rule = OnSignal()
        signal.raise_signal(signal.SIGTERM)
        assert rule.received
        rule.saved(1)
        signal.raise_signal(signal.SIGTERM)

    assert faults.in_child(child) == signal.SIGTERM
    with OnSignal() as rule, OnSignal():

        def forked() -> None:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)

        assert faults.in_child(forked) == signal.SIGTERM
        assert not rule.received
        signal.raise_signal(signal.SIGUSR1)  # the parent still listens


@pytest.fixture
def heard() -> list[int]:
    """Return the signals that reach the handler of the program."""
    found: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: found.append(number))
    return found


def test_a_second_signal_goes_to_the_previous_handler(heard: list[int]) -> None:
    with OnSignal() as rule:
        signal.raise_signal(signal.SIGTERM)
        assert (rule.received, heard) == (True, [])
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with OnSignal():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_sigusr1_asks_for_a_save_repeatedly(heard: list[int]) -> None:
    with OnSignal(signal.SIGUSR1) as rule:
        for step in range(3):
            assert not rule.due(step)
            signal.raise_signal(signal.SIGUSR1)
            assert rule.due(step)
            rule.saved(step)
        assert heard == []
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]


def test_previous_handlers_are_restored_and_signals_that_cannot_be_handled_are_refused() -> None:
    with OnSignal() as rule:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert (rule | EverySteps(2)).due(2)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    rule.close()
    for number in (signal.SIGKILL, 12345, "TERM"):
        with case(number), pytest.raises(UsageError, match="cannot be handled"):
            OnSignal(signal.SIGUSR1, number)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_rules_may_end_in_any_order(heard: list[int]) -> None:
    first, second = OnSignal(signal.SIGUSR1), OnSignal(signal.SIGUSR1)
    first.close()
    signal.raise_signal(signal.SIGUSR1)
    assert (first.received, second.received, heard) == (False, True, [])
    second.close()
    signal.raise_signal(signal.SIGUSR1)
    assert (first.received, heard) == (False, [signal.SIGUSR1])
