"""Finding the format of a checkpoint: asks each format's `recognises` which one a path has.

What a format recognises (suffixes, names, first bytes) is in its package, such as ``formats/safetensors/reader.py``.
"""

import os
import re
import stat
from pathlib import Path

from tensorkeep.errors import NotACheckpointError, NotFoundError, PathLike, TensorkeepError, UsageError
from tensorkeep.formats.base import FORMATS, Format, OpenSettings, Reader
from tensorkeep.formats.native import FORMAT as NATIVE
from tensorkeep.formats.probe import exists, file_mode, names_in
from tensorkeep.io.objects.store_commit import is_tombstone
from tensorkeep.paths import StorePath, as_path

_MOST_LOOKED_AT = 1000
_MOST_IN_STORE = 16  # each takes several requests
_MOST_NAMED = 3


def find_format(path: PathLike) -> Format:
    """Return the format of the checkpoint at a path.

    Raises NotFoundError if nothing is there; NotACheckpointError, naming checkpoints inside of a folder, if no format
    recognises it; StoreError if the path cannot be read.
    """
    place = _place(path)
    # Most checkpoints are native; the other formats are then neither looked up nor imported. In a store, this takes the
    # fewest requests.
    if NATIVE.recognises(place):
        return NATIVE
    _check_existence(place)
    found = _recognised(place)
    if found is not None:
        return found
    most = _MOST_IN_STORE if isinstance(place, StorePath) else _MOST_LOOKED_AT
    listed = names_in(place)[:most] if stat.S_ISDIR(file_mode(place)) else []
    if isinstance(place, StorePath) and any(map(is_tombstone, listed)):
        raise NotFoundError("this step was deleted", path=path, remedy="`tensorkeep log` lists the steps of a run")
    inside = [name for name in listed if is_checkpoint(place / name)]
    if inside:
        raise _folder_error(inside, path)
    remedy = f"known formats: {', '.join(FORMATS.names())}"
    raise NotACheckpointError("is not a checkpoint of any known format", path=path, remedy=remedy)


def open_reader(path: PathLike, settings: OpenSettings, format: str | None = None) -> Reader:
    """Return a reader of the checkpoint at a path, of the format found there unless one is given."""
    place = _place(path)
    if format is None:
        return find_format(place).open(place, settings)
    _check_existence(place)
    return FORMATS.get(format).open(place, settings)


def _place(path: PathLike) -> Path:
    # `Path` takes the empty string for the current folder.
    if not os.fspath(path):
        raise UsageError("the path is empty", remedy="give the path of a checkpoint")
    return as_path(path)


def _check_existence(place: Path) -> None:
    if not exists(place):
        raise NotFoundError("does not exist", path=place, remedy="check the path")


def _recognised(place: Path) -> Format | None:
    if NATIVE.recognises(place):
        return NATIVE
    return next((found for found in FORMATS if found.recognises(place)), None)


def is_checkpoint(place: Path) -> bool:
    """Return whether a format recognises a path; False if it cannot be read."""
    try:
        return _recognised(place) is not None
    except TensorkeepError:
        return False


def _folder_error(names: list[str], path: PathLike) -> NotACheckpointError:
    listed = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")
    remedy = f"give the path of one: {as_path(path) / names[0]}"
    shard = next((found for name in names if (found := re.fullmatch(r"(.+)-\d+-of-\d+\.safetensors", name))), None)
    if shard:
        remedy += f"; or put their index, {shard[1]}.safetensors.index.json, beside them to read them as one"
    return NotACheckpointError(f"is a folder, not a checkpoint; it holds {listed}", path=path, remedy=remedy)
