"""An experiment: what is compared with what, how often, and in which order; a value that a JSON file describes.

`read_experiment` takes the name of an experiment that comes with Tensorkeep, or the path of a file: one of ours
(``experiment_file``) or the configuration of an isolated suite (``suite_file``). What an arm's settings mean is the
workload's business: it hands in a function that checks them, and this module knows nothing else about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tensorkeep.bench.experiment.json_fields import did_you_mean, read_json
from tensorkeep.bench.experiment.values import PlannedArm
from tensorkeep.bench.experiment.workload import get as get_workload
from tensorkeep.bench.results import Limits
from tensorkeep.errors import UsageError

MOST_RUNS = 1000

CheckSettings = Callable[[dict[str, Any]], object]
"""Raises UsageError if an arm's settings are none of the workload's; what it returns is not looked at."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is measured, with all defaults filled in.

    Attributes
    ----------
    name, title, about : str
        About: sentences for people.
    workload : str
        What the arms do: ``"checkpoint"`` or ``"training"``.
    design : str
        How the arms came about.
    baseline : str
        The arm that all others are compared with.
    runs : int
        Number of blocks: how often each arm is run.
    seed : int
        Of the order.
    control : bool
        Whether the baseline enters once more under another name, which shows how far equal things lie apart.
    limits : Limits
    arms : tuple of PlannedArm
        The baseline first, then the A/A control if there is one.
    omitted : tuple of dict
        ``place`` and ``reason`` of what the design has a place for, but that makes no sense.
    factors : dict of str to list of str
        Of factorial designs: the labels of each factor's levels.
    aliases : list of list of list of str
        Of fractional designs: groups of effects, each the list of its factors, that cannot be told apart.
    settings : dict
        The workload's own, for all arms: for ``checkpoint`` the ``model`` or what it is taken ``from``, ``slow_model``,
        ``with_optimizer``, ``into``, ``device``, ``save_dir``; for ``training`` see its workload.
    notes : tuple of str
        What a person should be told before it runs.
    """

    name: str
    title: str
    about: str
    workload: str
    design: str
    baseline: str
    runs: int
    seed: int
    control: bool
    limits: Limits
    arms: tuple[PlannedArm, ...]
    omitted: tuple[dict[str, Any], ...] = ()
    factors: dict[str, list[str]] = field(default_factory=dict)
    aliases: list[list[list[str]]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> PlannedArm:
        """Return the arm of that name.

        Raises
        ------
        UsageError
            If there is none; the remedy names the nearest one.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        known = [arm.name for arm in self.arms]
        raise UsageError(f"experiment {self.name!r} has no arm {name!r}", remedy=did_you_mean(name, known, "its arms"))

    def as_dict(self) -> dict[str, Any]:
        """Return the ``experiment`` of a results file; its ``arms`` stand beside it, each `PlannedArm.as_dict`."""
        return {
            "name": self.name,
            "title": self.title,
            "about": self.about,
            "workload": self.workload,
            "design": self.design,
            "baseline": self.baseline,
            "runs": self.runs,
            "seed": self.seed,
            "control": self.control,
            "limits": {"seconds": self.limits.seconds, "memory_bytes": self.limits.memory_bytes},
            "factors": {name: list(levels) for name, levels in self.factors.items()},
            "aliases": [[list(effect) for effect in group] for group in self.aliases],
            "omitted": [dict(omitted) for omitted in self.omitted],
            "settings": dict(self.settings),
        }

    def with_runs(self, runs: int) -> Experiment:
        """Return the experiment with another number of blocks."""
        if not 1 <= runs <= MOST_RUNS:
            raise UsageError(f"an experiment runs 1 to {MOST_RUNS} times, not {runs}", remedy="give, for example, 5")
        return replace(self, runs=runs)

    def with_limits(self, limits: Limits) -> Experiment:
        """Return the experiment with other limits of a cell."""
        return replace(self, limits=limits)

    def with_seed(self, seed: int) -> Experiment:
        """Return the experiment in another order."""
        return replace(self, seed=seed)

    def with_settings(self, **settings: Any) -> Experiment:
        """Return the experiment with some of the workload's settings replaced."""
        return replace(self, settings=get_workload(self.workload).settings({**self.settings, **settings}, None))

    def with_model(self, model: str | None = None, slow_model: str | None = None) -> Experiment:
        """Return the experiment on another model, or with another model for the slow arms; None leaves it."""
        changed: dict[str, Any] = {}
        if model is not None:
            changed |= {"model": model, "from": None}
        if slow_model is not None:
            changed["slow_model"] = slow_model
        return self.with_settings(**changed)

    def with_source(self, checkpoint: str) -> Experiment:
        """Return the experiment on a checkpoint instead of a model."""
        return self.with_settings(**{"from": checkpoint, "model": None})

    def with_control(self, control: bool) -> Experiment:
        """Return the experiment with or without the baseline under another name."""
        arms = with_roles([arm for arm in self.arms if arm.role != "control"], self.baseline, control)
        return replace(self, control=control, arms=arms)

    def only(self, arms: Collection[str]) -> Experiment:
        """Return the experiment with some of its arms, compared one by one; the baseline and the A/A control stay.

        Raises
        ------
        UsageError
            If there is no arm of one of the names.
        """
        wanted = {self.arm(name).name for name in arms}
        kept = tuple(arm for arm in self.arms if arm.name in wanted or arm.role != "arm")
        if len(kept) == len(self.arms):
            return self
        # Some arms of a design are no design: its steps and effects would be those of other changes.
        plain = tuple(arm if arm.role == "control" else replace(arm, place={"kind": "arm"}) for arm in kept)
        return replace(self, arms=plain, design="arms", omitted=(), factors={}, aliases=[])


def with_roles(arms: Iterable[PlannedArm], baseline: str, control: bool) -> tuple[PlannedArm, ...]:
    """Return arms with their roles: the baseline first, then its A/A control if wanted, then the others."""
    arms = list(arms)
    first = next(arm for arm in arms if arm.name == baseline)
    others = [replace(arm, role="arm") for arm in arms if arm is not first]
    again = replace(
        first,
        name=control_name(baseline),
        role="control",
        about="The baseline again, as an A/A control: any difference is noise.",
        place={"kind": "control"},
    )
    return (replace(first, role="baseline"), *([again] if control else []), *others)


def control_name(baseline: str) -> str:
    """Return what the baseline is called the second time."""
    return f"{baseline} (again)"


def shipped(workload: str | None = None) -> dict[str, str]:
    """Return the experiments that come with Tensorkeep, all or those of a workload: name to title."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in _shipped_files()}
    return {name: each["title"] for name, each in found.items() if workload in (None, each["workload"])}


def read_experiment(name_or_path: str | os.PathLike[str], *, check_settings: CheckSettings | None = None) -> Experiment:
    """Return an experiment by its name, or from a file.

    Parameters
    ----------
    name_or_path : str or path-like
        The name of an experiment that comes with Tensorkeep, or the path of a JSON file, of ours or of an isolated
        suite. A name wins over a file of the same name; ``./name`` is the file.
    check_settings : callable, optional
        The workload's: raises UsageError for settings of an arm that it does not take.

    Raises
    ------
    UsageError
        If there is no such experiment, or the file breaks a rule; the message names the file, the place and the key.
    """
    # They make experiments, so they import this module.
    from tensorkeep.bench.experiment import file, suite_file

    path = _find(name_or_path)
    value = read_json(path)
    read = suite_file.read if suite_file.recognises(value) else file.read
    experiment = read(value, path)
    if check_settings is not None:
        _check_arms(experiment, check_settings, path)
    return experiment


def _check_arms(experiment: Experiment, check_settings: CheckSettings, path: Path) -> None:
    for arm in experiment.arms:
        try:
            check_settings(dict(arm.settings))
        except UsageError as error:
            message = f"arm {arm.name!r}: {error.message}"
            raise UsageError(message, path=path, remedy=error.remedy or "correct the settings") from error


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    name = os.fspath(name_or_path)
    found = {path.stem: path for path in _shipped_files()}
    if isinstance(name_or_path, str) and name in found:
        return found[name]
    path = Path(name)
    if path.suffix == ".json" or os.sep in name or path.is_file():
        return path
    remedy = f"{did_you_mean(name, found, 'experiments')} (or give the path of a JSON file)"
    raise UsageError(f"there is no experiment {name!r}", remedy=remedy)


def _shipped_files() -> list[Path]:
    folder = Path(str(files("tensorkeep") / "experiments"))
    return sorted(folder.glob("*.json"))
