"""Where a run's configuration comes from: a recipe or an earlier run, then a file, the environment, and flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import UsageError
from holdfast.train.config import Config, flat

_PREFIX = "HOLDFAST_"


def resolve(
    base: Config,
    flags: Sequence[str] = (),
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Return a configuration with what was set changed: a flag wins over the environment, that over the file.

    Parameters
    ----------
    base : Config
    flags : sequence of str
        ``--optim.lr 3e-4``, or ``--optim.lr=3e-4``.
    file : Path, optional
        A TOML file, of which the tables within ``[train]`` count: ``[train.optim]``.
    environment : mapping of str to str, optional
        ``HOLDFAST_OPTIM_LR``; that of the process by default.

    Raises
    ------
    UsageError
        If a setting is unknown, or does not take its value.
    """
    settings: dict[str, object] = {}
    if file is not None:
        settings |= flat(_tables(file))
    variables = os.environ if environment is None else environment
    for name in flat(base.as_dict()):
        if "." in name and (variable := _PREFIX + name.replace(".", "_").upper()) in variables:
            settings[name] = variables[variable]
    settings |= dict(_pairs(flags))
    return base.changed(settings)


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(flags)
    for word in words:
        name, given, value = word.partition("=")
        if not name.startswith("--") or len(name) == 2:
            raise UsageError(f"{word!r} is no setting", remedy="write --optim.lr 3e-4, for example")
        if not given:
            try:
                value = next(words)
            except StopIteration:
                raise UsageError(f"{name} has no value", remedy=f"write {name} VALUE") from None
        yield name.removeprefix("--"), value


def _tables(file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text()).get("train", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"is not TOML: {error}", path=file, remedy="correct the file") from error
    except OSError as error:
        raise UsageError(f"cannot read the configuration: {error.strerror}", path=file) from error
    return {name: value for name, value in table.items() if isinstance(value, dict)}
