"""Designs, and the order of the cells."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.bench.experiment.design import (
    Base,
    Change,
    Combination,
    Expansion,
    combinations,
    factorial,
    fractional,
    leave_one_out,
    one_at_a_time,
    steps,
)
from tensorkeep.bench.experiment.file import read
from tensorkeep.bench.experiment.fractional import alias_groups, fraction
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.results import Omitted, Place, Settings
from tensorkeep.bench.run.runner import schedule
from tensorkeep.errors import UsageError

BASE = Base(settings={"a": 0, "b": 0, "c": 0}, about="Nothing changed.")
A, B, C = Change("A", {"a": 1}, about="More a."), Change("B", {"b": 1}), Change("C", {"c": 1}, needs=("B",))


def settings_at(expansion: Expansion, place: Place) -> Settings:
    """Return the settings at a place of a design, which exactly one arm has."""
    [found] = [arm.settings for arm in expansion.arms if place in arm.places]
    return found


def experiment(count: int, runs: int, seed: int = 0, control: bool = True) -> Plan:
    arms = [{"name": f"arm {index}", "settings": {"index": index}} for index in range(count)]
    return read({"arms": arms, "runs": runs, "seed": seed, "control": control}, Path("mine.json"))


def test_one_at_a_time() -> None:
    found = one_at_a_time(BASE, [A, B, C])
    assert [(arm.name, arm.settings) for arm in found.arms] == [
        ("base", {"a": 0, "b": 0, "c": 0}),
        ("only A", {"a": 1, "b": 0, "c": 0}),
        ("only B", {"a": 0, "b": 1, "c": 0}),
    ]
    assert [arm.about for arm in found.arms] == ["Nothing changed.", "More a.", ""]
    assert found.omitted == [Omitted(Place("alone", "C"), "it needs B")]


def test_leave_one_out() -> None:
    found = leave_one_out(BASE, [A, B, C])
    assert settings_at(found, Place("base")) == {"a": 0, "b": 0, "c": 0}
    assert settings_at(found, Place("full")) == {"a": 1, "b": 1, "c": 1}
    assert settings_at(found, Place("without", "A")) == {"a": 0, "b": 1, "c": 1}
    assert settings_at(found, Place("without", "C")) == {"a": 1, "b": 1, "c": 0}
    assert found.omitted == [Omitted(Place("without", "B"), "C needs it")]


def test_steps_measure_equal_settings_once() -> None:
    found = steps(BASE, [A, B, C])
    assert [arm.name for arm in found.arms] == ["base", "+A", "+B", "+C", "only B", "all but A"]
    at = {arm.name: arm.places for arm in found.arms}
    assert at["+A"] == (Place("step", "A", 1), Place("alone", "A"))
    assert at["+B"] == (Place("step", "B", 2), Place("without", "C"))
    assert at["+C"] == (Place("step", "C", 3), Place("full"))
    assert settings_at(found, Place("alone", "B")) == {"a": 0, "b": 1, "c": 0}
    assert settings_at(found, Place("without", "A")) == {"a": 0, "b": 1, "c": 1}
    assert [omitted.place for omitted in found.omitted] == [Place("alone", "C"), Place("without", "B")]


def test_optional_change_is_measured_alone_and_is_not_in_the_stack() -> None:
    found = steps(BASE, [A, Change("X", {"a": 7}, optional=True), B])
    assert settings_at(found, Place("full")) == {"a": 1, "b": 1, "c": 0}
    assert settings_at(found, Place("alone", "X")) == {"a": 7, "b": 0, "c": 0}
    assert {place.kind for arm in found.arms for place in arm.places if place.change == "X"} == {"alone"}


def test_leaving_out_a_change_that_a_later_one_replaces_is_omitted() -> None:
    other = Change("other", {"tool": "other"}, ("a", "b", "c"))
    found = steps(BASE, [A, other])
    assert settings_at(found, Place("full")) == {"tool": "other"}
    reason = "a later change replaces it: the full stack is the same without it"
    assert found.omitted == [Omitted(Place("without", "A"), reason)]
    assert settings_at(found, Place("without", "other")) == {"a": 1, "b": 0, "c": 0}


def test_step_can_have_its_own_name() -> None:
    assert [arm.name for arm in steps(BASE, [A, Change("B", {"b": 1}, arm="mine")]).arms][:3] == ["base", "+A", "mine"]


def test_changes_make_arms_slow_or_not() -> None:
    base = Base(settings={"a": 0, "b": 0}, slow=True)
    found = steps(base, [A, Change("B", {"b": 1}, slow=False)])
    assert {arm.name: arm.slow for arm in found.arms} == {"base": True, "+A": True, "+B": False, "only B": False}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ([A, Change("again", {"a": 1})], "step 'again' has the settings of an earlier one"),
        ([C, B], "change 'C' comes before 'B', which it needs"),
        ([Change("B", {"b": 1}, optional=True), C], "change 'C' comes before 'B', which it needs"),
        ([Change("B", {"b": 1}, optional=True)], "all changes are optional"),
    ],
)
def test_invalid_stacks_are_refused(changes: list[Change], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        steps(BASE, changes)
    assert caught.value.remedy


def test_each_change_of_a_combination_is_also_measured_alone() -> None:
    unused = Change("unused", {"c": 9})
    found = combinations(BASE, [A, B, unused], [Combination(("A", "B"), "A + B")])
    assert [arm.name for arm in found.arms] == ["base", "only A", "only B", "A + B"]
    assert settings_at(found, Place("combination", changes=("A", "B"))) == {"a": 1, "b": 1, "c": 0}


def test_combination_without_a_needed_change_is_refused() -> None:
    with pytest.raises(UsageError, match="combination 'x' has 'C' without 'B', which it needs"):
        combinations(BASE, [A, B, C], [Combination(("A", "C"), "x")])
    found = combinations(BASE, [A, B, C], [Combination(("B", "C"), "x")])
    assert found.omitted == [Omitted(Place("alone", "C"), "it needs B")]


@given(st.lists(st.integers(2, 3), min_size=1, max_size=4))
def test_factorial_has_every_combination_once(sizes: list[int]) -> None:
    factors = {f"f{i}": [Change(f"{level}", {f"f{i}": level}) for level in range(n)] for i, n in enumerate(sizes)}
    found = factorial(Base(settings={}), factors)
    points = Counter(tuple(arm.settings[name] for name in factors) for arm in found.arms)
    assert points == Counter(itertools.product(*(range(n) for n in sizes)))
    assert found.arms[0].name == "base"
    assert len({arm.name for arm in found.arms}) == len(found.arms)
    for arm in found.arms:
        assert arm.places == (Place("point", levels={name: str(arm.settings[name]) for name in factors}),)


def two_levels(count: int) -> dict[str, list[Change]]:
    return {f"f{i}": [Change("low", {f"f{i}": 0}), Change("high", {f"f{i}": 1})] for i in range(count)}


def test_points_are_named_by_their_difference_from_the_base() -> None:
    names = [arm.name for arm in factorial(BASE, two_levels(2)).arms]
    assert names == ["base", "f1=high", "f0=high", "f0=high+f1=high"]


def test_six_factors_are_too_many_for_a_full_factorial() -> None:
    assert len(factorial(BASE, two_levels(5)).arms) == 32
    with pytest.raises(UsageError, match="a full factorial takes up to 5 factors, not 6") as caught:
        factorial(BASE, two_levels(6))
    assert caught.value.remedy == 'write "design": "fractional"'


def test_levels_with_equal_settings_are_refused() -> None:
    factors = {"f": [Change("one", {"a": 1}), Change("uno", {"a": 1})]}
    with pytest.raises(UsageError, match="the point f=uno has the settings of another one"):
        factorial(BASE, factors)


def test_design_with_too_many_arms_is_refused() -> None:
    factors = {f"f{i}": [Change(str(level), {f"f{i}": level}) for level in range(1000)] for i in range(5)}
    with pytest.raises(UsageError, match="more than 256 arms"):
        factorial(BASE, factors)


@pytest.mark.parametrize("count", range(6, 16))
def test_fractions_are_balanced_and_orthogonal(count: int) -> None:
    points = fraction(count)
    assert len(points) == (16 if count <= 8 else 32)
    assert len(set(points)) == len(points)
    assert points[0] == (0,) * count
    signs = [[2 * level - 1 for level in column] for column in zip(*points, strict=True)]
    products = {
        pair: [x * y for x, y in zip(*pair, strict=True)] for pair in itertools.combinations(map(tuple, signs), 2)
    }
    for column in signs:
        assert sum(column) == 0
    for product in products.values():
        assert sum(product) == 0, "two main effects are aliased"
    for column, product in itertools.product(signs, products.values()):
        inner = sum(x * y for x, y in zip(column, product, strict=True))
        assert inner == 0, "a main effect is aliased with an interaction of two: the resolution is below IV"


@pytest.mark.parametrize("count", range(6, 16))
def test_aliases_are_exactly_the_effects_whose_columns_agree(count: int) -> None:
    """The test multiplies the columns of the points; the code combines the bits of the generators."""
    names = [f"f{index}" for index in range(count)]
    signs = {
        name: [2 * level - 1 for level in column]
        for name, column in zip(names, zip(*fraction(count), strict=True), strict=True)
    }
    columns = {(name,): tuple(signs[name]) for name in names}
    for one, two in itertools.combinations(names, 2):
        columns[one, two] = tuple(x * y for x, y in zip(signs[one], signs[two], strict=True))
    # A sign does not separate effects.
    groups: dict[tuple[int, ...], set[tuple[str, ...]]] = {}
    for effect, column in columns.items():
        groups.setdefault(max(column, tuple(-x for x in column)), set()).add(effect)
    expected = {frozenset(group) for group in groups.values() if len(group) > 1}
    assert {frozenset(group) for group in alias_groups(names)} == expected
    assert expected, "so few runs cannot separate all interactions"


def test_a_fractional_experiment_lists_its_aliases() -> None:
    found = fractional(BASE, two_levels(6))
    assert len(found.arms) == 16
    assert [arm.name for arm in found.arms][:2] == ["base", "point 1"]
    # E = ABC, F = BCD: the interaction of A and B is that of C and E, and so on.
    assert (("f0", "f1"), ("f2", "f4")) in found.aliases
    assert all(len(effect) == 2 for group in found.aliases for effect in group)
    assert found.factors["f3"] == ("low", "high")


def test_fractional_design_refuses_other_numbers_of_factors_and_levels() -> None:
    with pytest.raises(UsageError, match="takes 6 to 15 factors, not 5") as caught:
        fractional(BASE, two_levels(5))
    assert caught.value.remedy == 'write "design": "factorial"'
    with pytest.raises(UsageError, match="takes 6 to 15 factors, not 16"):
        fractional(BASE, two_levels(16))
    three = {**two_levels(5), "f5": [Change(str(level), {"f5": level}) for level in range(3)]}
    with pytest.raises(UsageError, match="factor 'f5' has 3 levels; in a fractional design each has two"):
        fractional(BASE, three)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**32), st.booleans())
def test_every_arm_runs_once_in_every_block(count: int, runs: int, seed: int, control: bool) -> None:
    planned = experiment(count, runs, seed, control)
    cells = schedule(planned)
    names = sorted(arm.name for arm in planned.arms)
    assert len(names) == count + control
    assert [cell.order for cell in cells] == list(range(runs * len(names)))
    assert [cell.block for cell in cells] == sorted(cell.block for cell in cells)
    for block in range(runs):
        assert sorted(cell.arm for cell in cells if cell.block == block) == names
    assert schedule(planned) == cells


def test_order_is_random_and_depends_on_the_seed() -> None:
    def orders(seed: int, runs: int = 20) -> list[tuple[str, ...]]:
        cells = schedule(experiment(5, runs, seed))
        return [tuple(cell.arm for cell in cells if cell.block == block) for block in range(runs)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert len(set(orders(1))) > 15
    # Every arm comes first somewhere: no place in a block belongs to one arm.
    assert {order[0] for order in orders(1, runs=60)} == {arm.name for arm in experiment(5, 1).arms}


def test_more_runs_begin_with_the_same_blocks() -> None:
    planned = experiment(6, 3)
    assert schedule(planned.with_design(runs=5))[: 3 * 7] == schedule(planned)
