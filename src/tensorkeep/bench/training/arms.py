"""The arms of a training comparison: changes to a recipe, and the losses they must keep."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tensorkeep.bench.results import Settings
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.train.config.config import RENAMED, TECHNIQUES, Config, nearest, setting_names
from tensorkeep.train.config.recipes import get_recipe
from tensorkeep.train.step.device import chosen_device
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Machine
from tensorkeep.train.techniques.stack import Stack

DEFAULT_RECIPE = "shakespeare-char-cpu"

_FIXED: Settings = {
    "checkpoint.every": 0,
    "checkpoint.keep_best": 0,
    "checkpoint.asynchronous": False,
    "sample.every": 0,
    "log.every": 1,
    "eval.patience": None,
    # Arms are compared at equal batches.
    "loop.auto_batch_size": False,
    # An arm states what is on: the same experiment compares the same techniques on each machine.
    "default_techniques": None,
}
RANKS = "ranks"
"""The setting of an arm that is not one of a recipe: by how many processes torchrun trains it."""
_MOST_RANKS = 1024
_SET_BY_EXPERIMENT = (
    "loop.steps",
    "loop.seed",
    "eval.batches",
    "recipe",
    "data.",
    "log.",
    "checkpoint.",
    "sample.",
    "default_techniques",
)
"""Settings that all arms share: arms are compared at equal steps, on equal data."""


def arm_config(
    recipe: str, arm: Mapping[str, Any], *, steps: int, evaluated: int | None = None, block: int = 0
) -> Config:
    """Return the configuration of an arm: changes to a recipe by dotted name, ``{"techniques.compile": "on"}``.

    The run has ``steps`` and evaluates that many batches, by default the whole split. Each block gets its own seed.

    Raises UsageError if the recipe or a setting is unknown, or a value is not valid.
    """
    base = get_recipe(recipe)
    own = {"loop.seed": base.loop.seed + block, "eval.every": 0}
    changes = {name: value for name, value in arm.items() if name != RANKS}
    return measured_config(base, steps=steps, evaluated=evaluated, changes={**own, **changes})


def measured_config(
    config: Config, *, steps: int, evaluated: int | None = None, changes: Mapping[str, Any] | None = None
) -> Config:
    """Return a configuration for a measurement, with other changes: every step is logged, without checkpoints."""
    return config.changed({**_FIXED, "loop.steps": steps, "eval.batches": evaluated, **(changes or {})})


def check_arm(arm: Mapping[str, Any]) -> None:
    """Check the names of an arm's settings and its techniques. Their values are checked with the recipe.

    Raises UsageError if a setting is unknown or belongs to the experiment, or techniques cannot be combined.
    """
    known = [*setting_names(), *RENAMED]
    ranks = arm.get(RANKS, 1)
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"{RANKS} is {ranks!r}", remedy=f"give a number of processes, 1 to {_MOST_RANKS}")
    for name in arm:
        if name == RANKS:
            continue
        if name.startswith(_SET_BY_EXPERIMENT):
            remedy = 'remove it from the arm; "steps" and "data" are settings of the experiment'
            raise UsageError(f"{name} is the same for all arms", remedy=remedy)
        if name not in known and not name.startswith(TECHNIQUES):
            near = ", ".join(nearest(name, known))
            remedy = f"did you mean {near}?" if near else "see tensorkeep train --list-settings"
            raise UsageError(f"the setting {name!r} does not exist", remedy=remedy)
    try:
        _techniques(arm)
    except UnsupportedError as error:
        raise UsageError(error.message, remedy=error.remedy) from error


def missing_for(arm: Mapping[str, Any]) -> str | None:
    """Return the missing requirement of an arm's techniques on this machine, or None."""
    if arm.get(RANKS, 1) > 1:
        return None  # each rank checks it
    machine = Machine(chosen_device(arm.get("loop.device", "auto")))
    for technique in _techniques(arm).techniques:
        lack = technique.missing(machine)
        if lack is not None:
            return f"{technique.name} {lack}"
    return None


def _techniques(arm: Mapping[str, Any]) -> Stack:
    """Return the techniques of an arm; they do not depend on the recipe."""
    own = {name: value for name, value in arm.items() if name.startswith(TECHNIQUES)}
    return Stack.of(get_recipe(DEFAULT_RECIPE).changed(own).techniques)


def without_systems_techniques(config: Config) -> Config:
    """Return a configuration without its systems techniques, which must not change the losses."""
    algorithmic = {name for name in config.techniques if TECHNIQUE_CLASSES.get(name).kind == "algorithmic"}
    kept = {name: given for name, given in config.techniques.items() if name in algorithmic}
    return msgspec.structs.replace(config, techniques=kept)


def loss_tolerance(config: Config) -> float:
    """Return the relative difference allowed to the losses of `without_systems_techniques`: the techniques' sum."""
    kinds = (TECHNIQUE_CLASSES.get(name) for name in config.techniques)
    return float(sum(each.tolerance for each in kinds if each.kind == "systems"))
