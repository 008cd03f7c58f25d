"""Interleaved rounds in one process: their order, the ratios within a round, and arms that cannot run."""

import math
from functools import partial
from unittest import mock

from documents import rounds
from tensorkeep_bench.results import CellRecord, Results
from tensorkeep_bench.run.runner import run_rounds
from tensorkeep_bench.workload import Outcome


def rounds_of(samples: dict[tuple[str, str], list[float]]) -> Results:
    found = [(arm, block, {measure: each}) for (arm, measure), of in samples.items() for block, each in enumerate(of)]
    return rounds(CellRecord(arm, block, "ok", figures=figures) for arm, block, figures in found)


def constant() -> Outcome:
    return Outcome(figures={"save": 1.0})


def test_every_arm_runs_once_in_each_round_in_a_random_order_that_depends_on_the_seed() -> None:
    calls: list[str] = []
    events: list[tuple[int, str]] = []

    def measure(arm: str) -> Outcome:
        calls.append(arm)
        return Outcome(figures={"save": float(len(calls))})

    arms = {arm: partial(measure, arm) for arm in "abc"}
    result = run_rounds(arms, 4, seed=1, progress=lambda done, arm: events.append((done, arm)))
    assert result.blocks == 4
    blocks = [[cell.arm for cell in result.cells if cell.block == block] for block in range(4)]
    assert all(sorted(arms) == ["a", "b", "c"] for arms in blocks)
    assert calls == [arm for arms in blocks for arm in arms]
    assert [cell.figures["save"] for cell in result.cells] == [float(n) for n in range(1, 13)]
    assert [cell.order for cell in result.cells] == list(range(12))
    # Progress is reported before each measurement.
    assert events == list(enumerate(calls))
    six = dict.fromkeys("abcdef", constant)
    one, same, other = ([cell.arm for cell in run_rounds(six, 5, seed=seed).cells] for seed in (7, 7, 8))
    assert one == same != other
    assert len({tuple(one[start : start + 6]) for start in range(0, 30, 6)}) > 1


def test_ratios_are_taken_within_rounds() -> None:
    # The machine slows down tenfold; b is twice as fast as a except in the second round.
    found = rounds_of({("a", "save"): [2.0, 9.0, 20.0], ("b", "save"): [1.0, 3.0, 10.0]})
    assert found.ratios(("a", "save"), ("b", "save")) == [2.0, 3.0, 2.0]
    assert found.figures("a", "save") == {0: 2.0, 1: 9.0, 2: 20.0}
    # Rounds without one of the two do not count.
    found = rounds_of({("a", "cold"): [2.0, 4.0], ("b", "cold"): [1.0]})
    assert [found.ratios(("a", "cold"), (arm, "cold")) for arm in ("b", "c")] == [[2.0], []]
    assert found.figures("c", "cold") == {}
    found = rounds_of({("torch", "load"): [3.0], ("tensorkeep", "into"): [1.0]})
    assert found.ratios(("torch", "load"), ("tensorkeep", "into")) == [3.0]


def test_arm_that_fails_is_left_out_with_its_reason() -> None:
    fails_later = mock.Mock(side_effect=[constant(), Outcome("not-run", "no such dtype")])
    result = run_rounds({"a": constant, "b": fails_later}, 4)
    assert (result.failures, fails_later.call_count) == ({"b": "no such dtype"}, 2)
    assert (len(result.figures("b", "save")), len(result.figures("a", "save"))) == (1, 4)
    assert [cell.status for cell in result.cells if cell.arm == "b"] == ["ok", "not-run", "not-run", "not-run"]


def test_no_round_starts_that_would_end_too_late() -> None:
    assert [run_rounds({"a": constant}, 3, seconds=seconds).blocks for seconds in (0.0, math.inf)] == [1, 3]
