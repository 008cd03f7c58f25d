"""Designs: turn a base and changes of its settings into the arms of an experiment."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from tensorkeep.errors import UsageError
from tensorkeep_bench.results import Arm, Omitted, Place, Settings

MOST_ARMS = 256
MOST_FACTORS_IN_FULL = 5
FEWEST_FACTORS_IN_FRACTION, MOST_FACTORS = 6, 15
FULL = "all"  # name of the arm with all changes of a stack, unless it is also a step

Text = Annotated[str, Meta(min_length=1)]

# Generators of the fractional designs. Up to 10 factors, they have minimum aberration (Montgomery, *Design and Analysis
# of Experiments*, table of 2^(k-p) designs). For more factors, words of odd length give resolution IV by themselves.
_ODD_WORDS = "ABC BCD CDE ACD ADE BDE ABD ABE ACE BCE"
_GENERATORS = {
    6: "ABC BCD",
    7: "ABC BCD ACD",
    8: "BCD ACD ABC ABD",
    9: "BCDE ACDE ABDE ABCE",
    10: "ABCD ABCE ABDE ACDE BCDE",
}


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arm that the changes of a design are applied to."""

    settings: Settings  # the workload's own
    name: Text = "base"
    about: str = ""  # one sentence, or empty
    slow: bool = False  # whether it works on the smaller model, if the experiment has one


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sets": "set", "unsets": "unset"}):
    name: Text
    sets: Settings = {}  # settings that are added or replaced
    unsets: tuple[Text, ...] = ()  # settings that are removed first
    needs: tuple[Text, ...] = ()  # other changes without which this one has no effect
    about: str = ""  # one sentence, or empty
    optional: bool = False  # whether it is measured alone only, and left out of the stack of all changes
    slow: bool | None = None  # whether an arm with the change is slow; None leaves it as it is
    arm: Text | None = None  # the name of the arm of its step; ``+NAME`` unless given


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sets": "set", "unsets": "unset"}):
    """One level of a factor: a change that is named by its label."""

    sets: Settings = {}
    unsets: tuple[Text, ...] = ()
    slow: bool | None = None


class Combination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    changes: tuple[Text, ...]
    # None joins the names of the changes.
    name: Text | None = None
    about: str = ""


@dataclass(slots=True)
class Expansion:
    """The arms of a design, all with the role ``"arm"``, the base first."""

    arms: list[Arm] = field(default_factory=list)
    omitted: list[Omitted] = field(default_factory=list)  # places of the design without an arm
    factors: dict[str, tuple[str, ...]] = field(default_factory=dict)  # factor -> labels of its levels
    aliases: tuple[tuple[tuple[str, ...], ...], ...] = ()  # groups of effects that cannot be separated

    def add(self, name: str, base: Base, changes: Sequence[Change], place: Place, about: str = "") -> bool:
        """Add an arm; return False if an earlier arm with the same settings takes the place instead."""
        settings, slow = _apply(base, changes)
        for index, arm in enumerate(self.arms):
            # Equal settings are measured once: step 1 of a stack is also its first change alone.
            if equal(arm.settings, settings):
                self.arms[index] = msgspec.structs.replace(arm, places=(*arm.places, place))
                return False
        self.arms.append(Arm(name, "arm", settings, about, (place,), slow))
        if len(self.arms) > MOST_ARMS:
            raise UsageError(f"the design has more than {MOST_ARMS} arms", remedy="use fewer changes or levels")
        return True


# The places of each design, in the order of the arms. The base comes first in all of them.
_PLACES = {
    "one-at-a-time": ("alone",),
    "leave-one-out": ("full", "without"),
    "steps": ("step", "full", "alone", "without"),
}


def with_changes(design: str, base: Base, changes: Sequence[Change]) -> Expansion:
    """Return the arms of the design ``one-at-a-time``, ``leave-one-out`` or ``steps``."""
    found, places = _with_base(base), _PLACES[design]
    stack = _stack(changes) if "full" in places else []
    for index, change in enumerate(stack if "step" in places else (), start=1):
        place = Place("step", change.name, index)
        if not found.add(change.arm or f"+{change.name}", base, stack[:index], place, change.about):
            # Two steps would share one arm, so the gain of the second could not be measured.
            remedy = "remove it, or mark it as optional, so that it is measured alone"
            raise UsageError(f"step {change.name!r} has the settings of an earlier one", remedy=remedy)
    if "full" in places:
        # After steps, no arm is added: the last step has these settings and gets this place.
        found.add(FULL, base, stack, Place("full"), "All changes together.")
    if "alone" in places:
        _add_alone(found, base, changes)
    _add_without(found, base, stack)
    return found


def combinations(base: Base, changes: Sequence[Change], combined: Sequence[Combination]) -> Expansion:
    found = _with_base(base)
    by_name = {change.name: change for change in changes}
    used = {name for combination in combined for name in combination.changes}
    _add_alone(found, base, [change for change in changes if change.name in used])
    for combination in combined:
        members = [by_name[name] for name in combination.changes]
        name = combination.name or " + ".join(combination.changes)
        for change in members:
            need = next((need for need in change.needs if need not in combination.changes), None)
            if need is not None:
                message = f"combination {name!r} has {change.name!r} without {need!r}, which it needs"
                raise UsageError(message, remedy=f"add {need!r} to its changes")
        about = " ".join(filter(None, (combination.about, f"Its members: {', '.join(combination.changes)}.")))
        found.add(name, base, members, Place("combination", changes=combination.changes), about)
    return found


def factorial(base: Base, factors: Mapping[str, Sequence[Change]]) -> Expansion:
    """Return every combination of the levels of up to five factors; the first levels are the base's."""
    if len(factors) > MOST_FACTORS_IN_FULL:
        message = f"a full factorial takes up to {MOST_FACTORS_IN_FULL} factors, not {len(factors)}"
        raise UsageError(message, remedy='write "design": "fractional"')
    return _points(base, factors, itertools.product(*(range(len(levels)) for levels in factors.values())))


def fractional(base: Base, factors: Mapping[str, Sequence[Change]]) -> Expansion:
    """Return a fraction of the combinations of 6 to 15 two-level factors, enough to estimate main effects."""
    count, fewest = len(factors), FEWEST_FACTORS_IN_FRACTION
    if not fewest <= count <= MOST_FACTORS:
        remedy = 'write "design": "factorial"' if count < fewest else "use fewer factors"
        message = f"a fractional design takes {fewest} to {MOST_FACTORS} factors, not {count}"
        raise UsageError(message, remedy=remedy)
    for name, levels in factors.items():
        if len(levels) != 2:
            message = f"factor {name!r} has {len(levels)} levels; in a fractional design each has two"
            raise UsageError(message, remedy="keep two levels, or use a full factorial of fewer factors")
    found = _points(base, factors, fraction(len(factors)))
    found.aliases = alias_groups(list(factors))
    return found


def _points(base: Base, factors: Mapping[str, Sequence[Change]], points: Iterable[Sequence[int]]) -> Expansion:
    found = Expansion(factors={name: tuple(level.name for level in levels) for name, levels in factors.items()})
    for number, point in enumerate(points):
        chosen = {name: factors[name][index] for name, index in zip(factors, point, strict=True)}
        moved = [f"{name}={level.name}" for name, level in chosen.items() if level is not factors[name][0]]
        place = Place("point", levels={name: level.name for name, level in chosen.items()})
        # The joined levels of many factors would be too long for a name.
        name = "+".join(moved) if len(factors) <= MOST_FACTORS_IN_FULL else f"point {number}"
        about = "" if moved else base.about
        if not found.add(name if moved else base.name, base, list(chosen.values()), place, about):
            message = f"the point {', '.join(moved)} has the settings of another one"
            raise UsageError(message, remedy="give each level other settings")
    return found


def _with_base(base: Base) -> Expansion:
    found = Expansion()
    found.add(base.name, base, [], Place("base"), base.about)
    return found


def _add_alone(found: Expansion, base: Base, changes: Sequence[Change]) -> None:
    for change in changes:
        place = Place("alone", change.name)
        # Alone it would have no effect, and its gain of 1 would look like a result.
        if change.needs:
            found.omitted.append(Omitted(place, f"it needs {' and '.join(change.needs)}"))
        else:
            found.add(f"only {change.name}", base, [change], place, change.about)


def _add_without(found: Expansion, base: Base, stack: Sequence[Change]) -> None:
    for change in stack:
        place = Place("without", change.name)
        others = [other for other in stack if other is not change]
        # Without this change, the changes that need it would be left out as well: the arm would lack several.
        needing = [other.name for other in others if change.name in other.needs]
        if needing:
            need = "needs" if len(needing) == 1 else "need"
            found.omitted.append(Omitted(place, f"{' and '.join(needing)} {need} it"))
        # The arm would repeat the full stack, and its difference would be noise.
        elif equal(_apply(base, stack)[0], _apply(base, others)[0]):
            reason = "a later change replaces it: the full stack is the same without it"
            found.omitted.append(Omitted(place, reason))
        else:
            found.add(f"all but {change.name}", base, others, place, f"All changes but {change.name}.")


def _apply(base: Base, changes: Sequence[Change]) -> tuple[Settings, bool]:
    settings, slow = dict(base.settings), base.slow
    for change in changes:
        # Unset before set, so that one change can replace a group of settings by another.
        settings = {key: value for key, value in settings.items() if key not in change.unsets} | change.sets
        slow = slow if change.slow is None else change.slow
    return settings, slow


def _stack(changes: Sequence[Change]) -> list[Change]:
    """Return the changes that are not optional; UsageError if one comes before a change that it needs."""
    stack = [change for change in changes if not change.optional]
    if not stack:
        raise UsageError("all changes are optional", remedy="leave at least one that is in the stack")
    before: set[str] = set()
    for change in stack:
        missing = next((need for need in change.needs if need not in before), None)
        if missing is not None:
            remedy = f"put {missing!r} before it; optional changes are not in the stack"
            raise UsageError(f"change {change.name!r} comes before {missing!r}, which it needs", remedy=remedy)
        before.add(change.name)
    return stack


def equal(a: Settings, b: Settings) -> bool:
    # Compared as JSON, because in Python True == 1 and 1 == 1.0.
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def columns(factors: int) -> list[int]:
    """Return the generators of 6 to 15 factors, as bit sets of the basic factors (the first four or five)."""
    # All designs have resolution IV: a main effect is never aliased with a main effect or an interaction of two
    # factors, but interactions of two factors are aliased with each other.
    basic = 4 if factors <= 8 else 5
    words = _GENERATORS.get(factors, _ODD_WORDS).split()[: factors - basic]
    return [1 << place for place in range(basic)] + [
        sum(1 << "ABCDE".index(letter) for letter in word) for word in words
    ]


def fraction(factors: int) -> list[tuple[int, ...]]:
    """Return the 16 points (up to 8 factors) or 32 points of the design: a level, 0 or 1, for each factor."""
    bits = columns(factors)
    points = 1 << (4 if factors <= 8 else 5)
    # The basic factors take every combination of their levels; any other factor takes the parity of the basic factors
    # in its generator.
    return [tuple((point & column).bit_count() & 1 for column in bits) for point in range(points)]


def alias_groups(names: Sequence[str]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the groups of effects, of one factor or of two, that the design for these factors cannot separate."""
    bits = dict(zip(names, columns(len(names)), strict=True))
    groups: dict[int, list[tuple[str, ...]]] = {}
    # The column of an interaction is the exclusive or of its factors' columns; effects with equal columns are aliased.
    for effect in [*((name,) for name in names), *itertools.combinations(names, 2)]:
        column = 0
        for name in effect:
            column ^= bits[name]
        groups.setdefault(column, []).append(effect)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
