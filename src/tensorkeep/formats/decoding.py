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
def decoding(path: PathLike | None = None, name: str | None = None, *, what: str = "is malformed") -> Iterator[None]:
    """Complete the errors of a block of code that decodes a file.

    Parameters
    ----------
    path : path-like, optional
        The file that is decoded; None if an outer block adds it.
    name : str, optional
        The tensor that is decoded.
    what : str
        What a `ValueError` of the block means; its text follows in parentheses.

    Raises
    ------
    CorruptCheckpointError
        Instead of a `ValueError` or `RecursionError`.
    UnsupportedError
        Instead of an `UnsupportedLeafError`, which is for values that cannot be saved.
    TensorkeepError
        Others unchanged, with the path and the name where they had none.

    Examples
    --------
    >>> with decoding("model/.metadata", "w"):
    ...     int("x")
    Traceback (most recent call last):
        ...
    tensorkeep.errors.CorruptCheckpointError: model/.metadata: tensor 'w': is malformed (invalid literal ...)
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
