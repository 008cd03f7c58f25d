"""Settings of a training run (``--optim.lr``): from the flag, the environment or a TOML file.

A flag overrides the environment, which overrides the file. The options of commands get the same order in
``cli/options.py``.
"""

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorkeep.errors import UsageError
from tensorkeep.train.config.config import GROUPS, TECHNIQUES, flat, nearest, setting_names, unknown_setting

_PREFIX = "TENSORKEEP_"


def read_words(words: Sequence[str], options: Collection[str] = ()) -> tuple[str | None, dict[str, str]]:
    """Split the words of a command line into the recipe and the settings: ``--optim.lr 3e-4`` or ``--optim.lr=3e-4``.

    The words are in any order; the settings are returned by dotted name. ``options`` are other options of the command,
    such as ``"--resume"``, for the suggestions in error messages.

    Raises UsageError if a setting is unknown or has no value, or there is a second recipe.
    """
    recipe: str | None = None
    settings: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.startswith("-"):
            _check_option(name, options)
            found = value if equals else next(rest, None)
            if found is None:
                raise UsageError(f"{name} has no value", remedy=f"write {name} VALUE")
            settings[name.removeprefix("--")] = found
        elif recipe is None:
            recipe = word
        else:
            raise UsageError(f"{word!r} is not a setting", remedy="write --optim.lr 3e-4, for example")
    return recipe, settings


def _check_option(name: str, options: Collection[str]) -> None:
    settings = [f"--{each}" for each in setting_names() if each != "recipe"]
    if name in settings or name.startswith((f"--{TECHNIQUES}", f"--{GROUPS}")):
        return
    if name == "--recipe":
        raise UsageError("there is no option --recipe", remedy="give the recipe as a word: tensorkeep train RECIPE")
    near = ", ".join(f"--{each}" for each in nearest(name.lstrip("-"), [each[2:] for each in (*options, *settings)]))
    raise UsageError(
        f"there is no option {name}",
        remedy=f"did you mean {near}?" if near else "see tensorkeep train --help, and --list-settings",
    )


def given_settings(
    words: Mapping[str, object] | None = None,
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """Return the settings that the user gave, by dotted name: command line over environment over file.

    ``words`` are from `read_words`. Of the TOML file, the tables within ``[train]`` are read, such as
    ``[train.optim]``. The environment, by default that of the process, has variables such as ``TENSORKEEP_OPTIM_LR``.

    Raises UsageError if the file cannot be read, or has an unknown setting.
    """
    variables = os.environ if environment is None else environment
    found: dict[str, object] = {} if file is None else _from_file(file)
    for name in setting_names():
        if "." in name and (variable := _PREFIX + name.replace(".", "_").upper()) in variables:
            found[name] = variables[variable]
    return found | dict(words or {})


def _from_file(file: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"is not TOML: {error}", path=file, remedy="correct the file") from error
    except OSError as error:
        raise UsageError(f"cannot read the configuration: {error.strerror}", path=file) from error
    # A value outside of a table is an option of the command.
    table = tables.get("train", {})
    settings = flat({name: value for name, value in table.items() if isinstance(value, dict)})
    # The table [save] of the same file holds settings of checkpoints.
    if "save" in tables:
        settings.setdefault("checkpoint.settings", str(file.absolute()))
    known = setting_names()
    for name in settings:
        if name not in known and not name.startswith((TECHNIQUES, GROUPS)):
            raise unknown_setting(name, known, path=file)
    return settings
