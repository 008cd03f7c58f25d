"""The arms of a comparison of training: settings of a recipe, among them techniques, and what each is held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.train.config.config import TECHNIQUES, Config, nearest, setting_names
from tensorkeep.train.config.recipes import get_recipe
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import Stack

DEFAULT_RECIPE = "shakespeare-char-cpu"

_FIXED: dict[str, Any] = {
    "checkpoint.every": 0,
    "checkpoint.keep_best": 0,
    "checkpoint.asynchronous": False,
    "sample.every": 0,
    "log.every": 1,
    "eval.patience": None,
}
_DECIDED = ("loop.steps", "loop.seed", "eval.batches", "recipe", "data.", "log.", "checkpoint.", "sample.")
"""What the experiment decides, and no arm: arms are compared at equal steps, on equal data."""


def config_of(
    recipe: str, settings: Mapping[str, Any], *, steps: int, evaluated: int | None = None, block: int = 0
) -> Config:
    """Return the configuration of an arm.

    Parameters
    ----------
    recipe : str
    settings : mapping
        The arm's, by dotted name, as `Config.changed` takes them: ``{"techniques.compile": "on", "optim.lr": 1e-3}``.
    steps : int
        Of the whole run.
    evaluated : int, optional
        On how many batches the validation loss is measured; on the whole split by default.
    block : int
        Gives each block a seed of its own.

    Raises
    ------
    UsageError
        If there is no such recipe or setting, or a value makes no sense.
    """
    base = get_recipe(recipe)
    decided = {"loop.seed": base.loop.seed + block, "eval.every": 0}
    return measured(base, steps=steps, evaluated=evaluated, others={**decided, **settings})


def measured(
    config: Config, *, steps: int, evaluated: int | None = None, others: Mapping[str, Any] | None = None
) -> Config:
    """Return a configuration as it is measured: for so many steps, each of which is logged, without checkpoints.

    Parameters
    ----------
    config : Config
    steps : int
    evaluated : int, optional
        On how many batches the validation loss is measured.
    others : mapping, optional
        More settings to change, by dotted name.
    """
    return config.changed({**_FIXED, "loop.steps": steps, "eval.batches": evaluated, **(others or {})})


def check_arm(settings: Mapping[str, Any]) -> None:
    """Raise UsageError if an arm has settings that there are none of, or its techniques cannot be on together.

    Whether the values suit the recipe is known when that is: see `config_of`.
    """
    known = setting_names()
    for name in settings:
        if name.startswith(_DECIDED):
            raise UsageError(
                f"{name} is the same for all arms", remedy='leave it out; "steps" and "data" stand in the settings'
            )
        if name not in known and not name.startswith(TECHNIQUES):
            near = ", ".join(nearest(name, known))
            remedy = f"did you mean {near}?" if near else "see tensorkeep train --list-settings"
            raise UsageError(f"there is no setting {name!r}", remedy=remedy)
    try:
        _stack(settings)
    except UnsupportedError as error:
        raise UsageError(error.message, remedy=error.remedy) from error


def lacks(settings: Mapping[str, Any]) -> str | None:
    """Return what this machine lacks for the techniques of an arm, or None."""
    machine = Machine(chosen_device(settings.get("loop.device", "auto")))
    for each in _stack(settings).techniques:
        lack = each.lacks(machine)
        if lack is not None:
            return f"{each.name} {lack}"
    return None


def _stack(settings: Mapping[str, Any]) -> Stack:
    """Return the techniques of an arm, whatever the recipe."""
    own = {name: value for name, value in settings.items() if name.startswith(TECHNIQUES)}
    return Stack.of(get_recipe(DEFAULT_RECIPE).changed(own).techniques)


def without_systems(config: Config) -> Config:
    """Return a configuration without those of its techniques that must not move the losses."""
    kept = {
        name: given for name, given in config.techniques.items() if TECHNIQUE_CLASSES.get(name).kind == "algorithmic"
    }
    return msgspec.structs.replace(config, techniques=kept)


def tolerance_of(config: Config) -> float:
    """Return how far the losses may lie from those of `without_systems`, as a share: what each allows, added up."""
    kinds = (TECHNIQUE_CLASSES.get(name) for name in config.techniques)
    return float(sum(each.tolerance for each in kinds if each.kind == "systems"))
