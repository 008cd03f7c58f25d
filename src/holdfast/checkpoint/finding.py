"""Finding the format of a checkpoint by looking at its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from holdfast import plugins
from holdfast.errors import NotACheckpointError, PathLike
from holdfast.formats.base import Format, OpenSettings, Reader


def get_format(name: str) -> Format:
    """Return the format of a name.

    Raises
    ------
    UnsupportedError
        If there is none; the remedy names the nearest one.
    """
    return cast(Format, plugins.get("formats", name))


def find_format(path: PathLike) -> Format:
    """Return the format of what lies at a path.

    Raises
    ------
    NotACheckpointError
        If there is nothing, or nothing that a format recognises.
    """
    place = Path(path)
    if not os.path.lexists(place):
        raise NotACheckpointError("there is nothing here", path=path, remedy="check the path")
    for name in plugins.names("formats"):
        found = get_format(name)
        if found.recognises(place):
            return found
    known = ", ".join(plugins.names("formats"))
    raise NotACheckpointError(
        "is not a checkpoint of any known format",
        path=path,
        remedy=f"known formats: {known}",
    )


def open_reader(path: PathLike, settings: OpenSettings, format: str | None = None) -> Reader:
    """Return a reader of the checkpoint at a path, of the format found there unless one is given."""
    if format is not None and not os.path.lexists(path):
        raise NotACheckpointError("there is nothing here", path=path, remedy="check the path")
    chosen = find_format(path) if format is None else get_format(format)
    return chosen.open(Path(path), settings)
