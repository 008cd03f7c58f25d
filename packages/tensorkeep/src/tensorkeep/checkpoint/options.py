"""Options that several calls share: threads, budgets, devices, progress, and the settings file of saves."""

import difflib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorkeep.codecs.base import CODECS
from tensorkeep.errors import PathLike, StoreError, UsageError, did_you_mean
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.torch_file.unpickle import Allow, allowed_names
from tensorkeep.paths import checked_path
from tensorkeep.storage import first_bytes, storage_of
from tensorkeep.storage.buffers import DEFAULT_BUDGET, MINIMUM_BUDGET, BufferPool
from tensorkeep.storage.parallel import Progress, default_threads
from tensorkeep.storage.system_errors import store_errors
from tensorkeep.units import format_bytes, format_least_bytes, parse_bytes

# They wait for the network, however few the processors are; a small memory budget allows fewer.
STORE_THREADS = 8
# Bytes, as a number or as a text such as ``"256MiB"``.
MemorySize = int | str


# Classes of objects in pickles that are read as dicts, or nothing.
AllowOption = Allow | None


def open_settings(
    memory_budget: MemorySize = DEFAULT_BUDGET,
    *,
    verify: bool = True,
    page_cache: bool = False,
    allow: AllowOption = None,
) -> OpenSettings:
    """Raises UsageError if the budget is not a size, or below 64 MiB, or if ``allow`` has no name of a class."""
    allowed = frozenset[str]() if allow is None else allowed_names(allow)
    return OpenSettings(verify, BufferPool(parse_bytes(memory_budget)), page_cache, allowed)


def thread_count(threads: int | None, source: Path | None = None) -> int:
    """The default is `default_threads`, or `STORE_THREADS` for a ``source`` in an object store. UsageError below 1."""
    if threads is None:
        return STORE_THREADS if source is not None and storage_of(source).remote else default_threads()
    if threads < 1:
        raise UsageError(f"threads is {threads}", remedy="give 1 or more")
    return threads


# Progress.

# A callback, True for a progress bar, or nothing.
ProgressOption = Progress | bool | None
# From this many terminal columns, a bar also has the rate and the remaining time.
_FULL_WIDTH = 72


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which has no terminal and shows bars nevertheless."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def progress_bar(doing: str, *, of_bytes: bool = True) -> Iterator[Progress]:
    """Draw a bar on stderr while the block runs; yield a callback that takes (bytes or others done, in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.progress import TransferSpeedColumn as Speed

    # In a notebook, rich draws into the output of the cell.
    console = Console() if in_notebook() else Console(stderr=True)
    done = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), done]
    if console.width >= _FULL_WIDTH:
        columns += [*([Speed()] if of_bytes else []), TimeRemainingColumn()]
    # Transient: the bar disappears, and the output of the program stays as it was.
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def drawn(progress: ProgressOption, doing: str) -> Iterator[Progress | None]:
    """Yield the callback to use: the given function; for True, a bar on a terminal or in a notebook; or None."""
    if not isinstance(progress, bool):
        yield progress
    elif progress and (sys.stderr.isatty() or in_notebook()):
        with progress_bar(doing) as callback:
            yield callback
    else:
        yield None


def callback_only(progress: ProgressOption) -> Progress | None:
    """The callback of a background save, which draws nothing. Raises UsageError for True."""
    if progress is True:
        text = "progress=True draws a bar, which a save in the background would draw over the output of the program"
        raise UsageError(text, remedy="give a function of (bytes done, bytes in all)")
    return None if progress is False else progress


# The table ``[save]`` of a settings file: how to save where the call leaves it open.
#
# ``tensorkeep tune checkpoint`` writes such a file, by default ``tensorkeep.toml``. It is read where a call names it
# (``settings=``, or ``-C`` on the command line); no file is ever searched for. Arguments of the call override the
# file; an invalid value is an error that names the file and the key. Other tables belong to the command line.

FILE_NAME = "tensorkeep.toml"
TABLE = "save"
KEYS = ("compression", "threads", "direct_io", "memory_budget")
_MOST_THREADS = 1024
_MOST_BYTES = 1024**2
_IN_TOML = (
    "write its values as options, such as tensorkeep train RECIPE --loop.batch_size 8, or in a TOML file for -C, as "
    "the line batch_size = 8 below [train.loop]; tensorkeep train RECIPE --list-settings shows the names"
)
# Files of other formats are read by other tools, which do not know our codecs.
_ONLY_FOR = {"compression": ("native",), "direct_io": ("native", "safetensors")}


@dataclass(frozen=True, slots=True)
class SaveTable:
    """A checked table ``[save]``, and the file that it comes from; None for a key that it lacks. Sizes are in bytes."""

    compression: str | None = None
    threads: int | None = None
    direct_io: bool | None = None
    memory_budget: int | None = None
    path: str | None = field(default=None, compare=False)

    def values_for(self, format: str) -> dict[str, Any]:
        found = {key: getattr(self, key) for key in KEYS if format in _ONLY_FOR.get(key, (format,))}
        return {key: value for key, value in found.items() if value is not None}


# A settings file, or the content of a table ``[save]``, such as ``{"compression": "lossless"}``.
SettingsSource = PathLike | Mapping[str, object] | SaveTable


def read_settings(settings: SettingsSource | None) -> SaveTable:
    """Raises UsageError if the settings are not understood; StoreError if a file cannot be read."""
    if settings is None:
        return SaveTable()
    if isinstance(settings, SaveTable):
        return settings
    if isinstance(settings, Mapping):
        return parse({TABLE: dict(settings)}, None)
    path = Path(checked_path(settings))
    # One byte more than allowed shows that the file is too large.
    content = first_bytes(path, _MOST_BYTES + 1)
    if content is None:
        with store_errors(path, "read the settings"):
            path.stat()
        raise UsageError("is not a regular file", path=path, remedy="give the path of a settings file")
    return parse(_tables_of(content, path), path)


def named_tables(path: Path) -> dict[str, Any]:
    """The tables of a file that the user of a command has named. Raises UsageError, also if it cannot be read."""
    try:
        # Also a pipe, as shells make them for ``<(...)``, and /dev/null, which overrides a file of the environment.
        with store_errors(path, "read the settings"), path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except StoreError as error:
        raise UsageError(error.message, path=path) from error
    return _tables_of(content, path)


def _tables_of(content: bytes, path: Path) -> dict[str, Any]:
    """Raises UsageError if the content is not TOML."""
    if len(content) > _MOST_BYTES:
        raise UsageError(f"is larger than {format_bytes(_MOST_BYTES)}", path=path, remedy="check the file")
    try:
        return tomllib.loads(content.decode())
    # The parser recurses at each bracket, and `int` refuses very long numbers.
    except (ValueError, RecursionError) as error:
        if path.suffix.lower() in (".yaml", ".yml", ".json"):
            message, remedy = f"is {path.suffix[1:].upper()}; settings are read from TOML", _IN_TOML
        else:
            message, remedy = f"is not TOML: {error}", "correct the file"
        raise UsageError(message, path=path, remedy=remedy) from error


def parse(tables: Mapping[str, Any], path: Path | None) -> SaveTable:
    """Raises UsageError, which names the file and the key."""
    for key, table in tables.items():
        if not isinstance(table, dict):
            remedy = f"move it into the table [{TABLE}]" if key in KEYS else "move it into a table, such as [train]"
            raise UsageError(f"{key!r} is not in a table", path=path, remedy=remedy)
        # A mistyped table would be ignored without notice: other tables belong to the command line.
        if key != TABLE and difflib.get_close_matches(key, [TABLE], cutoff=0.75):
            raise UsageError(f"table [{key}] is unknown", path=path, remedy=f"did you mean [{TABLE}]?")
    given: dict[str, Any] = tables.get(TABLE, {})
    for key, value in given.items():
        if key not in KEYS:
            remedy = did_you_mean(str(key).replace("-", "_"), KEYS)
            raise UsageError(f"[{TABLE}] has an unknown key {key!r}", path=path, remedy=remedy)
        expected = _expected(key, value)
        if expected is not None:
            raise UsageError(f"[{TABLE}] {key} is {value!r:.80}", path=path, remedy=expected)
    budget = given.get("memory_budget")
    checked = {**given, "memory_budget": None if budget is None else parse_bytes(budget)}
    return SaveTable(**checked, path=None if path is None else os.fspath(path))


def _expected(key: str, value: object) -> str | None:
    """The remedy for a value that a key cannot have, or None if it can."""
    if key == "compression":
        known = ["none", "lossless", "auto", *CODECS.names()]
        return None if value in known else did_you_mean(str(value), known, "choose one of")
    if key == "direct_io":
        return None if isinstance(value, bool) else "give true or false"
    # A bool is an int for Python.
    number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if key == "threads":
        fine = number is not None and 1 <= number <= _MOST_THREADS
        return None if fine else f"give an integer from 1 to {_MOST_THREADS}"
    with suppress(UsageError):
        if parse_bytes(value if isinstance(value, str) else number or 0) >= MINIMUM_BUDGET:
            return None
    return f'give bytes, or a size such as "512MiB", of at least {format_least_bytes(MINIMUM_BUDGET)}'
