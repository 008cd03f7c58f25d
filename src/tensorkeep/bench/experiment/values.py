"""The input of designs: a base and the changes to its settings."""

from typing import Annotated

import msgspec
from msgspec import Meta

from tensorkeep.bench.results import Settings

MOST_ARMS = 256

Text = Annotated[str, Meta(min_length=1)]


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The arm that the changes of a design are applied to.

    Attributes
    ----------
    settings : dict
        The workload's own.
    about : str
        One sentence, or empty.
    slow : bool
        Whether it works on the smaller model, if the experiment has one.
    """

    settings: Settings
    name: Text = "base"
    about: str = ""
    slow: bool = False


class NamedArm(Base, frozen=True, kw_only=True):
    """An arm of the design ``arms``; it needs a name."""

    name: Text


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sets": "set", "unsets": "unset"}):
    """One change of settings.

    Attributes
    ----------
    sets : dict
        Settings that are added or replaced.
    unsets : tuple of str
        Settings that are removed, before those of ``sets`` are added.
    needs : tuple of str
        Other changes without which this one has no effect.
    about : str
        One sentence, or empty.
    optional : bool
        Whether it is measured alone only, and left out of the stack of all changes.
    slow : bool or None
        Whether an arm with the change is slow; None leaves it as it is.
    arm : str or None
        Name of the arm of its step; ``+NAME`` unless given.
    """

    name: Text
    sets: Settings = {}
    unsets: tuple[Text, ...] = ()
    needs: tuple[Text, ...] = ()
    about: str = ""
    optional: bool = False
    slow: bool | None = None
    arm: Text | None = None


class Combination(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several changes together; the name is made of theirs unless given."""

    changes: tuple[Text, ...]
    name: Text | None = None
    about: str = ""


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"sets": "set", "unsets": "unset"}):
    """One level of a factor: a change whose name is the level's label."""

    sets: Settings = {}
    unsets: tuple[Text, ...] = ()
    slow: bool | None = None
