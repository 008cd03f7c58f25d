"""The configuration of a training run: frozen, validated, changed one setting at a time."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Self

import msgspec

from tensorkeep.errors import PathLike, UsageError
from tensorkeep.train.config.sections import (
    AverageConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    LoopConfig,
    OptimConfig,
    SampleConfig,
    ScheduleConfig,
    Section,
)
from tensorkeep.train.model.config import ModelConfig

TECHNIQUES = "techniques."
"""What the names of the settings of techniques begin with: ``"techniques.compile.mode"``."""


class Config(Section, frozen=True):
    """Everything that decides what a training run does.

    Attributes
    ----------
    recipe : str
        The recipe that it began with.
    model : ModelConfig
        Its ``vocab_size`` is raised to that of the data.
    data, optim, schedule, loop, eval, sample, checkpoint, ema, log
        See the sections.
    techniques : dict of str to dict
        The techniques that are on, with their settings.
    """

    recipe: str
    model: ModelConfig
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    loop: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ema: AverageConfig = AverageConfig()
    log: LogConfig = LogConfig()
    techniques: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # msgspec gives each instance its own

    def __post_init__(self) -> None:
        if not self.eval.every and self.schedule.name == "plateau":
            raise _never_evaluated("schedule.name is 'plateau'")
        if not self.eval.every and self.eval.patience is not None:
            raise _never_evaluated(f"eval.patience is {self.eval.patience}")

    def as_dict(self) -> dict[str, Any]:
        """Return it as nested plain values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Return the configuration that `as_dict` gave.

        Raises
        ------
        UsageError
            If a value is missing, unknown, of the wrong type or out of range.
        """
        try:
            return msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(f"the configuration is not valid: {error}") from error

    def setting(self, name: str) -> Any:
        """Return the value of a setting by its dotted name, such as ``"optim.lr"``.

        Raises
        ------
        UsageError
            If there is no such setting.
        """
        values = flat(self.as_dict())
        if name not in values:
            raise unknown_setting(name, values)
        return values[name]

    def with_setting(self, name: str, value: object) -> Self:
        """Return the configuration with one setting changed; see `changed`."""
        return self.changed({name: value})

    def changed(self, settings: Mapping[str, object]) -> Self:
        """Return the configuration with some settings changed.

        With another tokenizer, the size of a vocabulary that was set for the one before is dropped.

        Parameters
        ----------
        settings : mapping of str to object
            By dotted name, such as ``"optim.lr"``; texts are converted, and ``"none"`` is no value. A technique is
            turned ``"on"`` or ``"off"`` by its name, ``"techniques.compile"``, and on by any of its settings.

        Raises
        ------
        UsageError
            If there is no such setting, or it does not take the value.
        """
        values = self.as_dict()
        known = flat(values)
        if settings.get("data.tokenizer", self.data.tokenizer) != self.data.tokenizer:
            values["data"]["vocab_size"] = None
        for name, value in settings.items():
            if name.startswith(TECHNIQUES):
                _set_technique(values["techniques"], name.removeprefix(TECHNIQUES), value)
                continue
            if name not in known:
                raise unknown_setting(name, known)
            section, _, field = name.rpartition(".")
            table = values[section] if section else values
            table[field] = None if value == "none" else value
        try:
            # All at once: one may only make sense with another.
            return msgspec.convert(values, type(self), strict=False)
        except msgspec.ValidationError as error:
            reason, _, place = str(error).partition(" - at `$.")
            name = place.rstrip("`")
            raise UsageError(
                f"{name} is {flat(values).get(name)!r}: {reason.lower()}",
                remedy=f"it was {known.get(name)!r}",
            ) from error


def _set_technique(techniques: dict[str, dict[str, Any]], name: str, value: object) -> None:
    """Turn a technique on, with all its settings; or off; or change one of its settings, which turns it on."""
    name, _, setting = name.partition(".")
    if setting:
        techniques[name] = {**techniques.get(name, {}), setting: value}
    elif isinstance(value, Mapping):
        techniques[name] = dict(value)
    elif value == "on":
        techniques.setdefault(name, {})
    elif value == "off":
        techniques.pop(name, None)
    else:
        raise UsageError(
            f"{TECHNIQUES}{name} is {value!r}", remedy=f'give "on", "off", or a setting: {TECHNIQUES}{name}.SETTING'
        )


def _never_evaluated(waiting: str) -> UsageError:
    return UsageError(
        f"{waiting}, and eval.every is 0: there is no evaluation before the end",
        remedy="give eval.every 250, for example, or leave that out",
    )


def setting_names() -> list[str]:
    """Return the dotted names of all settings."""
    return list(_names(Config, ""))


def _names(kind: type[msgspec.Struct], prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _names(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name."""
    return dict(_flat(values, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        # A technique without settings is one that is on; a table without techniques is nothing.
        if isinstance(value, Mapping) and (value or not prefix):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted name, as both have them."""
    before, after = flat(first.as_dict()), flat(second.as_dict())
    names = dict.fromkeys([*before, *after])
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def unknown_setting(name: str, known: Collection[str], *, path: PathLike | None = None) -> UsageError:
    """Return the error of a setting that does not exist; its remedy names the nearest ones that do."""
    near = ", ".join(nearest(name, known))
    remedy = f"did you mean {near}?" if near else "see tensorkeep train --list-settings"
    return UsageError(f"there is no setting {name!r}", path=path, remedy=remedy)


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return the names that may have been meant, likeliest first."""
    # A section that was left out is the commonest slip.
    close = [each for each in sorted(known) if each.rpartition(".")[2] == name.rpartition(".")[2]]
    return list(dict.fromkeys([*close, *difflib.get_close_matches(name, sorted(known), n=3)]))
