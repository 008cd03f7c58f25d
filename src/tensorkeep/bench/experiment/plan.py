"""A plan: an experiment and its arms, with their roles, ready to be run."""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from tensorkeep.bench.experiment.design import MOST_ARMS
from tensorkeep.bench.experiment.workload import get_workload
from tensorkeep.bench.results import Arm, Experiment, Limits, Place
from tensorkeep.errors import UsageError, did_you_mean

MOST_RUNS = 1000

_LONGEST_NAME = 80
NAME_RULE = f"a name has up to {_LONGEST_NAME} printable characters without '/' and does not begin with '-' or '.'"


class Plan(msgspec.Struct, frozen=True):
    """An experiment and its arms."""

    experiment: Experiment
    arms: tuple[Arm, ...]  # the baseline first, then the A/A control if there is one
    notes: tuple[str, ...] = ()  # remarks for the user, to be shown before the run

    def with_design(
        self,
        *,
        runs: int | None = None,
        seed: int | None = None,
        limits: Limits | None = None,
        budget: int | None = None,
    ) -> "Plan":
        """Return the plan with another number of blocks, order, limits of a cell, or budget; None keeps each.

        Raises UsageError if the number of blocks is out of range.
        """
        if runs is not None and not 1 <= runs <= MOST_RUNS:
            raise UsageError(f"an experiment runs 1 to {MOST_RUNS} times, not {runs}", remedy="give, for example, 5")
        given = {"runs": runs, "seed": seed, "limits": limits, "budget": budget}
        changed = {name: value for name, value in given.items() if value is not None}
        return replace(self, experiment=replace(self.experiment, **changed))

    def with_settings(self, **settings: Any) -> "Plan":
        """Return the plan with some of the workload's settings replaced.

        Raises UsageError if a setting is unknown or invalid.
        """
        workload = get_workload(self.experiment.workload)
        checked = workload.parse_settings({**self.experiment.settings, **settings})
        return replace(self, experiment=replace(self.experiment, settings=msgspec.to_builtins(checked)))

    def only(self, names: Collection[str]) -> "Plan":
        """Return the plan with some of its arms, compared one by one; the baseline and its control are kept.

        Raises UsageError if an arm does not exist.
        """
        known = [arm.name for arm in self.arms]
        for name in names:
            if name not in known:
                message = f"experiment {self.experiment.name!r} has no arm {name!r}"
                raise UsageError(message, remedy=did_you_mean(name, known, "its arms"))
        kept = tuple(arm for arm in self.arms if arm.name in names or arm.role != "arm")
        if len(kept) == len(self.arms):
            return self
        # A part of a design is not that design: its steps and effects would compare other changes.
        plain = tuple(arm if arm.role == "control" else replace(arm, places=(Place("arm"),)) for arm in kept)
        return replace(
            self, experiment=replace(self.experiment, design="arms", omitted=(), factors={}, aliases=()), arms=plain
        )


def make_plan(experiment: Experiment, arms: Sequence[Arm], path: str, notes: tuple[str, ...] = ()) -> Plan:
    """Return a plan of an experiment: the arms get their roles, and the baseline its A/A control if it is wanted.

    Raises UsageError if a name is not valid or not unique, there are too many arms, or the baseline is not an arm.
    """
    names = [arm.name for arm in arms]
    if len(names) > MOST_ARMS:
        raise UsageError(f"has {len(names)} arms, more than {MOST_ARMS}", path=path, remedy="use fewer")
    for place, name in enumerate(names):
        check_name(name, "arm", path)
        if name in names[:place]:
            raise UsageError(f"two arms are called {name!r}", path=path, remedy="give each arm its own name")
    if experiment.baseline not in names:
        remedy = did_you_mean(str(experiment.baseline), names, "its arms")
        raise UsageError(f"the baseline {experiment.baseline!r} is not an arm", path=path, remedy=remedy)
    control = f"{experiment.baseline} (again)"
    if experiment.control and control in names:
        raise UsageError(f"{control!r} is the name of the A/A control", path=path, remedy="rename that arm")
    baseline = arms[names.index(experiment.baseline)]
    about = "The A/A control: the baseline measured again. How far it lies from the baseline is noise."
    again = replace(baseline, name=control, role="control", about=about, places=(Place("control"),))
    others = (replace(arm, role="arm") for arm in arms if arm is not baseline)
    controls = [again] if experiment.control else []
    return Plan(experiment, (replace(baseline, role="baseline"), *controls, *others), notes)


def check_name(name: str, what: str, path: str) -> None:
    """Raise UsageError if a name is not a valid one of an arm or a change."""
    if not is_name(name):
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
        raise UsageError(f"{what} {shown!r} has an invalid name", path=path, remedy=NAME_RULE)


def is_name(text: str) -> bool:
    """Return whether a text is a valid name of an arm."""
    printable = text.isprintable() and "/" not in text and text == text.strip()
    return printable and 0 < len(text) <= _LONGEST_NAME and text[0] not in "-."
