"""The default techniques of a recipe: turned on where they can run, and reported as off where they cannot."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tensorkeep.errors import TensorkeepError, UnsupportedError, UsageError
from tensorkeep.train.config.config import Config
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.world import World
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import Stack


def turn_on_defaults(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """Return a configuration with its default techniques turned on, and why each that cannot run here is off.

    A technique that is requested by name is never left out: what it conflicts with is. The result has no defaults
    left, so that a run records what was on, and resumes with it.
    """
    off: list[str] = []
    defaults, config = config.default_techniques, msgspec.structs.replace(config, default_techniques={})
    for name, settings in defaults.items():
        try:
            config = _turned_on(config, name, settings, machine)
        except (UsageError, UnsupportedError) as error:
            off.append(_reason(name, error))
    return config, off


def _turned_on(config: Config, name: str, settings: Mapping[str, Any], machine: Machine) -> Config:
    """Return a configuration with one more technique, which may choose its settings by a measurement."""
    Stack.of({name: settings}).check(machine)
    config = msgspec.structs.replace(config, techniques={**config.techniques, name: dict(settings)})
    return Stack.of(config.techniques).configure(config)


def _reason(name: str, error: TensorkeepError) -> str:
    return error.message if error.message.startswith(name) else f"{name}: {error.message}"


def agreed_defaults(config: Config, world: World) -> tuple[Config, str | None]:
    """Return the same for all ranks, as rank 0 finds it, with the reasons as one line; None if nothing is off."""
    if not config.default_techniques:
        return config, None
    device = chosen_device(config.loop.device)
    config, off = turn_on_defaults(config, Machine(device)) if world.is_main else (config, [])
    values, off = world.broadcast((config.as_dict(), off))
    note = f"off on {device.type}: {'; '.join(off)}" if off else None
    return Config.from_dict(values), note
