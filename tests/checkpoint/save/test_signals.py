"""What a signal does while an `OnSignal` is open, and afterwards."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from faults import injection as faults
from tensorkeep import EverySteps, OnSignal, UsageError


@pytest.fixture(autouse=True)
def handlers_as_a_program_finds_them() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_second_sigterm_ends_the_process() -> None:
    def child() -> None:
        rule = OnSignal()
        signal.raise_signal(signal.SIGTERM)
        assert rule.received
        rule.saved(1)
        signal.raise_signal(signal.SIGTERM)

    assert faults.in_child(child) == signal.SIGTERM


def test_a_second_signal_goes_to_the_previous_handler() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    with OnSignal() as rule:
        signal.raise_signal(signal.SIGTERM)
        assert (rule.received, heard) == (True, [])
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with OnSignal():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_sigusr1_asks_for_a_save_repeatedly() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
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


def test_previous_handlers_are_restored() -> None:
    with OnSignal() as rule:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert (rule | EverySteps(2)).due(2)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    rule.close()


def test_rules_may_end_in_any_order() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    first, second = OnSignal(signal.SIGUSR1), OnSignal(signal.SIGUSR1)
    first.close()
    signal.raise_signal(signal.SIGUSR1)
    assert (first.received, second.received, heard) == (False, True, [])
    second.close()
    signal.raise_signal(signal.SIGUSR1)
    assert (first.received, heard) == (False, [signal.SIGUSR1])


def test_a_forked_child_can_be_ended() -> None:
    with OnSignal() as rule, OnSignal():

        def child() -> None:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)

        assert faults.in_child(child) == signal.SIGTERM
        assert not rule.received
        signal.raise_signal(signal.SIGUSR1)  # the parent still listens


@pytest.mark.parametrize("number", [signal.SIGKILL, 12345, "TERM"])
def test_signals_that_cannot_be_handled_are_refused(number: Any) -> None:
    with pytest.raises(UsageError, match="cannot be handled"):
        OnSignal(signal.SIGUSR1, number)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
