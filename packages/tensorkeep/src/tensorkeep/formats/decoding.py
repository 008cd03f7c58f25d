"""Parsing untrusted bytes: errors that name the file and the tensor, and JSON without ambiguous names."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UnsupportedLeafError,
)

# The limit of the reference implementation of safetensors for headers; used for indexes as well.
MAX_HEADER_BYTES = 100_000_000


def decode_json_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object; ValueError or RecursionError if it is not one, or a name occurs twice in it."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        for name in found:
            name.encode()  # a lone surrogate is not valid Unicode, and could not be printed
        return found

    # Not by msgspec, which silently keeps the last of two equal names: which one is right is unknown.
    content = json.loads(text, object_pairs_hook=unique)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    return content


@contextmanager
def as_a_reader() -> Iterator[None]:
    """Run a reader's checks on what is saved: CorruptCheckpointError becomes UnsupportedError."""
    try:
        yield
    # Nothing on a disk is damaged here: the state itself breaks a rule of the format.
    except CorruptCheckpointError as error:
        raise UnsupportedError(
            f"cannot be saved, as a load would refuse it: {error.message}",
            path=error.path,
            name=error.name,
            remedy="change what the message names, or save it in another format",
        ) from error


@contextmanager
def missing_as(error: TensorkeepError) -> Iterator[None]:
    """Raise ``error`` if a file that the block opens does not exist."""
    try:
        yield
    except NotACheckpointError as cause:
        raise error from cause


@contextmanager
def decoding(path: PathLike | None = None, name: str | None = None, *, what: str = "is malformed") -> Iterator[None]:
    """Complete the errors of a block of code that decodes a file, or one of its tensors.

    A ValueError or RecursionError becomes a CorruptCheckpointError with the message ``what``. Errors of this package
    pass, with a missing path or name filled in.
    """
    try:
        yield
    except UnsupportedLeafError as error:
        # For a reader, a value that cannot be saved is a feature of the file that is not supported.
        raise UnsupportedError(error.message, path=path, name=error.name or name, remedy=error.remedy) from error
    except TensorkeepError as error:
        # The inner block knows the place best.
        error.path = error.path or (None if path is None else os.fspath(path))
        error.name = error.name or name
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} ({error})", path=path, name=name) from error
