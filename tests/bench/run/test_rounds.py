import math

from tensorkeep.bench.tune.rounds import NotRun, Ratio, Rounds, Sample, run_rounds


def recorded(samples: dict[tuple[str, str], list[float]]) -> Rounds:
    rounds = Rounds(seed=0)
    for (arm, measure), values in samples.items():
        rounds.samples += [Sample(index, arm, measure, value) for index, value in enumerate(values)]
    return rounds


def test_every_arm_runs_once_in_each_round():
    calls: list[str] = []

    def visit(arm: str):
        return lambda: calls.append(arm) or {"save": float(len(calls))}

    result = run_rounds({arm: visit(arm) for arm in "abc"}, 4, seed=1)
    assert len(result.order) == 4
    assert all(sorted(order) == ["a", "b", "c"] for order in result.order)
    assert calls == [arm for order in result.order for arm in order]
    assert [s.value for s in result.samples] == [float(n) for n in range(1, 13)]


def test_order_is_random_and_follows_from_the_seed():
    visits = {arm: lambda: {"save": 1.0} for arm in "abcdef"}
    one, same, other = (run_rounds(visits, 5, seed=seed).order for seed in (7, 7, 8))
    assert one == same
    assert one != other
    assert len({tuple(order) for order in one}) > 1


def test_ratio_is_taken_within_rounds():
    # The machine slows down tenfold; b is twice as fast as a all the time but in the second round.
    rounds = recorded({("a", "save"): [2.0, 9.0, 20.0], ("b", "save"): [1.0, 3.0, 10.0]})
    assert rounds.ratio(("a", "save"), ("b", "save")) == Ratio(2.0, 2.0, 3.0)
    assert rounds.median("a", "save") == 9.0


def test_rounds_that_lack_one_of_the_two_do_not_count():
    rounds = recorded({("a", "cold"): [2.0, 4.0], ("b", "cold"): [1.0]})
    assert rounds.ratio(("a", "cold"), ("b", "cold")) == Ratio(2.0, 2.0, 2.0)
    assert rounds.ratio(("a", "cold"), ("c", "cold")) is None
    assert rounds.median("c", "cold") is None


def test_ratio_of_two_measures():
    rounds = recorded({("torch", "load"): [3.0], ("tensorkeep", "into"): [1.0]})
    assert rounds.ratio(("torch", "load"), ("tensorkeep", "into")) == Ratio(3.0, 3.0, 3.0)


def test_an_arm_that_cannot_is_left_out_with_its_reason():
    calls = []

    def fails_later():
        calls.append(1)
        if len(calls) == 2:
            raise NotRun("no such dtype")
        return {"save": 1.0}

    result = run_rounds({"a": lambda: {"save": 1.0}, "b": fails_later}, 4)
    assert result.not_run == {"b": "no such dtype"}
    assert len(calls) == 2
    assert {s.arm for s in result.samples} == {"a"}
    assert len(result.samples) == 4


def test_no_round_begins_that_would_end_too_late():
    assert len(run_rounds({"a": lambda: {"save": 1.0}}, 3, seconds=0.0).order) == 1
    assert len(run_rounds({"a": lambda: {"save": 1.0}}, 3, seconds=math.inf).order) == 3


def test_progress_is_told_before_each_visit():
    told = []
    run_rounds({"a": dict, "b": dict}, 2, on_visit=lambda done, arm: told.append((done, arm)))
    assert [done for done, _ in told] == [0, 1, 2, 3]
    assert sorted(arm for _, arm in told) == ["a", "a", "b", "b"]
