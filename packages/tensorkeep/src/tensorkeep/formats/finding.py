"""Finds the format of a checkpoint, opens it, and says what a path is if it is not a checkpoint."""

import itertools
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorkeep.errors import (
    CorruptCheckpointError,
    MissingExtraError,
    NotACheckpointError,
    NotFoundError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UsageError,
    installation_of,
)
from tensorkeep.formats.base import FORMATS, PACKAGE_ELSEWHERE, Format, OpenSettings, Reader
from tensorkeep.formats.model_folder import is_index, is_part
from tensorkeep.paths import as_path
from tensorkeep.storage import exists, file_mode, first_bytes, names_in, storage_of
from tensorkeep.storage.base import WELL_KNOWN
from tensorkeep.storage.store_commit import is_tombstone

logger = logging.getLogger(__name__)

_MOST_LOOKED_AT = 1000
_MOST_IN_STORE = 16  # each takes several requests
_MOST_NAMED = 3
_ORBAX_TREE, _ORBAX_STEP = "_METADATA", "_CHECKPOINT_METADATA"
# Files of formats that another package reads: their first bytes, and what a folder with the file is.
_ELSEWHERE = (
    ("checkpoint", rb"[\x80-\x8f\xde\xdf](?s:.*)(?:version|optimizer)", "a checkpoint of T5X"),
    ("manifest.ocdbt", rb"\x0c\xdb\x3a\x2a", "an OCDBT database of arrays"),
    *((name, rb"\s*\{", "a folder of Zarr arrays") for name in ("zarr.json", ".zarray", ".zgroup")),
)
_SHARD = re.compile(r"(?!shard-)(.+)-\d+-of-\d+\.(safetensors|bin)")


def find_format(path: PathLike) -> Format:
    """Return the format of the checkpoint at a path.

    Raises NotFoundError if nothing is there; NotACheckpointError if no format recognises it (the remedy names
    checkpoints inside a folder), or several do; UnsupportedError if Orbax wrote it; StoreError if it cannot be read.
    """
    place = _place(path)
    # Most checkpoints are native: the other formats are neither asked nor imported. In a store, the native format also
    # takes the fewest requests.
    if FORMATS.get("native").recognises(place):
        return FORMATS.get("native")
    _check_existence(place)
    recognising = _other_formats(place)
    # Lazily: each further format costs reads of the folder, and requests in a store.
    found = [*itertools.islice(recognising, 1)]
    # A file has one format only.
    if found and _is_folder(place):
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
    in_store = storage_of(place).remote
    listed = names_in(place)[: _MOST_IN_STORE if in_store else _MOST_LOOKED_AT] if _is_folder(place) else []
    # A deleted step leaves a tombstone, so its other objects are not a damaged checkpoint.
    if in_store and any(map(is_tombstone, listed)):
        raise NotFoundError("this step was deleted", path=path, remedy="`tensorkeep log` lists the steps of a run")
    inside = [name for name in listed if is_checkpoint(place / name)]
    if _ORBAX_TREE in listed or not inside:
        _check_not_orbax(place, listed)
    # The checkpoints inside may be shards, and their manifest a file that was not fetched.
    for name in listed if all(map(is_part, inside)) else sorted(WELL_KNOWN.intersection(listed)):
        check_not_pointer(place / name)
    if inside:
        raise _folder_error(inside, path)
    _check_not_of_another_package(place, listed)
    check_not_pointer(place)
    check_not_other(place)
    remedy = f"known formats: {', '.join(FORMATS.names())}"
    raise NotACheckpointError("is not a checkpoint of any known format", path=path, remedy=remedy)


def open_reader(path: PathLike, settings: OpenSettings, format: str | None = None) -> Reader:
    place = _place(path)
    if format is None:
        return open_as(find_format(place), place, settings)
    _check_existence(place)
    return open_as(FORMATS.get(format), place, settings)


def open_as(format: Format, place: Path, settings: OpenSettings) -> Reader:
    """Return a reader, and log its notes as warnings."""
    try:
        reader = format.open(place, settings)
    except CorruptCheckpointError as error:
        # A download may leave a web page or a pointer in the place of one shard: name the cause, not the damage.
        _check_start(_TEXTS, as_path(error.path or place), error)
        raise
    notes = [*reader.notes]
    # One shard opens without an error, and lacks the tensors of the other shards.
    part = next(filter(is_part, (place.name, place.parent.name)), None)
    if part is not None:
        notes.append(f"by the name {part}, it is one of several parts of a checkpoint: others have the other tensors")
    for note in notes:
        logger.warning("%s: %s", place, note)
    return reader


def is_checkpoint(place: Path) -> bool:
    """Return whether a format recognises a path; False if it cannot be read."""
    try:
        return FORMATS.get("native").recognises(place) or any(True for _ in _other_formats(place))
    except TensorkeepError:
        return False


def _other_formats(place: Path) -> Iterator[Format]:
    return (format for format in FORMATS if format.name != "native" and format.recognises(place))


def _place(path: PathLike) -> Path:
    # `Path` takes the empty string for the current folder.
    if not os.fspath(path):
        raise UsageError("the path is empty", remedy="give the path of a checkpoint")
    return as_path(path)


def _check_existence(place: Path) -> None:
    if not exists(place):
        raise NotFoundError("does not exist", path=place, remedy="check the path")


def _is_folder(place: Path) -> bool:
    return stat.S_ISDIR(file_mode(place))


def _check_not_orbax(place: Path, names: list[str]) -> None:
    if _ORBAX_TREE in names:
        raise UnsupportedError(
            "is a checkpoint of Orbax, whose nested state is not read",
            path=place,
            remedy='to read its arrays as a flat dict: format="tensorstore" (--format tensorstore)',
        )
    # A step of Orbax holds trees, a run holds steps.
    mark = _ORBAX_TREE if _ORBAX_STEP in names else _ORBAX_STEP
    inside = [name for name in names if exists(place / name / mark)]
    if inside:
        kind = "step" if mark is _ORBAX_TREE else "run"
        raise UnsupportedError(
            f"is a {kind} of Orbax; it holds {', '.join(inside[:_MOST_NAMED])}",
            path=place,
            remedy=f"give the path of one: {place / inside[-1]}",
        )


def _check_not_of_another_package(place: Path, names: list[str]) -> None:
    """Raise MissingExtraError for arrays of TensorStore and folders of T5X if tensorkeep-formats is not installed."""
    if "tensorstore" in FORMATS.names():
        return
    for folder in (place, *(place / name for name in names)):
        for mark, pattern, what in _ELSEWHERE:
            # The names in the folder itself are known: a store is not asked for others.
            if (folder != place or mark in names) and re.match(pattern, first_bytes(folder / mark, 64) or b""):
                holds = "is" if folder == place else f"holds {folder.name},"
                raise MissingExtraError(
                    f"{holds} {what}, which the package {PACKAGE_ELSEWHERE} reads; it is not installed",
                    path=place,
                    remedy=installation_of(PACKAGE_ELSEWHERE),
                )


def _folder_error(names: list[str], path: PathLike) -> NotACheckpointError:
    # Complete checkpoints first: the remedy names the first one.
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


_START_BYTES = 512
_DOWNLOAD = "it is the answer of a web server in the place of the file: download the file again"
_CHECK = "check the path; if it was downloaded, this may be the answer of a web server: download it again"
_AS_TORCH = 'if torch.save wrote it, read it as such: format="torch" (--format torch)'
_UNPACK = "unpack it first"
# The first bytes of files, what the files are, and the remedy. The first three replace a file of any format.
_POINTER = (
    rb"version https://git-lfs",
    "a pointer of Git LFS, which stands for the file",
    "fetch the file: git lfs pull",
)
_TEXTS = (
    _POINTER,
    (rb"(?:\xef\xbb\xbf)?\s*<(?i:!doctype html|html)\b", "an HTML page", _DOWNLOAD),
    (rb"(?:\xef\xbb\xbf)?\s*<\?xml\b", "an XML document", _DOWNLOAD),
)
_OTHERS = (
    *_TEXTS,
    (rb"PK\x03\x04", "a zip archive", _AS_TORCH),
    (rb"\x80[\x02-\x05](?!\0\0)", "a Python pickle", _AS_TORCH),
    (rb"GGUF", "a GGUF file", "convert it with the tools of llama.cpp"),
    (rb"\x89HDF\r\n", "an HDF5 file", "read it with h5py, and save its tensors"),
    (rb"\x93NUMPY", "a file of numpy.save", "read it with numpy.load, and save its arrays"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd|BZh|\xfd7zXZ\0|\x04\x22\x4d\x18", "a compressed file", _UNPACK),
    (rb"7z\xbc\xaf|(?s:.{257})ustar", "an archive", _UNPACK),
    (rb"\s*[{\[][^\0]*\Z", "a JSON text", _CHECK),
    (rb"[\t\r\n\x20-\x7e]{8,}\Z", "a text", _CHECK),
)


def check_not_pointer(path: Path) -> None:
    """Raise NotACheckpointError if a path stands for an absent file: a pointer of Git LFS, or a dangling link."""
    if exists(path) and not file_mode(path):
        raise NotACheckpointError("is a link that leads nowhere", path=path, remedy="fetch the file that it stands for")
    _check_start([_POINTER], path, None)


def check_not_other(path: Path, cause: Exception | None = None) -> None:
    """Raise NotACheckpointError if the first bytes show another kind of file, for formats without such first bytes."""
    _check_start(_OTHERS, path, cause)


def _check_start(kinds: Iterable[tuple[bytes, str, str]], path: Path, cause: Exception | None) -> None:
    start = first_bytes(path, _START_BYTES) or b""
    for pattern, what, remedy in kinds:
        if re.match(pattern, start):
            raise NotACheckpointError(f"is not a checkpoint, but {what}", path=path, remedy=remedy) from cause
