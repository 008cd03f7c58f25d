"""The techniques of a run: found by name, checked against each other and the machine, applied, proved, saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec

from tensorkeep.errors import MissingExtraError, UnsupportedError, UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Changed, Proof, Technique
from tensorkeep.train.techniques.machine import Machine

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run


MOST_WATCHED = 40
"""Steps after the last of which a technique must have been seen: no run may skip as many updates in a row."""


class Stack:
    """Techniques that are on together, in the order in which they are applied.

    Parameters
    ----------
    techniques : sequence of Technique
    """

    def __init__(self, techniques: Sequence[Technique] = ()) -> None:
        self.techniques = _in_order(techniques)
        _check_conflicts(self.techniques)
        self.proofs: dict[str, Proof] = {}
        self._watched = 0

    @classmethod
    def of(cls, settings: Mapping[str, Mapping[str, Any]]) -> Stack:
        """Return the stack of a configuration.

        Parameters
        ----------
        settings : mapping
            The settings of each technique, by its name.

        Raises
        ------
        UnsupportedError
            If there is no technique of a name; the remedy names the nearest one.
        UsageError
            If a setting is unknown or out of range, or two techniques conflict.
        """
        return cls([_build(name, given) for name, given in settings.items()])

    def check(self, machine: Machine) -> None:
        """Refuse what cannot run here.

        Raises
        ------
        UnsupportedError
            If a technique needs what this machine does not have.
        """
        for each in self.techniques:
            lack = each.lacks(machine)
            if lack is not None:
                kind = MissingExtraError if "pip install" in lack else UnsupportedError
                raise kind(f"{each.name} {lack}", remedy=f"leave {each.name} out, or use a machine that has it")

    def configure(self, config: Config) -> Config:
        """Return the configuration that the run is to have."""
        for each in self.techniques:
            config = each.configure(config)
        return config

    @contextmanager
    def process(self) -> Iterator[None]:
        """Hold, for the whole run, what techniques set for the process."""
        with ExitStack() as contexts:
            for each in self.techniques:
                contexts.enter_context(each.process())
            yield

    def apply(self, run: Run) -> None:
        """Turn all of them on."""
        for each in self.techniques:
            each.apply(run)

    @contextmanager
    def verified(self, run: Run) -> Iterator[None]:
        """Watch, in the step within, the techniques that have no proof yet, and keep what is found.

        That is the first step, and later ones for techniques that show in an update, until one is made.

        Raises
        ------
        TechniqueNotActiveError
            If a technique was not seen at work, or had nothing to show in `MOST_WATCHED` steps.
        """
        unproved = [each for each in self.techniques if each.name not in self.proofs]
        if not unproved:
            yield
            return
        if not self._watched:
            for each in unproved:
                each.rehearse(run)
        self._watched += 1
        with ExitStack() as contexts:
            found = {each.name: contexts.enter_context(each.verify(run)) for each in unproved}
            yield
        self.proofs.update((name, proof) for name, proof in found.items() if proof.seen)
        unseen = [each for each in unproved if each.name not in self.proofs]
        if unseen and self._watched >= MOST_WATCHED:
            raise unseen[0].not_active(
                f"none of {self._watched} steps showed it at work", "see why updates are skipped, or leave it out"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of the techniques that have something."""
        states = {each.name: each.state_dict() for each in self.techniques}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Take what `state_dict` gave."""
        for each in self.techniques:
            if each.name in states:
                each.load_state_dict(states[each.name])


def _build(name: str, given: Mapping[str, Any]) -> Technique:
    technique = TECHNIQUE_CLASSES.get(name)
    try:
        settings: Section = msgspec.convert(_with_lists(given, technique), technique.Settings, strict=False)
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", remedy=error.remedy) from error
    except msgspec.ValidationError as error:
        known = "; ".join(map(_described, msgspec.structs.fields(technique.Settings))) or "none"
        raise UsageError(f"the settings of {name} are not valid: {error}", remedy=f"its settings: {known}") from error
    return technique(settings)


def _described(field: msgspec.structs.FieldInfo) -> str:
    """Return the name of a setting, and what it may be if that is one of a few."""
    if get_origin(field.type) is not Literal:
        return field.name
    return f"{field.name} (one of {', '.join(map(str, get_args(field.type)))})"


def _with_lists(given: Mapping[str, Any], technique: type[Technique]) -> dict[str, Any]:
    """Return settings with texts for those that take several values, such as ``"16,32,64"``, divided at commas."""
    several = {each.name for each in msgspec.structs.fields(technique.Settings) if get_origin(each.type) is tuple}
    return {
        name: value.split(",") if name in several and isinstance(value, str) else value for name, value in given.items()
    }


def _in_order(techniques: Sequence[Technique]) -> list[Technique]:
    """Return techniques in the order of what they change, each after those that it wants before it, else by name."""
    order = get_args(Changed)
    waiting = sorted(techniques, key=lambda each: (order.index(each.changes), each.name))
    ordered: list[Technique] = []
    while waiting:
        names = {each.name for each in waiting}
        ready = next((each for each in waiting if not names & set(each.after) - {each.name}), None)
        if ready is None:
            raise UsageError(f"{', '.join(sorted(names))} each want to come after another", remedy="leave one out")
        waiting.remove(ready)
        ordered.append(ready)
    return ordered


def _check_conflicts(techniques: Sequence[Technique]) -> None:
    for first in techniques:
        for second in techniques:
            if second.name in first.conflicts:
                raise UsageError(
                    f"{first.name} and {second.name} cannot be combined: {first.conflicts[second.name]}",
                    remedy=f"leave {first.name} or {second.name} out",
                )
