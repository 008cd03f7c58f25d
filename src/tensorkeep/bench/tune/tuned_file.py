"""Writing the table ``[save]`` of a ``tensorkeep.toml``; the rest of the file is preserved.

In an existing table ``[save]``, the lines of its keys and the comments that begin with ``#:`` are replaced. Everything
else in the file is kept byte by byte. The new text is parsed before it is written, and refused if it means something
else than intended.
"""

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorkeep.checkpoint.settings import KEYS, TABLE, parse
from tensorkeep.errors import UsageError
from tensorkeep.storage.commit import replace_file
from tensorkeep.storage.direct_io import store_errors

_MARK = "#:"
_MOST_BYTES = 1024**2

_OWN_LINE = re.compile(rf"\s*(?:{_MARK}|(?:{'|'.join(KEYS)})\s*=)")
_THIS_TABLE = re.compile(rf"\s*\[\s*{TABLE}\s*\]\s*(?:#.*)?$")
_ANY_TABLE = re.compile(r"\s*\[")


def write_tuned(path: Path, values: Mapping[str, object], comments: Sequence[str]) -> str:
    """Write or change a ``tensorkeep.toml`` atomically, and return its text.

    The comments are lines above the values of the table ``[save]``.

    Raises UsageError if the existing file cannot be parsed, or cannot be changed without loss; StoreError if it cannot
    be read or written.
    """
    text = with_table(read_text(path), values, comments, path)
    replace_file(path, text.encode())
    return text


def check_writable(path: Path) -> None:
    """Check that a ``tensorkeep.toml`` can be written, by creating and removing a file in its folder.

    Raises UsageError if the folder does not exist; StoreError if no file can be created in it.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        remedy = "make the folder, or give another file with --out"
        raise UsageError(f"the folder {str(target.parent)!r} does not exist", path=path, remedy=remedy)
    with store_errors(path, "write the settings"), tempfile.NamedTemporaryFile(dir=target.parent):
        pass


def read_text(path: Path) -> str:
    """Return the text of a file, or an empty one if it does not exist.

    Raises UsageError if it is not a text file; StoreError if it cannot be read.
    """
    with store_errors(path, "read the settings"):
        if not path.exists():
            return ""
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise UsageError("is not a settings file", path=path, remedy="give another one with --out")
        content = path.read_bytes()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file") from error


def with_table(text: str, values: Mapping[str, object], comments: Sequence[str], path: Path) -> str:
    """Return the text of a file with a table ``[save]`` that holds these values and no others.

    Raises UsageError if the text cannot be parsed, or the table cannot be replaced line by line.
    """
    try:
        before = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file, or remove it") from error
    parse(before, path)  # Refuses unknown keys, as a save does.
    # JSON's strings, integers and booleans are also TOML's.
    lines = [
        *(f"{_MARK} {line}" for line in comments),
        *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
    ]
    changed = _replace_table(text, lines)
    try:
        after = tomllib.loads(changed)
    except ValueError:
        after = {}
    if after != {**before, TABLE: dict(values)}:
        raise UsageError(
            f"the table [{TABLE}] is written in a way that cannot be changed without loss",
            path=path,
            remedy=f"write it below a line [{TABLE}], one key a line, or remove it",
        )
    return changed


def _replace_table(text: str, block: list[str]) -> str:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if _THIS_TABLE.match(line):
            rest = lines[number + 1 :]
            end = next((index for index, each in enumerate(rest) if _ANY_TABLE.match(each)), len(rest))
            kept = [each for each in rest[:end] if not _OWN_LINE.match(each)]
            return "\n".join([*lines[: number + 1], *block, *kept, *rest[end:]])
    gap = [] if not text else ["", ""] if not text.endswith("\n") else [""]
    return text + "\n".join([*gap, f"[{TABLE}]", *block, ""])
