"""The configuration of a training run: frozen, validated, changed by dotted setting names."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, Self

import msgspec

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.train.config import sections
from tensorkeep.train.config.sections import Section, read_settings
from tensorkeep.train.model.config import ModelConfig

GROUPS = "optim.groups."
"""Prefix of the settings of groups of parameters, such as ``"optim.groups.embeddings.lr_factor"``."""
TECHNIQUES = "techniques."
"""Prefix of the settings of techniques, such as ``"techniques.compile.mode"``."""

_CHOOSE_FROM_BATCHES = ("gradient-accumulation", "pipeline-parallel", "loss-curriculum")
"""Techniques that split batches themselves, or choose among the windows of one."""

DEFAULTS = "default_techniques"
"""The setting with the techniques that a recipe turns on where they can run."""


class Config(Section, frozen=True):
    """The configuration of a training run.

    Attributes
    ----------
    recipe : str
        The recipe that it was derived from.
    model : ModelConfig
        Its ``vocab_size`` is raised to that of the data when a run is opened.
    data, optim, schedule, loop, eval, sample, checkpoint, ema, log
        See `tensorkeep.train.config.sections`.
    techniques : dict of str to dict
        The settings of each technique that is on, by name; one that cannot run is an error.
    default_techniques : dict of str to dict
        The settings of each technique that a new run turns on where it can run, by name.

    Examples
    --------
    >>> from tensorkeep.train.config.recipes import get_recipe
    >>> config = get_recipe("shakespeare-char-cpu").changed({"optim.lr": 3e-4})
    >>> config.setting("optim.lr"), config.loop.steps
    (0.0003, 2000)
    >>> config.changed({"techniques.compile.mode": "default", "loop.steps": "10"}).techniques
    {'compile': {'mode': 'default'}}
    """

    recipe: str
    model: ModelConfig
    data: sections.DataConfig = sections.DataConfig()
    optim: sections.OptimConfig = sections.OptimConfig()
    schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    loop: sections.LoopConfig = sections.LoopConfig()
    eval: sections.EvalConfig = sections.EvalConfig()
    sample: sections.SampleConfig = sections.SampleConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    ema: sections.AverageConfig = sections.AverageConfig()
    log: sections.LogConfig = sections.LogConfig()
    techniques: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # msgspec copies it for each instance
    default_techniques: dict[str, dict[str, Any]] = {}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, needs_evaluations in (
            ("schedule.name", self.schedule.name == "plateau"),
            ("eval.patience", self.eval.patience is not None),
        ):
            if needs_evaluations and not self.eval.every:
                raise UsageError(
                    f"{name} is {self.setting(name)!r}, and eval.every is 0: there is no evaluation before the end",
                    remedy=f"give eval.every 250, for example, or leave {name} out",
                )
        splits = [name for name in _CHOOSE_FROM_BATCHES if name in self.techniques]
        if self.loop.fill_memory and splits:
            raise UsageError(
                f"loop.fill_memory is true, and {splits[0]} needs the batch size that you give",
                remedy="give loop.batch_size, or loop.fill_memory false",
            )
        if self.model.lora.rank and "lora" not in self.techniques:
            raise UsageError(
                f"model.lora.rank is {self.model.lora.rank}, and the technique lora is off",
                remedy=f"give --techniques.lora.rank {self.model.lora.rank} instead",
            )
        if self.model.lora.rank and self.optim.name == "muon":
            raise UsageError(
                "optim.name is 'muon', which is for full matrices, and lora trains adapters of low rank",
                remedy="give optim.name adamw",
            )

    def as_dict(self) -> dict[str, Any]:
        """Return it as nested plain values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the configuration that `as_dict` gave; see `read_settings` for the errors."""
        return read_settings(values, cls)

    def setting(self, name: str) -> Any:
        """Return the value of a setting by its dotted name, such as ``"optim.lr"``; UsageError if it does not exist."""
        values = flat(self.as_dict())
        if name not in values:
            raise unknown_setting(name, values)
        return values[name]

    def changed(self, settings: Mapping[str, object]) -> Self:
        """Return the configuration with some settings changed.

        A new ``data.tokenizer`` resets ``data.vocab_size``; a batch size, and a technique that depends on it, turn
        ``loop.fill_memory`` off; unless these are changed as well.

        Parameters
        ----------
        settings : mapping of str to object
            By dotted name, such as ``"optim.lr"``. Text is converted, and ``"none"`` means None. A technique is turned
            ``"on"`` or ``"off"`` by its name, ``"techniques.compile"``, and turned on by any of its settings; it is
            then no longer a default technique. ``"default_techniques"`` replaces all of those, by none if ``"none"``.

        Raises
        ------
        UsageError
            If there is no such setting, or its value is of the wrong type or out of bounds.
        """
        values = self.as_dict()
        known = flat(values)
        if settings.get("data.tokenizer", self.data.tokenizer) != self.data.tokenizer:
            values["data"]["vocab_size"] = None
        for name, value in settings.items():
            if name.startswith(TECHNIQUES):
                _set_technique(values, name.removeprefix(TECHNIQUES), value)
                continue
            if name == DEFAULTS:
                values[DEFAULTS] = _as_defaults(value)
                continue
            if name.startswith(f"{DEFAULTS}."):
                remedy = f"give {TECHNIQUES}{name.removeprefix(f'{DEFAULTS}.')}"
                raise UsageError(f"{name} cannot be set by itself", remedy=remedy)
            if name.startswith(GROUPS):
                _set_group(values["optim"]["groups"], name.removeprefix(GROUPS), value)
                continue
            if name not in known:
                raise unknown_setting(name, known)
            *path, field = name.split(".")
            reduce(getitem, path, values)[field] = None if value == "none" else value
        given = settings.keys() & {"loop.batch_size", "loop.accumulate"}
        if "loop.fill_memory" not in settings and (given or values["techniques"].keys() & set(_CHOOSE_FROM_BATCHES)):
            values["loop"]["fill_memory"] = False
        # All at once: settings may be valid in combination only.
        return read_settings(values, type(self))


def _set_group(groups: dict[str, dict[str, Any]], name: str, value: object) -> None:
    """Change a setting of a group of parameters, whose pattern may contain dots."""
    pattern, _, field = name.rpartition(".")
    known = [each.name for each in msgspec.structs.fields(sections.ParameterGroup)]
    if not pattern or field not in known:
        raise UsageError(
            f"{GROUPS}{name} is not a setting",
            remedy=f"give {' or '.join(f'{GROUPS}GROUP.{each}' for each in known)}",
        )
    groups.setdefault(pattern, {})[field] = None if value == "none" else value


def _set_technique(values: dict[str, Any], name: str, value: object) -> None:
    """Turn a technique on or off, replace all its settings, or change one of them."""
    name, _, setting = name.partition(".")
    techniques: dict[str, dict[str, Any]] = values["techniques"]
    default = values[DEFAULTS].pop(name, {})
    if setting:
        techniques[name] = {**techniques.get(name, default), setting: value}
    elif isinstance(value, Mapping):
        techniques[name] = dict(value)
    elif value == "on":
        techniques.setdefault(name, default)
    elif value == "off":
        techniques.pop(name, None)
    else:
        raise UsageError(
            f"{TECHNIQUES}{name} is {value!r}", remedy=f'give "on", "off", or a setting: {TECHNIQUES}{name}.SETTING'
        )


def _as_defaults(value: object) -> dict[str, dict[str, Any]]:
    if value is None or value == "none":
        return {}
    if not isinstance(value, Mapping):
        remedy = f'give "none"; {TECHNIQUES}NAME on or off is for a single one'
        raise UsageError(f"{DEFAULTS} is {value!r}", remedy=remedy)
    return {name: dict(settings) for name, settings in value.items()}


def setting_names() -> list[str]:
    """Return the dotted names of all settings."""
    return list(_names(Config, ""))


def _names(kind: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _names(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        # A technique without settings is on; an empty table of techniques holds no setting.
        if isinstance(value, Mapping) and (value or not prefix):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted name, as (first, second)."""
    before, after = flat(first.as_dict()), flat(second.as_dict())
    names = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def unknown_setting(name: str, known: Collection[str], *, path: PathLike | None = None) -> UsageError:
    """Return the error of a setting that does not exist; its remedy names the nearest ones that do."""
    near = ", ".join(nearest(name, known))
    remedy = f"did you mean {near}?" if near else "see tensorkeep train --list-settings"
    return UsageError(f"there is no setting {name!r}", path=path, remedy=remedy)


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return the names that are most like a name, likeliest first."""
    # The most common mistake is a missing section.
    same_field = [each for each in sorted(known) if each.rpartition(".")[2] == name.rpartition(".")[2]]
    return list(dict.fromkeys([*same_field, *difflib.get_close_matches(name, sorted(known), n=3)]))
