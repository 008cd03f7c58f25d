"""Rules for what to keep and when to save."""

import math
import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep import EverySteps, EveryTime, KeepBest, KeepEvery, KeepLast, KeepThinned, OnSignal, Step, UsageError
from tensorkeep.runs.retention import Keep, KeepAll, Retention, run_times, unwanted
from tensorkeep.runs.steps import best_step
from tensorkeep.testing.cases import case


def step(number: int, saved_at: float = 0.0, metrics: Mapping[str, float] | None = None) -> Step:
    return Step(number, f"step-{number:06d}", saved_at, metrics or {}, 1, 1)


HUNDREDS = [step(number, float(number)) for number in range(100, 1100, 100)]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        *((rule, range(100, 1100, 100)) for rule in (KeepAll(), KeepLast(99))),
        *((KeepLast(3), [800, 900, 1000]), (KeepEvery(300), [300, 600, 900])),
        (KeepLast(1) | KeepEvery(500), [500, 1000]),
    ],
)
def test_what_is_kept(rule: Keep, kept: list[int]) -> None:
    assert rule.wanted(HUNDREDS) == set(kept)


def test_the_best_are_kept_of_a_metric_that_is_clear_or_named() -> None:
    steps = [step(number, metrics={"loss": loss}) for number, loss in enumerate([3.0, 1.0, math.nan, 2.0, 1.0])]
    steps.append(step(9))
    assert KeepBest(2).wanted(steps) == {1, 4}
    assert [found.number for found in KeepBest(9, "loss").ranked(steps)] == [4, 1, 3, 0]
    assert KeepBest(1, "loss", "max").wanted(steps) == {0}
    assert KeepBest(1).wanted([]) == set()
    assert KeepBest(1, mode="max").wanted([step(1, metrics=SCORE), step(2, metrics={"score": 0.5})]) == {1}
    KeepBest(1, "loss").check(LOSS_AND_ACCURACY)
    for metrics in ({"loss": 1.0}, {}):
        (KeepLast(2) | KeepBest(1)).check(metrics)


LOSS_AND_ACCURACY = {"loss": 1.0, "accuracy": 0.5}
VALIDATION = {"val_loss": 1.0, "accuracy": 0.5}
SCORE = {"score": 1.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KeepBest(1).wanted([step(1, metrics=LOSS_AND_ACCURACY)]), "several metrics: accuracy, loss"),
        (lambda: (KeepLast(2) | KeepBest(1)).check(LOSS_AND_ACCURACY), "several metrics: accuracy, loss"),
        (
            lambda: unwanted(
                KeepBest(1, "vall_loss") | KeepLast(1), [step(each, metrics=VALIDATION) for each in (1, 2)]
            ),
            r"no step has the metric 'vall_loss', only accuracy, val_loss\n.*'val_loss'",
        ),
        (lambda: KeepBest(1, "score"), r"'score' does not say .*\n.*mode=\"max\"$"),
        (lambda: KeepBest(1).wanted([step(1, metrics=SCORE)]), "'score' does not say"),
        (lambda: KeepBest(1).check(SCORE), "'score' does not say"),
        (lambda: Retention(keep_best=KeepBest(1, "loss"), mode="max"), "keep_best is a rule"),
    ],
)
def test_a_metric_and_a_direction_that_are_not_clear_have_to_be_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("metrics", [{}, {"loss": math.nan}])
def test_while_there_is_nothing_to_compare_all_steps_are_kept(metrics: dict[str, float]) -> None:
    steps = [step(number, metrics=metrics) for number in range(5)]
    assert unwanted(KeepBest(1) | KeepLast(1), steps) == []
    compared = [*steps, step(5, metrics={"loss": 1.0}), step(6)]
    assert unwanted(KeepBest(1) | KeepLast(1), compared) == steps


def test_the_best_step_of_a_run() -> None:
    names = ("train_loss", "eval/loss", "accuracy")
    steps = [step(n, metrics=dict(zip(names, values, strict=True))) for n, values in enumerate([(1, 2, 3), (2, 1, 4)])]
    steps.append(step(2))
    assert (best_step(steps), best_step(steps, "train_loss")) == (steps[1], steps[0])
    assert (best_step(steps, "accuracy"), best_step(steps, "accuracy", "min")) == (steps[1], steps[0])
    assert best_step([step(1)]) is best_step([step(1, metrics={"loss": math.nan})]) is None
    with pytest.raises(UsageError, match="several metrics: accuracy, f1"):
        best_step([step(1, metrics={"f1": 1.0, "accuracy": 1.0})])
    with pytest.raises(UsageError, match="mode is 'least'"):
        best_step(steps, "accuracy", "least")


HOUR = 3600.0


def test_steps_are_thinned_by_age() -> None:
    steps = [step(number, number * HOUR / 4) for number in range(400)]
    kept = KeepThinned((("1h", 0), ("1d", "1h"), ("3d", "1d"))).wanted(steps)
    days, hours, last_hour = {111, 207}, set(range(303, 395, 4)), set(range(395, 400))
    assert kept == days | hours | last_hour


@given(st.lists(st.integers(10, 19), min_size=2, max_size=120))
def test_repeated_thinning_keeps_old_steps(gaps: list[int]) -> None:
    """Deleting after each save must not remove all old steps."""
    rule = KeepThinned((("100s", 0), ("1000s", "100s"), ("1w", "1000s")))
    there: list[Step] = []
    moment = 0.0
    for number, gap in enumerate(gaps):
        moment += gap
        there.append(step(number, moment))
        gone = {found.number for found in unwanted(rule, there)}
        there = [found for found in there if found.number not in gone]
        assert there[-1].number == number
    ages = [moment - found.saved_at for found in there]
    passed = [sum(gaps[number + 1 :]) for number in range(len(gaps))]
    assert [age for age in ages if age <= 100] == [age for age in passed if age <= 100]
    assert ages[0] == passed[0]  # the first one is younger than a week
    middle = [age for age in ages if age <= 1000]
    assert all(older - younger <= 200 + 19 for older, younger in pairwise(middle))
    old = [age for age in ages if age > 1000]
    assert all(older - younger >= 1000 - 19 for older, younger in pairwise(old))


RIGHT = [600.0 * number for number in range(1, 9)]


@pytest.mark.parametrize(
    "saved_at",
    [
        [*RIGHT[:7], -1e9],
        *([*RIGHT[:at], RIGHT[at] + jump, *RIGHT[at + 1 :]] for at, jump in product((0, 3), (-1e9, 1e9))),
        *([*RIGHT[:at], *(moment + 1e9 for moment in RIGHT[at:])] for at in (4, 7)),
        [*RIGHT[:4], *(moment - 1e9 for moment in RIGHT[4:])],
    ],
)
def test_run_times_increase_whatever_the_clock_does(saved_at: list[float]) -> None:
    right = run_times([step(number, moment) for number, moment in enumerate(RIGHT)])
    assert right == [moment - RIGHT[0] for moment in RIGHT]
    assert run_times([step(number, moment) for number, moment in enumerate(saved_at)]) == right


def test_run_times_do_not_depend_on_which_steps_are_left_and_count_a_slower_pace_once_it_is_the_median() -> None:
    moments = [*RIGHT[:4], *(moment + 1e9 for moment in RIGHT[4:])]
    assert run_times([step(number, moments[number]) for number in (0, 2, 5, 6, 7)]) == [0, 1200, 3000, 3600, 4200]
    fast = [100.0 * number for number in range(4)]
    slow = [fast[-1] + 1000.0 * number for number in range(1, 7)]
    assert run_times([step(number, moment) for number, moment in enumerate(fast + slow)]) == fast + slow


def test_a_run_that_was_stopped_for_long_loses_no_steps() -> None:
    steps = [step(number, 600.0 * number + 1e7 * (number > 5)) for number in range(8)]
    assert unwanted(KeepThinned((("2h", 0),)), steps) == []
    # Two steps are too few for a usual pace.
    assert unwanted(KeepThinned((("1h", 0),)), [step(1, 0.0), step(2, 1e9)]) == []
    assert run_times([]) == run_times([step(5)]) == [0.0]


def test_a_clock_that_was_set_back_deletes_no_additional_steps() -> None:
    steps = [step(1, 1000.0), step(2, 2000.0), step(3, 3000.0), step(4, 500.0)]
    assert KeepThinned((("1h", "10min"),)).wanted(steps) == {1, 2, 3, 4}
    assert unwanted(KeepThinned((("1500s", 0),)), steps) == steps[:2]


def test_a_run_that_went_back_keeps_what_it_saves() -> None:
    there = [step(number) for number in (400, 500, 900, 1000)]
    left = []
    for number in (600, 700, 800, 1100):
        there = sorted([*there, step(number)], key=lambda found: found.number)
        gone = unwanted(KeepLast(2), there, protect=(number,))
        there = [found for found in there if found not in gone]
        left.append([found.number for found in there])
    assert left == [[500, 600, 900, 1000], [600, 700, 900, 1000], [700, 800, 900, 1000], [1000, 1100]]


def test_protected_steps_and_the_last_one_are_kept_whatever_the_rule() -> None:
    steps = [step(number) for number in range(1, 6)]
    assert [found.number for found in unwanted(KeepEvery(5), steps, protect=[2])] == [1, 3, 4]
    assert [found.number for found in unwanted(KeepEvery(5), steps, protect={7})] == [1, 2, 3, 4]
    assert [found.number for found in unwanted(KeepEvery(7), [step(7), step(8), step(9)])] == [8]
    assert unwanted(KeepEvery(7), []) == []


def test_arguments_make_one_rule() -> None:
    assert Retention().rule == KeepAll()
    rule = Retention(keep_last=2, keep_every=500, keep_best=KeepBest(1, "loss"), keep=KeepLast(1)).rule
    steps = [step(number, metrics={"loss": -float(number == 200)}) for number in range(100, 1100, 100)]
    assert rule.wanted(steps) == {200, 500, 900, 1000}


def test_invalid_rules_are_refused() -> None:
    for make in (
        *(partial(KeepLast, 0), partial(KeepLast, True), partial(KeepEvery, -1), partial(KeepBest, 0)),
        *(partial(KeepBest, 1, "loss", "least"), partial(EverySteps, 0), partial(EveryTime, "often")),
        *(partial(KeepThinned, (("2h", 0), ("1h", 0))), partial(KeepThinned, (("soon", 0),))),
    ):
        with case(make), pytest.raises(UsageError):
            make()


def test_every_steps_and_every_time() -> None:
    assert [number for number in range(35) if EverySteps(10).due(number)] == [10, 20, 30]
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
    assert first.received
    first.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_signals_are_for_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as thread, pytest.raises(UsageError):
        thread.submit(OnSignal).result()
