"""Reading and writing results files.

A results file may come from a stranger: its size and depth are limited, every field and number is validated, and
unprintable characters, which could drive a terminal, are replaced.
"""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.bench.results import KIND, SCHEMA, Results
from tensorkeep.errors import CorruptCheckpointError, NotFoundError, StoreError, UnsupportedError, UsageError
from tensorkeep.storage.commit import replace_file
from tensorkeep.structs import prepared

FILE_NAME = "results.json"
MAX_BYTES = 64 * 1024**2
MAX_DEPTH = 50
_LARGEST_INTEGER = 2**63


def read_results(path: str | os.PathLike[str], *, printable: bool = True) -> Results:
    """Return the results of a run, validated, from a results file or the folder that holds ``results.json``.

    Unless ``printable`` is false, every character that is not printable is replaced. Only a run that is resumed needs
    the texts as the file has them, because its settings may name odd paths.

    Raises NotFoundError if nothing is there; UsageError if it is a file of another kind; UnsupportedError if a later
    version wrote it, or it is too large; CorruptCheckpointError if it breaks the schema; StoreError if the operating
    system refuses.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    content = _content(file)
    try:
        document = _checked(msgspec.json.decode(content), printable)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _corrupt(file, error) from None
    kind, schema = (document.get("kind"), document.get("schema")) if isinstance(document, dict) else (None, None)
    if kind != KIND:
        raise UsageError(
            "is not a results file of Tensorkeep", path=file, remedy="give the results.json of `tensorkeep bench`"
        )
    if not isinstance(schema, int) or schema > SCHEMA:
        message = f"has schema {schema}; this version reads up to {SCHEMA}"
        raise UnsupportedError(message, path=file, remedy="install a later Tensorkeep")
    try:
        results = msgspec.convert(document, prepared(Results))
        _check_references(results)
    except (msgspec.ValidationError, ValueError) as error:
        raise _corrupt(file, error) from None
    return results


def write_results(results: Results, path: Path) -> None:
    """Replace the file atomically and durably; numbers that are not finite become null.

    Raises StoreError if the file cannot be written.
    """
    replace_file(path, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def printable(text: str) -> str:
    """Return a text on one line, every unprintable character replaced by a blank or its escape sequence."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode() for c in text)


def _content(file: Path) -> bytes:
    try:
        # O_NONBLOCK: opening a named pipe must not block.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as opened:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
            content = opened.read(MAX_BYTES + 1) if regular else b""
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            remedy = "give the folder that `tensorkeep bench` wrote; a first run starts without --resume"
            raise NotFoundError("the results file does not exist", path=file, remedy=remedy) from None
        raise StoreError(f"cannot read the results: {error.strerror}", path=file) from error
    if not regular:
        raise UsageError("is not a regular file", path=file, remedy="give a results.json, or its folder")
    if len(content) > MAX_BYTES:
        raise UnsupportedError(f"is larger than {MAX_BYTES >> 20} MiB", path=file, remedy="give a results.json")
    return content


def _checked(value: Any, clean: bool, depth: int = 0) -> Any:
    """Return JSON values with printable texts, if asked; raise ValueError if they are too deep or too large."""
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, str):
        return printable(value) if clean else value
    if isinstance(value, dict):
        return {_checked(key, clean): _checked(item, clean, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_checked(item, clean, depth + 1) for item in value]
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise ValueError("a number is out of range")
    return value


def _check_references(results: Results) -> None:
    """Raise ValueError if names are ambiguous or refer to nothing."""
    arms = {arm.name for arm in results.arms}
    if len(arms) < len(results.arms) or len({one.name for one in results.measures}) < len(results.measures):
        raise ValueError("two arms or two measures have the same name")
    if sum(arm.role == "baseline" for arm in results.arms) > 1:
        raise ValueError("two arms have the role of the baseline")
    if results.experiment.baseline != results.baseline:
        raise ValueError(f"its baseline {results.experiment.baseline!r} is not an arm with that role")
    for cell in results.cells:
        if cell.arm not in arms:
            raise ValueError(f"a cell belongs to {cell.arm[:200]!r}, which is not an arm")


def _corrupt(file: Path, error: Exception) -> CorruptCheckpointError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else printable(str(error))
    remedy = "measure again, or use another copy of the file"
    return CorruptCheckpointError(f"is not a valid results file: {reason}", path=file, remedy=remedy)
