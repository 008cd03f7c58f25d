"""The file of an experiment: JSON that names arms, or a base and the changes that a design makes of it.

``arms`` of the design ``arms`` are ``{"name", "settings", "about", "slow"}``. All other designs have a ``base`` of the
same keys, and ``changes`` (``{"name", "set", "unset", "needs", "about", "optional", "slow", "arm"}``) or ``factors``:
each the list of values that the setting of its name takes, or an object of levels (``{"set", "unset", "slow"}``) by
name. Combinations are ``{"changes", "name", "about"}``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tensorkeep.bench.experiment import design
from tensorkeep.bench.experiment import workload as workloads
from tensorkeep.bench.experiment.experiment import MOST_RUNS, Experiment, control_name, with_roles
from tensorkeep.bench.experiment.json_fields import Fields, did_you_mean, shown
from tensorkeep.bench.experiment.values import MOST_ARMS, Base, Change, Combination, Expansion, PlannedArm
from tensorkeep.bench.results import Limits
from tensorkeep.errors import UsageError

DEFAULT_RUNS = 5

_LONGEST_NAME = 80
_MOST_BYTES = 1 << 50
_MOST_SECONDS = 7 * 24 * 3600
_DEFAULT_SECONDS = 1800

_KEYS = ["name", "title", "about", "workload", "design", "baseline", "runs", "seed", "control", "limits", "settings"]
_KEYS_OF_DESIGN = {
    "arms": ("arms",),
    "one-at-a-time": ("base", "changes"),
    "leave-one-out": ("base", "changes"),
    "steps": ("base", "changes"),
    "factorial": ("base", "factors"),
    "fractional": ("base", "factors"),
    "combinations": ("base", "changes", "combinations"),
}
_NAME = f"a name is up to {_LONGEST_NAME} printable characters without '/', the first no '-' or '.'"
_EXAMPLE_ARM = '[{"name": "one", "settings": {"tool": "torch"}}]'
_EXAMPLE_CHANGE = '[{"name": "one", "set": {"compression": "lossless"}}]'


def read(value: object, path: Path) -> Experiment:
    """Return the experiment that a file of ours describes.

    Raises
    ------
    UsageError
        If it breaks a rule; the message names the file, the place in it and the key.
    """
    where = str(path)
    all_keys = [*_KEYS, *dict.fromkeys(key for keys in _KEYS_OF_DESIGN.values() for key in keys)]
    fields = Fields(value, "the experiment", where, all_keys)
    kind = fields.text("design", "arms", example='"arms"')
    if kind not in _KEYS_OF_DESIGN:
        fields.refuse(f"has no known design: {shown(kind)}", remedy=did_you_mean(kind, _KEYS_OF_DESIGN, "designs"))
    fields = Fields(value, f"an experiment of the design {kind!r}", where, [*_KEYS, *_KEYS_OF_DESIGN[kind]])
    fields.where = "the experiment"
    expansion = _expand(kind, fields)
    workload = fields.text("workload", "checkpoint", example='"checkpoint"')
    if workload not in workloads.names():
        fields.refuse(
            f"has no known workload: {shown(workload)}", remedy=did_you_mean(workload, workloads.names(), "workloads")
        )
    name = fields.text("name", path.stem, example='"my-comparison"')
    experiment = Experiment(
        name=name,
        title=fields.text("title", name, example='"My comparison"'),
        about=fields.text("about", "", example='"What is compared, and why."'),
        workload=workload,
        design=kind,
        baseline=fields.text("baseline", expansion.arms[0].name, example=f'"{expansion.arms[0].name}"'),
        runs=fields.whole("runs", DEFAULT_RUNS, most=MOST_RUNS, example=5),
        seed=fields.whole("seed", 0, least=0, most=2**63 - 1, example=0),
        control=fields.flag("control", True),
        limits=_limits(fields),
        arms=tuple(expansion.arms),
        omitted=tuple(expansion.omitted),
        factors=expansion.factors,
        aliases=expansion.aliases,
        settings=workloads.get(workload).settings(
            fields.object("settings", {}, example='{"model": "openllama-3b"}'), where
        ),
    )
    return finished(experiment, where)


def finished(experiment: Experiment, path: str) -> Experiment:
    """Return an experiment with its arms' roles and its A/A control.

    Raises
    ------
    UsageError
        If two arms have one name, or the baseline is no arm.
    """
    names = [arm.name for arm in experiment.arms]
    if len(names) > MOST_ARMS:
        raise UsageError(f"has {len(names)} arms, more than {MOST_ARMS}", path=path, remedy="take fewer")
    for place, name in enumerate(names):
        if name in names[:place]:
            raise UsageError(f"two arms are called {name!r}", path=path, remedy="give each a name of its own")
    if experiment.baseline not in names:
        remedy = did_you_mean(experiment.baseline, names, "its arms")
        raise UsageError(f"the baseline {experiment.baseline!r} is no arm", path=path, remedy=remedy)
    if experiment.control and control_name(experiment.baseline) in names:
        taken = control_name(experiment.baseline)
        raise UsageError(f"an arm is called {taken!r}, as the A/A control is", path=path, remedy="give it another name")
    return replace(experiment, arms=with_roles(experiment.arms, experiment.baseline, experiment.control))


def checked_name(fields: Fields, key: str = "name") -> str:
    """Return the name of an arm or a change: printable, and no path."""
    name: str = fields.text(key, example='"one"')
    if not _is_name(name):
        fields.refuse(f"has the name {shown(name)}", remedy=_NAME)
    return name


def _is_name(text: str) -> bool:
    allowed = text.isprintable() and "/" not in text and text == text.strip()
    return allowed and 0 < len(text) <= _LONGEST_NAME and text[0] not in "-."


def _limits(fields: Fields) -> Limits:
    given = fields.object("limits", {}, example='{"seconds": 600}')
    limits = Fields(given, "limits", fields.path, ("seconds", "memory_bytes"))
    default = None if "seconds" in given else _DEFAULT_SECONDS
    return Limits(
        seconds=limits.whole("seconds", default, most=_MOST_SECONDS, example=600),
        memory_bytes=limits.whole("memory_bytes", None, most=_MOST_BYTES, example=8 << 30),
    )


def _expand(kind: str, fields: Fields) -> Expansion:
    if kind == "arms":
        arms = fields.list("arms", example=_EXAMPLE_ARM)
        return Expansion([_arm(value, index, fields.path) for index, value in enumerate(arms)])
    base = _base(fields.object("base", example='{"settings": {"tool": "torch"}}'), fields.path)
    try:
        if kind in ("factorial", "fractional"):
            factors = _factors(fields)
            return design.factorial(base, factors) if kind == "factorial" else design.fractional(base, factors)
        changes = _changes(fields, base)
        if kind == "combinations":
            return design.combinations(base, changes, _combinations(fields, changes))
        stacked: dict[str, Callable[[Base, list[Change]], Expansion]] = {
            "one-at-a-time": design.one_at_a_time,
            "leave-one-out": design.leave_one_out,
            "steps": design.steps,
        }
        return stacked[kind](base, changes)
    except UsageError as error:
        raise error if error.path else UsageError(error.message, path=fields.path, remedy=error.remedy) from error


def _arm(value: object, index: int, path: str | None) -> PlannedArm:
    fields = Fields(value, _called(value, "arm", index), path, ("name", "settings", "about", "slow"))
    return PlannedArm(
        name=checked_name(fields),
        role="arm",
        settings=fields.object("settings", example='{"tool": "torch"}'),
        about=fields.text("about", "", example='"What it is."'),
        slow=fields.flag("slow", False),
    )


def _base(value: object, path: str | None) -> Base:
    fields = Fields(value, "the base", path, ("name", "settings", "about", "slow"))
    return Base(
        name=checked_name(fields) if "name" in fields.value else "base",
        settings=fields.object("settings", example='{"tool": "torch"}'),
        about=fields.text("about", "", example='"What it is."'),
        slow=fields.flag("slow", False),
    )


def _changes(fields: Fields, base: Base) -> list[Change]:
    values = fields.list("changes", example=_EXAMPLE_CHANGE)
    if len(values) > MOST_ARMS:
        fields.refuse(f"has {len(values)} changes, more than {MOST_ARMS}", remedy="take fewer")
    changes = [_change(value, index, fields.path) for index, value in enumerate(values)]
    names = [change.name for change in changes]
    settings = {*base.settings, *(key for change in changes for key in change.sets)}
    for place, change in enumerate(changes):
        if change.name in names[:place]:
            fields.refuse(f"has two changes called {change.name!r}", remedy="give each a name of its own")
        for need in change.needs:
            if need not in names or need == change.name:
                remedy = did_you_mean(need, [name for name in names if name != change.name], "changes")
                fields.refuse(
                    f"has a change {change.name!r} that needs {need!r}, which is no other change", remedy=remedy
                )
        for key in change.unsets:
            if key not in settings:
                remedy = did_you_mean(key, sorted(settings), "settings")
                fields.refuse(f"has a change {change.name!r} that unsets {key!r}, which nothing sets", remedy=remedy)
    return changes


def _change(value: object, index: int, path: str | None) -> Change:
    keys = ("name", "set", "unset", "needs", "about", "optional", "slow", "arm")
    fields = Fields(value, _called(value, "change", index), path, keys)
    change = Change(
        name=checked_name(fields),
        sets=fields.object("set", {}, example='{"compression": "lossless"}'),
        unsets=fields.texts("unset"),
        needs=fields.texts("needs"),
        about=fields.text("about", "", example='"What it does."'),
        optional=fields.flag("optional", False),
        slow=fields.flag("slow", None),
        arm=checked_name(fields, "arm") if "arm" in fields.value else None,
    )
    if not change.sets and not change.unsets:
        fields.refuse("changes nothing", remedy='give it a "set" or an "unset"')
    return change


def _combinations(fields: Fields, changes: list[Change]) -> list[Combination]:
    names = [change.name for change in changes]
    found = []
    for index, value in enumerate(fields.list("combinations", example='[{"changes": ["one", "two"]}]')):
        part = Fields(value, _called(value, "combination", index), fields.path, ("changes", "name", "about"))
        members = part.texts("changes")
        for member in members:
            if member not in names:
                part.refuse(f"has the change {shown(member)}", remedy=did_you_mean(member, names, "changes"))
        if len(set(members)) < 2 or len(set(members)) != len(members):
            part.refuse("is not two or more different changes", remedy='write, for example, "changes": ["one", "two"]')
        name = checked_name(part) if "name" in part.value else " + ".join(members)
        found.append(Combination(members, name, part.text("about", "", example='"What it shows."')))
    return found


def _factors(fields: Fields) -> dict[str, list[Change]]:
    given = fields.object("factors", example='{"concurrency": [1, 128]}')
    if not given:
        fields.refuse("has no factors", remedy='write, for example, "factors": {"concurrency": [1, 128]}')
    return {name: _levels(name, value, fields.path) for name, value in given.items()}


def _levels(factor: str, value: object, path: str | None) -> list[Change]:
    where = f"factor {factor!r}"
    if isinstance(value, list):
        levels = [Change(_label(level), {factor: level}) for level in value]
    else:
        if not isinstance(value, dict):
            problem = f"{where} is neither a list of values nor an object of levels"
            raise UsageError(problem, path=path, remedy="write, for example, [1, 128]")
        levels = []
        for name, content in value.items():
            level = Fields(content, f"{where}, level {name!r},", path, ("set", "unset", "slow"))
            sets = level.object("set", {}, example='{"compression": "lossless"}')
            levels.append(Change(name, sets, level.texts("unset"), slow=level.flag("slow", None)))
    labels = [level.name for level in levels]
    for label in labels:
        # As in the names of arms, where a level may begin with a minus.
        if not label or not _is_name(f"{factor}={label}"):
            remedy = f"write it as an object of levels by name; {_NAME}"
            raise UsageError(f"{where} has the level {shown(label)}, which makes no name", path=path, remedy=remedy)
    if len(levels) < 2 or len(set(labels)) != len(labels):
        raise UsageError(
            f"{where} has not two or more different levels", path=path, remedy="write, for example, [1, 128]"
        )
    return levels


def _label(level: object) -> str:
    return level if isinstance(level, str) else "none" if level is None else shown(level)


def _called(value: object, what: str, index: int) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return f"{what} {name!r}" if isinstance(name, str) and name else f"{what} {index + 1}"
