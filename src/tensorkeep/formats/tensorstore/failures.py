"""TensorStore itself, imported when it is needed, and its errors as ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorkeep.errors import (
    CorruptCheckpointError,
    MissingExtraError,
    OutOfMemoryError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.io.files import store_error

_NOISE = re.compile(r"\s*\[(?:source locations|tensorstore_spec|os_error_code)='(?:[^'\\]|\\.)*'\]")
_FROM_TENSORSTORE = re.compile(r"[A-Z_]+: |Error parsing ")
_STATUS = re.compile(r"^(?:[A-Z_]+): ")
_FILE = re.compile(r'local file "([^"]*)"')
_REFUSALS = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNAUTHENTICATED", "DEADLINE_EXCEEDED")
_LONGEST = 300


def tensorstore() -> Any:
    """Return the module.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    try:
        import tensorstore as module
    except ImportError as error:
        raise MissingExtraError(
            "TensorStore's arrays need the package tensorstore, which is not installed",
            remedy="pip install 'tensorkeep[tensorstore]'",
        ) from error
    return module


@contextmanager
def reading(directory: Path, place: str, name: str | None = None) -> Iterator[None]:
    """Raise what TensorStore says while it reads as an error of ours.

    Parameters
    ----------
    directory : Path
        The checkpoint, as its user knows it.
    place : str
        How its path begins for TensorStore.
    name : str, optional
        The tensor that is read.
    """
    try:
        yield
    except TensorkeepError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError("there is not enough memory to read it", path=directory, name=name) from error
    # TensorStore raises a ValueError for nearly everything; files that nobody vouches for make it raise others.
    except (ValueError, TypeError, OverflowError, KeyError, IndexError, OSError, NotImplementedError) as error:
        raise _read_error(error, directory, place, name) from error


def _read_error(error: Exception, directory: Path, place: str, name: str | None) -> TensorkeepError:
    text = str(error)
    message, path = _plain(text, directory, place)
    number = _number(text)
    if text.startswith(_REFUSALS) or (number and not text.startswith("NOT_FOUND")):
        return StoreError(f"cannot read it: {message}", path=path, name=name)
    if text.startswith("UNIMPLEMENTED") or "is not registered" in text or "not one of the supported" in text:
        remedy = "a later TensorStore may: pip install --upgrade tensorstore"
        return UnsupportedError(f"TensorStore cannot read it: {message}", path=path, name=name, remedy=remedy)
    remedy = "the bytes on disk are not what was saved: take another checkpoint or copy"
    return CorruptCheckpointError(f"TensorStore cannot read it: {message}", path=path, name=name, remedy=remedy)


def write_error(error: BaseException, directory: Path, place: str, name: str | None = None) -> BaseException:
    """Return what TensorStore says while it writes as an error of ours, and anything else as it is."""
    if isinstance(error, OSError):
        return store_error(error, directory, "write the arrays")
    text = str(error)
    if isinstance(error, TensorkeepError) or not _FROM_TENSORSTORE.match(text):
        return error
    message, path = _plain(text, directory, place)
    number = _number(text)
    if number:
        return store_error(OSError(number, os.strerror(number)), path, "write the arrays")
    return StoreError(f"TensorStore cannot write it: {message}", path=path, name=name)


def _number(text: str) -> int | None:
    """Return the operating system's error number that a message ends with."""
    found = re.search(r"\[os_error_code='(\d+)'\]", text) or re.search(r"OS error (\d+)", text)
    return int(found[1]) if found else None


def _plain(text: str, directory: Path, place: str) -> tuple[str, Path]:
    """Return a message in one short line, and the file that it is about."""
    message = _STATUS.sub("", _NOISE.sub("", text)).splitlines()[0] if text else "no reason given"
    message = message.replace(place, "")
    found = _FILE.search(message)
    path = directory / found[1] if found and not found[1].startswith("/") else directory
    return message[:_LONGEST], path
