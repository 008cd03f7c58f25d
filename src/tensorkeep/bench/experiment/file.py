"""The file of an experiment: JSON with arms, or with a base and changes for a design.

The design ``arms`` has ``arms``. All other designs have a ``base``, and either ``changes`` or ``factors``: each factor
is the list of values that the setting of its name takes, or an object of levels by name. The structs below and those
of ``design.py`` are the schema.
"""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tensorkeep.bench.experiment import design
from tensorkeep.bench.experiment.design import MOST_ARMS, Base, Change, Combination, Expansion, Level, Text
from tensorkeep.bench.experiment.plan import MOST_RUNS, NAME_RULE, Plan, check_name, is_name, make_plan
from tensorkeep.bench.experiment.validation import convert
from tensorkeep.bench.experiment.workload import get_workload
from tensorkeep.bench.results import Arm, Experiment, Limits, Settings
from tensorkeep.errors import UsageError, did_you_mean

DEFAULT_SECONDS = 1800
_MOST_SECONDS = 7 * 24 * 3600


class FileLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a cell, in seconds and bytes; null for no limit."""

    seconds: Annotated[int, Meta(ge=1, le=_MOST_SECONDS)] | None = DEFAULT_SECONDS
    memory_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None


class ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of every design; ``docs/reference/results.md`` explains them."""

    design: str = "arms"
    name: Text | None = None
    title: Text | None = None
    about: str = ""
    workload: Literal["checkpoint", "training"] = "checkpoint"
    baseline: Text | None = None
    runs: Annotated[int, Meta(ge=1, le=MOST_RUNS)] = 5
    seed: Annotated[int, Meta(ge=0)] = 0
    control: bool = True
    precision: Annotated[float, Meta(gt=1, le=10)] | None = None
    budget: Annotated[int, Meta(ge=1, le=_MOST_SECONDS)] | None = None
    limits: FileLimits = FileLimits()
    settings: Settings = {}

    @abstractmethod
    def expand(self, path: str) -> Expansion:
        """Return the arms of the design."""


class NamedArm(Base, frozen=True, kw_only=True):
    """An arm of the design ``arms``; it needs a name."""

    name: Text


class ArmsFile(ExperimentFile, frozen=True, kw_only=True):
    """The design ``arms``."""

    arms: Annotated[tuple[NamedArm, ...], Meta(min_length=1)]

    def expand(self, path: str) -> Expansion:
        return Expansion([Arm(one.name, "arm", one.settings, one.about, slow=one.slow) for one in self.arms])


class ChangesFile(ExperimentFile, frozen=True, kw_only=True):
    """The designs ``one-at-a-time``, ``leave-one-out`` and ``steps``."""

    base: Base
    changes: Annotated[tuple[Change, ...], Meta(min_length=1, max_length=MOST_ARMS)]

    def expand(self, path: str) -> Expansion:
        self.check_changes(path)
        expand = {"one-at-a-time": design.one_at_a_time, "leave-one-out": design.leave_one_out, "steps": design.steps}
        return expand[self.design](self.base, self.changes)

    def check_changes(self, path: str) -> None:
        """Raise UsageError if a change has an invalid name, changes nothing, or refers to something unknown."""
        names = [change.name for change in self.changes]
        settings = {*self.base.settings, *(key for change in self.changes for key in change.sets)}
        for place, change in enumerate(self.changes):
            check_name(change.name, "change", path)
            what = f"change {change.name!r}"
            if not change.sets and not change.unsets:
                raise UsageError(f"{what} changes nothing", path=path, remedy='add a "set" or an "unset"')
            if change.name in names[:place]:
                raise UsageError(f"there are two changes {change.name!r}", path=path, remedy="rename one of them")
            others = [name for name in names if name != change.name]
            for need in change.needs:
                if need not in others:
                    remedy = did_you_mean(need, others, "changes")
                    raise UsageError(f"{what} needs {need!r}, which is not another change", path=path, remedy=remedy)
            for key in change.unsets:
                if key not in settings:
                    remedy = did_you_mean(key, sorted(settings), "settings")
                    raise UsageError(f"{what} unsets {key!r}, which nothing sets", path=path, remedy=remedy)


class CombinationsFile(ChangesFile, frozen=True, kw_only=True):
    """The design ``combinations``."""

    combinations: Annotated[tuple[Combination, ...], Meta(min_length=1, max_length=MOST_ARMS)]

    def expand(self, path: str) -> Expansion:
        self.check_changes(path)
        names = [change.name for change in self.changes]
        for number, combination in enumerate(self.combinations, start=1):
            members = combination.changes
            for member in members:
                if member not in names:
                    remedy = did_you_mean(member, names, "changes")
                    raise UsageError(f"combination {number} has no change {member!r}", path=path, remedy=remedy)
            if len(set(members)) < 2 or len(set(members)) != len(members):
                message = f"combination {number} does not have two or more different changes"
                raise UsageError(message, path=path, remedy='write, for example, "changes": ["one", "two"]')
        return design.combinations(self.base, self.changes, self.combinations)


class FactorsFile(ExperimentFile, frozen=True, kw_only=True):
    """The designs ``factorial`` and ``fractional``."""

    base: Base
    factors: Annotated[dict[str, Any], Meta(min_length=1)]

    def expand(self, path: str) -> Expansion:
        factors = {name: _levels(name, value, path) for name, value in self.factors.items()}
        return (design.factorial if self.design == "factorial" else design.fractional)(self.base, factors)


_COPIED = ("workload", "about", "runs", "seed", "control", "precision", "budget")
"""The fields that the experiment takes from its file as they are."""
_FILES: dict[str, type[ExperimentFile]] = {
    "arms": ArmsFile,
    "one-at-a-time": ChangesFile,
    "leave-one-out": ChangesFile,
    "steps": ChangesFile,
    "factorial": FactorsFile,
    "fractional": FactorsFile,
    "combinations": CombinationsFile,
}


def read(value: object, path: Path) -> Plan:
    """Return the plan that the JSON of an experiment's file describes.

    Raises UsageError if it is not valid; the message names the file, the place in it and the field.
    """
    where = str(path)
    kind = value.get("design", "arms") if isinstance(value, dict) else "arms"
    if not isinstance(kind, str) or kind not in _FILES:
        message = f"the experiment has the unknown design {kind!r}"
        raise UsageError(message, path=where, remedy=did_you_mean(str(kind), _FILES, "designs"))
    file = convert(value, _FILES[kind], what="the experiment", path=where)
    try:
        expansion = file.expand(where)
    except UsageError as error:
        raise error if error.path else UsageError(error.message, path=where, remedy=error.remedy) from error
    settings = get_workload(file.workload).parse_settings(file.settings, where)
    name = file.name or path.stem
    experiment = Experiment(
        name=name,
        title=file.title or name,
        design=kind,
        baseline=file.baseline or expansion.arms[0].name,
        **{field: getattr(file, field) for field in _COPIED},
        limits=Limits(file.limits.seconds, file.limits.memory_bytes),
        factors=expansion.factors,
        aliases=expansion.aliases,
        omitted=tuple(expansion.omitted),
        settings=msgspec.to_builtins(settings),
    )
    return make_plan(experiment, expansion.arms, where)


def _levels(factor: str, value: object, path: str) -> list[Change]:
    what = f"factor {factor!r}"
    if isinstance(value, list):
        levels = [Change(_label(level), {factor: level}) for level in value]
    elif isinstance(value, dict):
        levels = []
        for name, content in value.items():
            level = convert(content, Level, what=f"{what}, level {name!r}", path=path)
            levels.append(Change(name, **msgspec.structs.asdict(level)))
    else:
        message = f"{what} is neither a list of values nor an object of levels"
        raise UsageError(message, path=path, remedy="write, for example, [1, 128]")
    labels = [level.name for level in levels]
    for label in labels:
        # As in the names of arms, where a level may begin with a minus.
        if not label or not is_name(f"{factor}={label}"):
            remedy = f"write it as an object of levels by name; {NAME_RULE}"
            raise UsageError(f"{what} has the level {label!r}, which is not a valid name", path=path, remedy=remedy)
    if len(levels) < 2 or len(set(labels)) != len(labels):
        message = f"{what} does not have two or more different levels"
        raise UsageError(message, path=path, remedy="write, for example, [1, 128]")
    return levels


def _label(level: object) -> str:
    return level if isinstance(level, str) else "none" if level is None else json.dumps(level)
