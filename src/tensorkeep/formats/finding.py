"""Finding the format of a checkpoint: asks each format's `recognises` which one a path has.

What a format recognises (suffixes, names, first bytes) is in its package, such as ``formats/safetensors/reader.py``.
"""

import itertools
import logging
import os
import re
import stat
from pathlib import Path

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats.base import FORMATS, Format, OpenSettings, Reader
from tensorkeep.formats.model_folder import is_index, is_part
from tensorkeep.formats.probe import check_is_no_other, check_is_no_pointer, check_is_no_text
from tensorkeep.paths import as_path
from tensorkeep.storage import exists, file_mode, names_in, storage_of
from tensorkeep.storage.base import WELL_KNOWN
from tensorkeep.storage.store_commit import is_tombstone

logger = logging.getLogger(__name__)

_MOST_LOOKED_AT = 1000
_MOST_IN_STORE = 16  # each takes several requests
_MOST_NAMED = 3
_ORBAX_TREE, _ORBAX_STEP = "_METADATA", "_CHECKPOINT_METADATA"
_SHARD = re.compile(r"(?!shard-)(.+)-\d+-of-\d+\.(safetensors|bin)")


def find_format(path: PathLike) -> Format:
    """Return the format of the checkpoint at a path.

    Raises NotFoundError if nothing is there; NotACheckpointError, naming checkpoints inside of a folder, if no format
    recognises it, or several do; UnsupportedError if Orbax wrote it; StoreError if the path cannot be read.
    """
    place = _place(path)
    # Most checkpoints are native; the other formats are then neither looked up nor imported. In a store, this takes the
    # fewest requests.
    if FORMATS.get("native").recognises(place):
        return FORMATS.get("native")
    _check_existence(place)
    recognising = (format for format in FORMATS if format.recognises(place))
    found = [*itertools.islice(recognising, 1)]
    # A file is of one format; to ask the others takes requests where the place is in a store.
    if found and stat.S_ISDIR(file_mode(place)):
        found += recognising
    if len(found) > 1:
        names = [format.name for format in found]
        raise NotACheckpointError(
            f"holds checkpoints of {len(names)} formats: {' and '.join(names)}",
            path=path,
            remedy=f'name the one to read: format="{names[0]}" (--format {names[0]})',
        )
    if found:
        return found[0]
    most = _MOST_IN_STORE if storage_of(place).remote else _MOST_LOOKED_AT
    listed = names_in(place)[:most] if stat.S_ISDIR(file_mode(place)) else []
    if storage_of(place).remote and any(map(is_tombstone, listed)):
        raise NotFoundError("this step was deleted", path=path, remedy="`tensorkeep log` lists the steps of a run")
    inside = [name for name in listed if is_checkpoint(place / name)]
    if _ORBAX_TREE in listed or not inside:
        _check_is_not_orbax(place, listed)
    # What is inside may be the parts of a checkpoint whose manifest was not fetched.
    for name in listed if all(map(is_part, inside)) else sorted(WELL_KNOWN.intersection(listed)):
        check_is_no_pointer(place / name)
    if inside:
        raise _folder_error(inside, path)
    check_is_no_pointer(place)
    check_is_no_other(place)
    remedy = f"known formats: {', '.join(FORMATS.names())}"
    raise NotACheckpointError("is not a checkpoint of any known format", path=path, remedy=remedy)


def open_reader(path: PathLike, settings: OpenSettings, format: str | None = None) -> Reader:
    """Return a reader of the checkpoint at a path, of the format found there unless one is given."""
    place = _place(path)
    if format is None:
        return open_as(find_format(place), place, settings)
    _check_existence(place)
    return open_as(FORMATS.get(format), place, settings)


def open_as(format: Format, place: Path, settings: OpenSettings) -> Reader:
    """Return a reader of a checkpoint of a known format, and log its notes as warnings.

    Raises the errors of `Format.open`; NotACheckpointError instead of CorruptCheckpointError if the damaged file is
    something else by its first bytes, such as the pointer of Git LFS in the place of a file.
    """
    try:
        reader = format.open(place, settings)
    except CorruptCheckpointError as error:
        check_is_no_text(as_path(error.path or place), error)
        raise
    notes = [*reader.notes]
    part = next(filter(is_part, (place.name, place.parent.name)), None)
    if part is not None:
        notes.append(f"by the name {part}, it is one of several parts of a checkpoint: others have the other tensors")
    for note in notes:
        logger.warning("%s: %s", place, note)
    return reader


def _place(path: PathLike) -> Path:
    # `Path` takes the empty string for the current folder.
    if not os.fspath(path):
        raise UsageError("the path is empty", remedy="give the path of a checkpoint")
    return as_path(path)


def _check_existence(place: Path) -> None:
    if not exists(place):
        raise NotFoundError("does not exist", path=place, remedy="check the path")


def is_checkpoint(place: Path) -> bool:
    """Return whether a format recognises a path; False if it cannot be read."""
    try:
        return FORMATS.get("native").recognises(place) or any(format.recognises(place) for format in FORMATS)
    except TensorkeepError:
        return False


def _check_is_not_orbax(place: Path, names: list[str]) -> None:
    """Raise UnsupportedError for a folder of Orbax: a tree of arrays, a step of several, or a run of steps."""
    if _ORBAX_TREE in names:
        raise UnsupportedError(
            "is a checkpoint of Orbax, whose nested state is not read",
            path=place,
            remedy='to read its arrays as a flat dict: format="tensorstore" (--format tensorstore)',
        )
    mark = _ORBAX_TREE if _ORBAX_STEP in names else _ORBAX_STEP
    inside = [name for name in names if exists(place / name / mark)]
    if inside:
        kind = "step" if mark is _ORBAX_TREE else "run"
        raise UnsupportedError(
            f"is a {kind} of Orbax; it holds {', '.join(inside[:_MOST_NAMED])}",
            path=place,
            remedy=f"give the path of one: {place / inside[-1]}",
        )


def _folder_error(names: list[str], path: PathLike) -> NotACheckpointError:
    names = sorted(names, key=is_part)
    listed = ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")
    shard = next((found for name in names if (found := _SHARD.fullmatch(name))), None)
    if any(is_index(name, suffix) for name in names for suffix in (".safetensors", ".bin")):
        shard = None
    whole = [] if is_part(as_path(path).name) else [name for name in names if not is_part(name)]
    if shard:
        remedy = f"put their index, {shard[1]}.{shard[2]}.index.json, beside them to read them as one"
    else:
        remedy = "each is one of several parts of a checkpoint: merge them with the program that wrote them"
        if not names[1:]:
            remedy += f"; if there is only this one, it can be loaded by its own path, {as_path(path) / names[0]}"
    if whole:
        remedy = f"give the path of one: {as_path(path) / whole[0]}" + (f"; or {remedy}" if shard else "")
    return NotACheckpointError(f"is a folder, not a checkpoint; it holds {listed}", path=path, remedy=remedy)
