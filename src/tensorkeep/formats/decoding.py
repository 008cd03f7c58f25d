"""Errors of code that parses untrusted bytes: raised with file, tensor and error class."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tensorkeep.errors import (
    CorruptCheckpointError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UnsupportedLeafError,
)


@contextmanager
def as_a_reader() -> Iterator[None]:
    """Check with a reader's code what was written: what that calls corrupt cannot be saved, and is unsupported."""
    try:
        yield
    except CorruptCheckpointError as error:
        raise UnsupportedError(
            f"cannot be saved, as a load would refuse it: {error.message}",
            path=error.path,
            name=error.name,
            remedy="change what the message names, or save it in another format",
        ) from error


@contextmanager
def decoding(path: PathLike | None = None, name: str | None = None, *, what: str = "is malformed") -> Iterator[None]:
    """Complete the errors of a block of code that decodes a file, or a tensor of it.

    A `ValueError` or `RecursionError` is raised as CorruptCheckpointError: ``what`` it means, and its text in
    parentheses. An `UnsupportedLeafError`, which is for values that cannot be saved, becomes UnsupportedError. Other
    errors of this package pass, with the path and the name where they had none.

    Examples
    --------
    >>> with decoding("model/.metadata", "w"):
    ...     int("x")
    Traceback (most recent call last):
        ...
    tensorkeep.errors.CorruptCheckpointError: model/.metadata: tensor 'w': is malformed (invalid literal ...)
    take another checkpoint or copy
    """
    try:
        yield
    except UnsupportedLeafError as error:
        raise UnsupportedError(error.message, path=path, name=error.name or name, remedy=error.remedy) from error
    except TensorkeepError as error:
        error.path = error.path or (None if path is None else os.fspath(path))
        error.name = error.name or name
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} ({error})", path=path, name=name) from error
