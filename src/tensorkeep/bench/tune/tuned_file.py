"""Putting the table ``[save]`` into a ``tensorkeep.toml`` without touching what else a person wrote there.

Of a table ``[save]`` that is there, the lines of its four keys and the comments that begin with ``#:`` are replaced;
whatever else stands in the file stays, byte by byte. The new text is parsed before it is written: if it would mean
anything else than intended, it is not.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.settings import FILE_NAME, KEYS, TABLE, parse
from tensorkeep.errors import UsageError
from tensorkeep.io.files import store_error, sync_directory, write_small

_MARK = "#:"
_MOST_BYTES = 1024**2

_OWN_LINE = re.compile(rf"\s*(?:{_MARK}|(?:{'|'.join(KEYS)})\s*=)")
_THIS_TABLE = re.compile(rf"\s*\[\s*{TABLE}\s*\]\s*(?:#.*)?$")
_ANY_TABLE = re.compile(r"\s*\[")


def write_tuned(path: Path, values: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Write or change a ``tensorkeep.toml``, whole or not at all, and return its text.

    Parameters
    ----------
    path : Path
    values : mapping of str to str, int or bool
        The table ``[save]``, from now on.
    comments : sequence of str
        Lines to write above the values.

    Raises
    ------
    UsageError
        If the file that is there is not understood, or cannot be changed without loss.
    StoreError
        If it cannot be read or written.
    """
    text = with_table(read_text(path), values, comments, path)
    # A link may lead to another file system, and a file is put in place within one only.
    target = Path(os.path.realpath(path))
    temporary = _beside(target)
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else None
        try:
            write_small(temporary, text.encode())
            if mode is not None:
                temporary.chmod(mode)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(target.parent)
    except OSError as error:
        raise store_error(error, path, "write the settings") from error
    return text


def check_writable(path: Path) -> None:
    """Make sure that a ``tensorkeep.toml`` can be written, by creating a file in its folder and removing it again.

    Raises
    ------
    UsageError
        If there is no such folder.
    StoreError
        If nothing can be created in it.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        remedy = "make the folder, or give another file with --out"
        raise UsageError(f"there is no folder {str(target.parent)!r} to write it to", path=path, remedy=remedy)
    temporary = _beside(target)
    try:
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise store_error(error, path, "write the settings") from error


def _beside(target: Path) -> Path:
    return target.with_name(f".{FILE_NAME}.{secrets.token_hex(4)}")


def read_text(path: Path) -> str:
    """Return the text of a file, or nothing if there is none.

    Raises
    ------
    UsageError
        If it is no text, or no file.
    """
    try:
        if not path.exists():
            return ""
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            raise UsageError("is not a file of settings", path=path, remedy="give another one with --out")
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file") from error
    except OSError as error:
        raise store_error(error, path, "read the settings") from error


def with_table(text: str, values: Mapping[str, Any], comments: Sequence[str], path: Path) -> str:
    """Return a file's text with the table ``[save]`` saying these values and nothing else.

    Raises
    ------
    UsageError
        If the text is not understood, or the table cannot be found in it line by line.
    """
    before = _tables(text, path)
    parse(before, path)  # a key that nobody knows is an error, as it would be to a save
    changed = _replaced(text, [*(f"{_MARK} {line}" for line in comments), *_lines(values)])
    try:
        after = tomllib.loads(changed)
    except ValueError:
        after = {}
    if after != {**before, TABLE: dict(values)}:
        raise UsageError(
            f"the table [{TABLE}] is written in a way that is not changed without loss",
            path=path,
            remedy=f"write it below a line [{TABLE}], one key a line, or remove it",
        )
    return changed


def _tables(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not TOML: {error}", path=path, remedy="correct the file, or remove it") from error


def _lines(values: Mapping[str, Any]) -> list[str]:
    # JSON's strings, numbers and booleans are TOML's, as far as these keys go.
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


def _replaced(text: str, block: list[str]) -> str:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if _THIS_TABLE.match(line):
            return "\n".join([*lines[: number + 1], *block, *_kept(lines[number + 1 :])])
    gap = [] if not text else ["", ""] if not text.endswith("\n") else [""]
    return text + "\n".join([*gap, f"[{TABLE}]", *block, ""])


def _kept(lines: list[str]) -> list[str]:
    """Return what stays of the lines after the table's first: others' lines, and all from the next table on."""
    end = next((number for number, line in enumerate(lines) if _ANY_TABLE.match(line)), len(lines))
    kept = [line for line in lines[:end] if not _OWN_LINE.match(line)]
    return [*kept, *lines[end:]]
