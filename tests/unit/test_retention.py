"""Rules for what to keep and when to save."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import (
    EverySteps,
    EveryTime,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepThinned,
    OnSignal,
    Step,
    UsageError,
)
from holdfast.checkpoint.retention import Keep, KeepAll, keep_rule, to_delete


def step(number: int, saved_at: float = 0.0, metrics: Mapping[str, float] | None = None) -> Step:
    return Step(number, f"step-{number:06d}", saved_at, metrics or {}, 1, 1)


HUNDREDS = [step(number, float(number)) for number in range(100, 1100, 100)]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (KeepAll(), range(100, 1100, 100)),
        (KeepLast(3), [800, 900, 1000]),
        (KeepEvery(300), [300, 600, 900]),
        (KeepLast(1) | KeepEvery(500), [500, 1000]),
        (KeepLast(99), range(100, 1100, 100)),
    ],
)
def test_what_is_kept(rule: Keep, kept: list[int]) -> None:
    assert rule.wanted(HUNDREDS) == set(kept)


def test_the_best_are_kept() -> None:
    steps = [step(number, metrics={"loss": loss}) for number, loss in enumerate([3.0, 1.0, math.nan, 2.0, 1.0])]
    steps.append(step(9))
    assert KeepBest(2).wanted(steps) == {1, 4}
    assert [found.number for found in KeepBest(9, "loss").ranked(steps)] == [4, 1, 3, 0]
    assert KeepBest(1, "loss", "max").wanted(steps) == {0}
    assert KeepBest(1, "accuracy").wanted(steps) == set()
    assert KeepBest(1).wanted([]) == set()


def test_a_metric_that_is_not_clear_has_to_be_named() -> None:
    steps = [step(1, metrics={"loss": 1.0, "accuracy": 0.5})]
    with pytest.raises(UsageError, match="several metrics: accuracy, loss"):
        KeepBest(1).wanted(steps)


def test_steps_are_thinned_by_age() -> None:
    hour = 3600.0
    steps = [step(number, number * hour / 4) for number in range(400)]
    kept = KeepThinned((("1h", 0), ("1d", "1h"), ("3d", "1d"))).wanted(steps)
    ages = sorted((399 - number) / 4 for number in kept)
    assert [age for age in ages if age <= 1] == [0, 0.25, 0.5, 0.75, 1]
    assert len([age for age in ages if 1 < age <= 24]) == 23
    assert 2 <= len([age for age in ages if age > 24]) <= 3
    assert max(ages) <= 72


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_thinning_in_turns_keeps_a_ladder(times: list[float]) -> None:
    """Deleting after each save must not starve the older rungs."""
    rule = KeepThinned((("100s", 0), ("1000s", "100s"), ("1w", "1000s")))
    there: list[Step] = []
    for number, moment in enumerate(sorted(times)):
        there.append(step(number, moment))
        gone = {found.number for found in to_delete(rule, there)}
        there = [found for found in there if found.number not in gone]
        assert there[-1].number == number
    newest = max(times)
    recent = [moment for moment in times if newest - moment <= 100]
    assert len([found for found in there if newest - found.saved_at <= 100]) == len(recent)


def test_a_clock_that_went_back_deletes_no_more_than_it_must() -> None:
    steps = [step(1, 1000.0), step(2, 2000.0), step(3, 500.0)]
    assert 3 in KeepThinned((("1h", "10min"),)).wanted(steps)
    assert to_delete(KeepThinned((("1s", 0),)), steps) == [steps[0]]


def test_the_last_step_is_never_deleted() -> None:
    assert [found.number for found in to_delete(KeepEvery(7), [step(7), step(8), step(9)])] == [8]
    assert to_delete(KeepEvery(7), []) == []


def test_arguments_make_one_rule() -> None:
    assert keep_rule(None, None, None, None) == KeepAll()
    rule = keep_rule(2, 500, KeepBest(1, "loss"), KeepLast(1))
    steps = [step(number, metrics={"loss": -float(number == 200)}) for number in range(100, 1100, 100)]
    assert rule.wanted(steps) == {200, 500, 900, 1000}


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepLast(True),
        lambda: KeepEvery(-1),
        lambda: KeepBest(0),
        lambda: KeepBest(1, "loss", "least"),
        lambda: KeepThinned((("2h", 0), ("1h", 0))),
        lambda: KeepThinned((("soon", 0),)),
        lambda: EverySteps(0),
        lambda: EveryTime("often"),
    ],
)
def test_rules_that_make_no_sense(make: object) -> None:
    with pytest.raises(UsageError):
        make()  # type: ignore[operator]


def test_every_so_many_steps() -> None:
    rule = EverySteps(10)
    assert [number for number in range(35) if rule.due(number)] == [10, 20, 30]


def test_every_so_long() -> None:
    now = [0.0]
    rule = EveryTime("10min", clock=lambda: now[0])
    assert not rule.due(1)
    now[0] = 600.0
    assert rule.due(2)
    assert rule.due(3)
    rule.saved(3)
    assert not rule.due(4)


def test_on_a_signal() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    rule = OnSignal(signal.SIGUSR1) | EverySteps(100)
    first = rule.rules[0]  # type: ignore[attr-defined]
    assert not rule.due(1)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert rule.due(2)
    rule.saved(2)
    assert not rule.due(3)
    assert first.came
    first.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_signals_are_for_the_main_thread() -> None:
    said: list[Exception] = []

    def work() -> None:
        try:
            OnSignal()
        except UsageError as error:
            said.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(said) == 1
