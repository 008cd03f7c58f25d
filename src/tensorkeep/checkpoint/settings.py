"""``tensorkeep.toml``: how checkpoints are saved in a folder and those below it, where the call does not say.

A save looks for the nearest ``tensorkeep.toml`` from the destination's folder upwards, as far as the user's home,
another file system or the root, and follows its table ``[save]``. Arguments of the call win over the file.
Nothing in a file is passed over: what cannot be followed is an error that names the file and the key. Other
tables are the command line's."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.io.buffers import MINIMUM_BUDGET
from tensorkeep.io.files import store_error
from tensorkeep.units import format_bytes, parse_bytes

FILE_NAME = "tensorkeep.toml"
TABLE = "save"

MOST_THREADS = 1024
_MOST_BYTES = 1024**2
_MOST_FOLDERS = 64

# Files of other formats are made for other tools, which know neither codecs nor this file.
_ONLY_FOR = {"compression": ("native",), "direct_io": ("native", "safetensors")}


@dataclass(frozen=True, slots=True)
class SaveTable:
    """The table ``[save]``; None for what it does not say.

    Attributes
    ----------
    compression : str or None
    threads : int or None
    direct_io : bool or None
    memory_budget : int or None
        In bytes.
    """

    compression: str | None = None
    threads: int | None = None
    direct_io: bool | None = None
    memory_budget: int | None = None


KEYS = tuple(field.name for field in fields(SaveTable))


@dataclass(frozen=True, slots=True)
class Choice:
    """How to save: what the call says, else what the file says, else the default.

    Attributes
    ----------
    compression : str
    threads : int or None
        None leaves it to the machine.
    memory_budget : int, str or None
        None leaves it to the kind of save.
    options : dict
        The format's own, ``direct_io`` among them.
    settings_from : str or None
        The file that was followed in at least one of them.
    """

    compression: str
    threads: int | None
    memory_budget: MemorySize | None
    options: dict[str, Any]
    settings_from: str | None


def choose(
    destination: PathLike,
    format: str,
    *,
    compression: str | None,
    threads: int | None,
    memory_budget: MemorySize | None,
    options: Mapping[str, Any],
    follow: Collection[str] = KEYS,
) -> Choice:
    """Return how to save to a destination; None stands for what the call does not say.

    Of the file, the keys in ``follow`` count.

    Raises
    ------
    UsageError
        If there is a file that cannot be followed.
    """
    given = {"compression": compression, "threads": threads, "memory_budget": memory_budget}
    given["direct_io"] = options.get("direct_io")
    path = find(destination)
    table = SaveTable() if path is None else read(path)
    taken = {
        key: getattr(table, key)
        for key, value in given.items()
        if value is None
        and key in follow
        and getattr(table, key) is not None
        and format in _ONLY_FOR.get(key, (format,))
    }
    known = {**given, **taken}
    return Choice(
        compression="none" if known["compression"] is None else known["compression"],
        threads=known["threads"],
        memory_budget=known["memory_budget"],
        options={**options, **({"direct_io": taken["direct_io"]} if "direct_io" in taken else {})},
        settings_from=os.fspath(path) if path is not None and taken else None,
    )


def find(destination: PathLike) -> Path | None:
    """Return the nearest ``tensorkeep.toml`` from a destination's folder upwards.

    The walk ends with the user's home, with the last folder of the file system, and where a folder cannot be searched.
    In a folder that everybody may write in, such as ``/tmp``, only a file of the user's own, or of root, counts.
    """
    for folder in _folders(Path(os.path.realpath(destination)).parent):
        path = folder / FILE_NAME
        try:
            # Of a link: whoever made it chose what it leads to.
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
        if _counts(status, folder):
            return path
    return None


def _counts(status: os.stat_result, folder: Path) -> bool:
    return status.st_uid in (os.geteuid(), 0) or not folder.stat().st_mode & stat.S_IWOTH


def _folders(folder: Path) -> Iterator[Path]:
    """Yield folders upwards; those that do not exist yet have no file either, and are passed by."""
    home = os.path.realpath(os.path.expanduser("~"))
    device: int | None = None
    for place in [folder, *folder.parents][:_MOST_FOLDERS]:
        try:
            found = place.stat().st_dev
        except FileNotFoundError:
            continue
        except OSError:
            return
        if device not in (None, found):
            return
        device = found
        yield place
        if os.fspath(place) == home:
            return


def read(path: Path) -> SaveTable:
    """Return what a ``tensorkeep.toml`` says of saving.

    Raises
    ------
    UsageError
        If it is not TOML, or says something that is not understood.
    StoreError
        If it cannot be read.
    """
    return parse(_load(_content(path), path), path)


def parse(tables: Mapping[str, Any], path: Path) -> SaveTable:
    """Return the checked table ``[save]`` of a parsed file.

    Raises
    ------
    UsageError
        Naming the file and the key.
    """
    for key, table in tables.items():
        if not isinstance(table, dict):
            remedy = f"put it below a line [{TABLE}]" if key in KEYS else "it holds tables only"
            raise UsageError(f"{key!r} stands in no table", path=path, remedy=remedy)
        if key != TABLE and difflib.get_close_matches(key, [TABLE], cutoff=0.75):
            raise UsageError(f"there is no table {key!r}", path=path, remedy=f"did you mean [{TABLE}]?")
    given = tables.get(TABLE, {})
    for key in given:
        if key not in KEYS:
            near = difflib.get_close_matches(key.replace("-", "_"), KEYS, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KEYS)}"
            raise UsageError(f"[{TABLE}] has an unknown key {key!r}", path=path, remedy=remedy)
    checked: dict[str, Any] = {key: _CHECKS[key](value, path) for key, value in given.items()}
    return SaveTable(**checked)


def _content(path: Path) -> str:
    try:
        # Without O_NONBLOCK, a pipe of that name would hold a save for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_opened(fd, path)
            with os.fdopen(fd, "rb", closefd=False) as file:
                content = file.read(_MOST_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as error:
        raise store_error(error, path, "read how to save here") from error
    if len(content) > _MOST_BYTES:
        raise UsageError(f"is larger than {format_bytes(_MOST_BYTES)}", path=path, remedy="check the file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file") from error


def _check_opened(fd: int, path: Path) -> None:
    """Refuse what is no file, and what is not the file that `find` saw: it may have been exchanged since."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("is not a regular file", path=path, remedy="remove or rename it")
    if not _counts(status, path.parent):
        remedy = "remove it, or put a copy of your own there"
        raise UsageError("is somebody else's, in a folder that everybody may write in", path=path, remedy=remedy)


def _load(text: str, path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    # The parser calls itself for each bracket, and gives numbers to `int`, which refuses very long ones.
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file, or remove it") from error


def _wrong(key: str, value: object, path: Path, remedy: str) -> UsageError:
    return UsageError(f"[{TABLE}] {key} is {value!r:.80}", path=path, remedy=remedy)


def _compression(value: object, path: Path) -> str:
    known = ["none", "lossless", "auto"]
    if isinstance(value, str) and (value in known or value in CODECS.names()):
        return value
    known += CODECS.names()
    near = difflib.get_close_matches(str(value), known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(known)}"
    raise _wrong("compression", value, path, remedy)


def _threads(value: object, path: Path) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_THREADS:
        return value
    raise _wrong("threads", value, path, f"give a whole number from 1 to {MOST_THREADS}")


def _direct_io(value: object, path: Path) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong("direct_io", value, path, "give true or false")


def _memory_budget(value: object, path: Path) -> int:
    remedy = f'give bytes, or a text such as "512MiB", of at least {format_bytes(MINIMUM_BUDGET)}'
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _wrong("memory_budget", value, path, remedy)
    try:
        size = parse_bytes(value)
    except UsageError as error:
        raise _wrong("memory_budget", value, path, remedy) from error
    if size < MINIMUM_BUDGET:
        raise _wrong("memory_budget", value, path, remedy)
    return size


_CHECKS: dict[str, Callable[[object, Path], object]] = {
    "compression": _compression,
    "threads": _threads,
    "direct_io": _direct_io,
    "memory_budget": _memory_budget,
}
