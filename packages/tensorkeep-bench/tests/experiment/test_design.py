"""Designs, and the order of the cells."""

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep_bench import design
from tensorkeep_bench.design import Base, Change, Combination, alias_groups, fraction
from tensorkeep_bench.experiment import ExperimentPlan, read_design
from tensorkeep_bench.results import Omitted, Place
from tensorkeep_bench.run.runner import schedule

BASE = Base(settings={"a": 0, "b": 0, "c": 0}, about="Nothing changed.")
A, B, C = Change("A", {"a": 1}, about="More a."), Change("B", {"b": 1}), Change("C", {"c": 1}, needs=("B",))


def settings_at(expansion: design.Expansion, *place: str) -> tuple[Any, ...]:
    """Return the values of the settings at a place of a design, which exactly one arm has."""
    [found] = [arm.settings for arm in expansion.arms if Place(*place) in arm.places]
    return tuple(found.values())


def experiment(count: int, runs: int, seed: int = 0, control: bool = True) -> ExperimentPlan:
    arms = [{"name": f"arm {index}", "settings": {"index": index}} for index in range(count)]
    return read_design({"arms": arms, "runs": runs, "seed": seed, "control": control}, Path("mine.json"))


def test_one_at_a_time_and_leave_one_out() -> None:
    found = design.with_changes("one-at-a-time", BASE, [A, B, C])
    expected = {"base": (0, 0, 0), "only A": (1, 0, 0), "only B": (0, 1, 0)}
    assert {arm.name: tuple(arm.settings[key] for key in "abc") for arm in found.arms} == expected
    assert [arm.about for arm in found.arms] == ["Nothing changed.", "More a.", ""]
    assert found.omitted == [Omitted(Place("alone", "C"), "it needs B")]
    found = design.with_changes("leave-one-out", BASE, [A, B, C])
    expected = {("base",): (0, 0, 0), ("full",): (1, 1, 1), ("without", "A"): (0, 1, 1), ("without", "C"): (1, 1, 0)}
    assert {place: settings_at(found, *place) for place in expected} == expected
    assert found.omitted == [Omitted(Place("without", "B"), "C needs it")]


def test_steps_measure_equal_settings_once() -> None:
    found = design.with_changes("steps", BASE, [A, B, C])
    assert [arm.name for arm in found.arms] == ["base", "+A", "+B", "+C", "only B", "all but A"]
    assert {arm.name: arm.places for arm in found.arms if arm.name.startswith("+")} == {
        "+A": (Place("step", "A", 1), Place("alone", "A")),
        "+B": (Place("step", "B", 2), Place("without", "C")),
        "+C": (Place("step", "C", 3), Place("full")),
    }
    assert (settings_at(found, "alone", "B"), settings_at(found, "without", "A")) == ((0, 1, 0), (0, 1, 1))
    assert [omitted.place for omitted in found.omitted] == [Place("alone", "C"), Place("without", "B")]


def test_optional_change_is_measured_alone_and_leaving_out_a_replaced_one_is_omitted() -> None:
    found = design.with_changes("steps", BASE, [A, Change("X", {"a": 7}, optional=True), B])
    assert (settings_at(found, "full"), settings_at(found, "alone", "X")) == ((1, 1, 0), (7, 0, 0))
    assert {place.kind for arm in found.arms for place in arm.places if place.change == "X"} == {"alone"}
    # Leaving out a change that a later one replaces is omitted.
    other = Change("other", {"tool": "other"}, ("a", "b", "c"))
    found = design.with_changes("steps", BASE, [A, other])
    assert (settings_at(found, "full"), settings_at(found, "without", "other")) == (("other",), (1, 0, 0))
    reason = "a later change replaces it: the full stack is the same without it"
    assert found.omitted == [Omitted(Place("without", "A"), reason)]


def test_changes_make_arms_slow_or_not_and_name_steps() -> None:
    found = design.with_changes("steps", BASE, [A, Change("B", {"b": 1}, arm="mine")])
    assert [arm.name for arm in found.arms][:3] == ["base", "+A", "mine"]
    base = Base(settings={"a": 0, "b": 0}, slow=True)
    found = design.with_changes("steps", base, [A, Change("B", {"b": 1}, slow=False)])
    assert {arm.name: arm.slow for arm in found.arms} == {"base": True, "+A": True, "+B": False, "only B": False}


def test_each_change_of_a_combination_is_also_measured_alone_and_has_what_it_needs() -> None:
    unused = Change("unused", {"c": 9})
    found = design.combinations(BASE, [A, B, unused], [Combination(("A", "B"), "A + B")])
    assert [arm.name for arm in found.arms] == ["base", "only A", "only B", "A + B"]
    assert found.arms[-1].places == (Place("combination", changes=("A", "B")),)
    assert found.arms[-1].settings == {"a": 1, "b": 1, "c": 0}
    found = design.combinations(BASE, [A, B, C], [Combination(("B", "C"), "x")])
    assert found.omitted == [Omitted(Place("alone", "C"), "it needs B")]


@given(st.lists(st.integers(2, 3), min_size=1, max_size=4))
def test_factorial_has_every_combination_once(sizes: list[int]) -> None:
    factors = {f"f{i}": [Change(f"{level}", {f"f{i}": level}) for level in range(n)] for i, n in enumerate(sizes)}
    found = design.factorial(Base(settings={}), factors)
    points = Counter(tuple(arm.settings[name] for name in factors) for arm in found.arms)
    assert points == Counter(itertools.product(*(range(n) for n in sizes)))
    assert found.arms[0].name == "base"
    assert len({arm.name for arm in found.arms}) == len(found.arms)
    for arm in found.arms:
        assert arm.places == (Place("point", levels={name: str(arm.settings[name]) for name in factors}),)


def two_levels(count: int) -> dict[str, list[Change]]:
    return {f"f{i}": [Change("low", {f"f{i}": 0}), Change("high", {f"f{i}": 1})] for i in range(count)}


def test_points_are_named_by_their_difference_from_the_base_or_a_number() -> None:
    names = [arm.name for arm in design.factorial(BASE, two_levels(2)).arms]
    assert names == ["base", "f1=high", "f0=high", "f0=high+f1=high"]
    assert len(design.factorial(BASE, two_levels(5)).arms) == 32
    # Those of a fraction have numbers; it lists its aliases.
    found = design.fractional(BASE, two_levels(6))
    assert (len(found.arms), [arm.name for arm in found.arms][:2]) == (16, ["base", "point 1"])
    # E = ABC, F = BCD: the interaction of A and B is that of C and E, and so on.
    assert (("f0", "f1"), ("f2", "f4")) in found.aliases
    assert all(len(effect) == 2 for group in found.aliases for effect in group)
    assert found.factors["f3"] == ("low", "high")


def product(one: Sequence[int], two: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(operator.mul, one, two))


@pytest.mark.parametrize("count", range(6, 16))
def test_fractions_are_balanced_and_orthogonal_and_list_their_aliases(count: int) -> None:
    points = fraction(count)
    assert len(points) == len(set(points)) == (16 if count <= 8 else 32)
    assert points[0] == (0,) * count
    signs = [tuple(2 * level - 1 for level in column) for column in zip(*points, strict=True)]  # by factor: -1 or 1
    products = [product(*pair) for pair in itertools.combinations(signs, 2)]
    assert not any(map(sum, signs))
    assert not any(map(sum, products)), "two main effects are aliased"
    for pair in itertools.product(signs, products):
        assert sum(product(*pair)) == 0, "a main effect is aliased with an interaction of two: below resolution IV"
    # Aliases are the effects whose columns agree: the code combines the bits of the generators instead.
    names = [f"f{index}" for index in range(count)]
    columns = {(name,): column for name, column in zip(names, signs, strict=True)}
    columns |= dict(zip(itertools.combinations(names, 2), products, strict=True))
    # A sign does not separate effects.
    groups: dict[tuple[int, ...], set[tuple[str, ...]]] = {}
    for effect, column in columns.items():
        groups.setdefault(max(column, tuple(-x for x in column)), set()).add(effect)
    expected = {frozenset(group) for group in groups.values() if len(group) > 1}
    assert {frozenset(group) for group in alias_groups(names)} == expected
    assert expected, "so few runs cannot separate all interactions"


@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2**32), st.booleans())
def test_every_arm_runs_once_in_every_block(count: int, runs: int, seed: int, control: bool) -> None:
    planned = experiment(count, runs, seed, control)
    cells = schedule(planned.experiment, planned.arms)
    names = sorted(arm.name for arm in planned.arms)
    assert len(names) == count + control
    assert [cell.order for cell in cells] == list(range(runs * len(names)))
    assert [cell.block for cell in cells] == sorted(cell.block for cell in cells)
    for block in range(runs):
        assert sorted(cell.arm for cell in cells if cell.block == block) == names
    assert schedule(planned.experiment, planned.arms) == cells
    # More runs begin with the same blocks.
    more = planned.with_design(runs=runs + 1)
    assert schedule(more.experiment, more.arms)[: len(cells)] == cells


def test_order_is_random_and_depends_on_the_seed() -> None:
    def orders(seed: int, runs: int = 20) -> list[tuple[str, ...]]:
        drawn = experiment(5, runs, seed)
        cells = schedule(drawn.experiment, drawn.arms)
        return [tuple(cell.arm for cell in cells if cell.block == block) for block in range(runs)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert len(set(orders(1))) > 15
    # Every arm comes first somewhere: no place in a block belongs to one arm.
    assert {order[0] for order in orders(1, runs=60)} == {arm.name for arm in experiment(5, 1).arms}
