"""Arms, and the changes of settings that make them: the parts that designs are made of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensorkeep.errors import UsageError

Settings = Mapping[str, Any]
Place = dict[str, Any]

MOST_ARMS = 256


@dataclass(frozen=True, slots=True)
class PlannedArm:
    """One arm: what is compared with the baseline.

    Attributes
    ----------
    name : str
    role : str
        ``"baseline"``, ``"control"`` (the A/A control: the baseline again under another name) or ``"arm"``.
    settings : dict
        The workload's own.
    about : str
        A sentence, or nothing.
    place : dict
        Where it stands in the design; see the reference of the results file.
    slow : bool
        Whether it runs on the smaller subject, if there is one.
    """

    name: str
    role: str
    settings: dict[str, Any]
    about: str = ""
    place: Place = field(default_factory=lambda: {"kind": "arm"})
    slow: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the arm as the results file has it."""
        return {
            "name": self.name,
            "role": self.role,
            "settings": dict(self.settings),
            "about": self.about,
            "places": list(places(self.place)),
            "slow": self.slow,
        }


@dataclass(frozen=True, slots=True)
class Base:
    """What the changes of a design are made to."""

    settings: Settings
    name: str = "base"
    about: str = ""
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """One change of settings.

    Attributes
    ----------
    name : str
    sets : mapping
        Settings that it gives or replaces.
    unsets : tuple of str
        Settings that it takes away, before those of ``sets`` are given.
    needs : tuple of str
        Changes without which this one makes no sense.
    about : str
    optional : bool
        Whether it is measured alone only and is no part of a stack.
    slow : bool or None
        What it makes of an arm: slow, no longer slow, or as it was.
    arm : str or None
        What its step is called; ``+NAME`` unless given.
    """

    name: str
    sets: Settings = field(default_factory=dict)
    unsets: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    about: str = ""
    optional: bool = False
    slow: bool | None = None
    arm: str | None = None


@dataclass(frozen=True, slots=True)
class Combination:
    """Some changes together."""

    changes: tuple[str, ...]
    name: str
    about: str = ""


@dataclass(slots=True)
class Expansion:
    """What a design comes to.

    Attributes
    ----------
    arms : list of PlannedArm
        All with the role ``"arm"``, the base first.
    omitted : list of dict
        ``place`` and ``reason`` of each arm that the design has a place for, but that makes no sense.
    factors : dict of str to list of str
        The labels of each factor's levels.
    aliases : list of list of list of str
        Groups of effects that cannot be told apart; an effect is the list of its factors.
    """

    arms: list[PlannedArm] = field(default_factory=list)
    omitted: list[dict[str, Any]] = field(default_factory=list)
    factors: dict[str, list[str]] = field(default_factory=dict)
    aliases: list[list[list[str]]] = field(default_factory=list)

    def add(self, name: str, base: Base, changes: Sequence[Change], place: Place, about: str = "") -> None:
        """Add the base with some changes, or record that an arm with these settings stands here, too."""
        settings, slow = dict(base.settings), base.slow
        for change in changes:
            settings = {key: value for key, value in settings.items() if key not in change.unsets} | dict(change.sets)
            slow = slow if change.slow is None else change.slow
        for arm in self.arms:
            if same(arm.settings, settings):
                arm.place.setdefault("also", []).append(place)
                return
        self.arms.append(PlannedArm(name, "arm", settings, about, place, slow))
        if len(self.arms) > MOST_ARMS:
            raise UsageError(f"the design comes to more than {MOST_ARMS} arms", remedy="take fewer changes or levels")

    def omit(self, place: Place, reason: str) -> None:
        """Record that an arm is left out."""
        self.omitted.append({"place": place, "reason": reason})


def same(a: Settings, b: Settings) -> bool:
    """Return whether two settings are equal; 1 and true are not."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def places(place: Place) -> Iterator[Place]:
    """Yield every place where an arm stands: its own, then those that it also fills."""
    yield {key: value for key, value in place.items() if key != "also"}
    yield from place.get("also", [])
