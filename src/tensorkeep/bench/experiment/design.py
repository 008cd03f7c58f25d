"""Designs: which arms an experiment has, and in which order they run.

A design turns a base and some changes into arms. Settings that come out equal are measured once: the arm that came
first also stands for the others, whose places it keeps under ``also`` (step 1 of a stack is the first change alone, the
last step is the full stack). What makes no sense, a change without one that it needs, is left out and listed with the
reason.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tensorkeep.bench.experiment.fractional import MOST_FACTORS, alias_groups, fraction
from tensorkeep.bench.experiment.values import Base, Change, Combination, Expansion
from tensorkeep.errors import UsageError

if TYPE_CHECKING:
    from tensorkeep.bench.experiment.experiment import Experiment

MOST_FACTORS_IN_FULL = 5
FULL = "all"
"""Name of the arm with all changes of a stack, where it is no step."""

_FEWEST_FACTORS_IN_PART = 6


def one_at_a_time(base: Base, changes: Sequence[Change]) -> Expansion:
    """Return the base, and each change alone."""
    found = _with_base(base)
    for change in changes:
        _add_alone(found, base, change)
    return found


def leave_one_out(base: Base, changes: Sequence[Change]) -> Expansion:
    """Return the base, the full stack, and the full stack without each change."""
    found = _with_base(base)
    stack = _stack(changes)
    found.add(FULL, base, stack, {"kind": "full"}, "All changes together.")
    for change in stack:
        _add_without(found, base, stack, change)
    return found


def steps(base: Base, changes: Sequence[Change]) -> Expansion:
    """Return the base, the way to the full stack one change at a time, each change alone, and each left out."""
    found = _with_base(base)
    stack = _stack(changes)
    for index, change in enumerate(stack, start=1):
        before = len(found.arms)
        place = {"kind": "step", "change": change.name, "index": index}
        found.add(change.arm or f"+{change.name}", base, stack[:index], place, change.about)
        if len(found.arms) == before:
            raise UsageError(
                f"step {change.name!r} has the settings of an earlier one",
                remedy="take it out, or mark it as optional, so that it is measured alone",
            )
    found.add(FULL, base, stack, {"kind": "full"})
    for change in changes:
        _add_alone(found, base, change)
    for change in stack:
        _add_without(found, base, stack, change)
    return found


def combinations(base: Base, changes: Sequence[Change], together: Sequence[Combination]) -> Expansion:
    """Return the base, each change that a combination is made of alone, and the combinations."""
    found = _with_base(base)
    by_name = {change.name: change for change in changes}
    used = {name for combination in together for name in combination.changes}
    for change in changes:
        if change.name in used:
            _add_alone(found, base, change)
    for combination in together:
        parts = [by_name[name] for name in combination.changes]
        missing = next(
            ((part.name, need) for part in parts for need in part.needs if need not in combination.changes), None
        )
        if missing is not None:
            raise UsageError(
                f"combination {combination.name!r} has {missing[0]!r} without {missing[1]!r}, which it needs",
                remedy=f"add {missing[1]!r} to its changes",
            )
        place = {"kind": "combination", "changes": list(combination.changes)}
        found.add(combination.name, base, parts, place, combination.about)
    return found


def factorial(base: Base, factors: Mapping[str, Sequence[Change]]) -> Expansion:
    """Return every combination of the levels of some factors; the first level of each is the base.

    Raises
    ------
    UsageError
        If there are more factors than five.
    """
    if len(factors) > MOST_FACTORS_IN_FULL:
        raise UsageError(
            f"a full factorial of {len(factors)} factors has too many arms: it takes up to {MOST_FACTORS_IN_FULL}",
            remedy='write "design": "fractional"',
        )
    return _points(base, factors, itertools.product(*(range(len(levels)) for levels in factors.values())))


def fractional(base: Base, factors: Mapping[str, Sequence[Change]]) -> Expansion:
    """Return a fraction of the combinations of two levels each, from which main effects can be told.

    Raises
    ------
    UsageError
        If there are fewer than 6 factors, more than 15, or one without exactly two levels.
    """
    if not _FEWEST_FACTORS_IN_PART <= len(factors) <= MOST_FACTORS:
        few = len(factors) < _FEWEST_FACTORS_IN_PART
        raise UsageError(
            f"a fractional design takes {_FEWEST_FACTORS_IN_PART} to {MOST_FACTORS} factors, not {len(factors)}",
            remedy='write "design": "factorial"' if few else "take fewer factors",
        )
    for name, levels in factors.items():
        if len(levels) != 2:
            raise UsageError(
                f"factor {name!r} has {len(levels)} levels; in a fractional design each has two",
                remedy="leave two levels, or make a full factorial of fewer factors",
            )
    found = _points(base, factors, fraction(len(factors)))
    found.aliases = alias_groups(list(factors))
    return found


def _points(base: Base, factors: Mapping[str, Sequence[Change]], points: Iterable[Sequence[int]]) -> Expansion:
    found = Expansion(factors={name: [level.name for level in levels] for name, levels in factors.items()})
    for number, point in enumerate(points):
        chosen = {name: factors[name][index] for name, index in zip(factors, point, strict=True)}
        moved = [f"{name}={level.name}" for name, level in chosen.items() if level is not factors[name][0]]
        place = {"kind": "point", "levels": {name: level.name for name, level in chosen.items()}}
        before = len(found.arms)
        name = "+".join(moved) if len(factors) <= MOST_FACTORS_IN_FULL else f"point {number}"
        found.add(name if moved else base.name, base, list(chosen.values()), place, "" if moved else base.about)
        if len(found.arms) == before:
            raise UsageError(
                f"the point {', '.join(moved)} has the settings of another one",
                remedy="give each level settings of its own",
            )
    return found


def _with_base(base: Base) -> Expansion:
    found = Expansion()
    found.add(base.name, base, [], {"kind": "base"}, base.about)
    return found


def _add_alone(found: Expansion, base: Base, change: Change) -> None:
    place = {"kind": "alone", "change": change.name}
    if change.needs:
        found.omit(place, f"it needs {' and '.join(change.needs)}")
    else:
        found.add(f"only {change.name}", base, [change], place, change.about)


def _add_without(found: Expansion, base: Base, stack: Sequence[Change], change: Change) -> None:
    place = {"kind": "without", "change": change.name}
    others = [other for other in stack if other is not change]
    needing = [other.name for other in others if change.name in other.needs]
    if needing:
        found.omit(place, f"{' and '.join(needing)} {'needs' if len(needing) == 1 else 'need'} it")
        return
    trial = Expansion()
    trial.add("", base, stack, {})
    trial.add("", base, others, {})
    if len(trial.arms) == 1:
        found.omit(place, "a later change replaces it: the full stack is the same without it")
    else:
        found.add(f"all but {change.name}", base, others, place, f"All changes but {change.name}.")


def _stack(changes: Sequence[Change]) -> list[Change]:
    """Return the changes of a stack, each after those that it needs."""
    stack = [change for change in changes if not change.optional]
    if not stack:
        raise UsageError("all changes are optional", remedy="leave at least one that is part of the stack")
    done: set[str] = set()
    for change in stack:
        missing = [need for need in change.needs if need not in done]
        if missing:
            raise UsageError(
                f"change {change.name!r} comes before {missing[0]!r}, which it needs",
                remedy=f"put {missing[0]!r} before it; what is optional is no part of the stack",
            )
        done.add(change.name)
    return stack


class Cell(NamedTuple):
    """One planned cell: the block, the place in the whole run (both from 0), and the arm's name."""

    block: int
    order: int
    arm: str


def schedule(experiment: Experiment) -> list[Cell]:
    """Return the order in which an experiment runs: randomised complete blocks, every arm once in each.

    A drift of the machine then meets all arms alike. The order of a block depends on the seed, its number and the arms
    only: an experiment that is run again with more blocks begins with the same ones.
    """
    cells: list[Cell] = []
    for block in range(experiment.runs):
        names = [arm.name for arm in experiment.arms]
        random.Random(f"{experiment.seed}:{block}").shuffle(names)
        cells += [Cell(block, len(cells) + place, name) for place, name in enumerate(names)]
    return cells
