"""Every error that Tensorkeep raises on purpose.

Grouped by what the caller does next; each carries a stable ``kind`` and the exit code of the command line::

    TensorkeepError
    ├── DivergedError                1  the training ran away; go on from a checkpoint, more gently
    ├── UsageError                   2  change the call
    │   └── StateMismatchError       2  the state given to ``into=`` does not fit the checkpoint
    ├── StoreError                   3  the disk, the network or the memory refused
    │   └── BusyError                3  another process is writing there; wait or stop it
    ├── CorruptCheckpointError       4  do not use this checkpoint; take another one
    ├── NotACheckpointError          5  look elsewhere
    ├── DestinationExistsError       6  choose another path, or ``overwrite=True``
    └── UnsupportedError             7  this cannot be saved or read here; the message says what can be done
        ├── UnsupportedLeafError     7  one value of the state cannot be saved
        ├── TechniqueNotActiveError  7  a technique of training was asked for, and is not at work
        └── MissingExtraError        7  a ``pip install`` away
"""

from __future__ import annotations

import os
from typing import ClassVar

PathLike = str | os.PathLike[str]


class TensorkeepError(Exception):
    """Base of all errors below.

    Parameters
    ----------
    message : str
        What happened, in one sentence.
    path : path-like, optional
        The checkpoint or file concerned.
    name : str, optional
        The tensor (leaf) concerned.
    remedy : str, optional
        What to do next.

    Attributes
    ----------
    kind : str
        Stable identifier, for programs.
    exit_code : int
        What the command line exits with.
    path, name, remedy : str or None
        As given.
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(
        self, message: str, *, path: PathLike | None = None, name: str | None = None, remedy: str | None = None
    ) -> None:
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.name = name
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        where = [part for part in (self.path, self._subject()) if part]
        text = f"{': '.join(where)}: {self.message}" if where else self.message
        return f"{text}\n{self.remedy}" if self.remedy else text

    def _subject(self) -> str | None:
        return None if self.name is None else f"tensor {self.name!r}"

    def as_dict(self) -> dict[str, object]:
        """Return the error as plain values, as ``--json`` prints it."""
        return {
            "kind": self.kind,
            "message": self.message,
            "path": self.path,
            "name": self.name,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }


class DivergedError(TensorkeepError):
    """A loss or a gradient of a training run is not finite."""

    kind = "diverged"


class UsageError(TensorkeepError):
    """The call itself is wrong: an unknown option, a value out of range."""

    kind = "usage"
    exit_code = 2


class StateMismatchError(UsageError):
    """The state given to ``into=`` does not fit the checkpoint; nothing was touched.

    Attributes
    ----------
    missing, extra, different : tuple of str
        Names that only the state has, that only the checkpoint has, and that differ in shape or dtype.
    """

    kind = "state-mismatch"

    def __init__(
        self,
        message: str,
        *,
        path: PathLike | None = None,
        remedy: str | None = None,
        missing: tuple[str, ...] = (),
        extra: tuple[str, ...] = (),
        different: tuple[str, ...] = (),
    ) -> None:
        self.missing = missing
        self.extra = extra
        self.different = different
        super().__init__(message, path=path, remedy=remedy)


class StoreError(TensorkeepError):
    """The disk, the network or the memory refused: no space, no permission, an I/O error."""

    kind = "store"
    exit_code = 3


class BusyError(StoreError):
    """Another live process is writing to this place."""

    kind = "busy"


class CorruptCheckpointError(TensorkeepError):
    """The checkpoint's bytes are not what was written, or break the rules of the format.

    Attributes
    ----------
    block : int or None
        Index of the bad block within the tensor.
    """

    kind = "corrupt"
    exit_code = 4

    def __init__(
        self,
        message: str,
        *,
        path: PathLike | None = None,
        name: str | None = None,
        block: int | None = None,
        remedy: str | None = None,
    ) -> None:
        self.block = block
        super().__init__(message, path=path, name=name, remedy=remedy)

    def _subject(self) -> str | None:
        subject = super()._subject()
        return subject if self.block is None else f"{subject or 'file'} block {self.block}"

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "block": self.block}


class NotACheckpointError(TensorkeepError):
    """There is nothing at the path, or nothing that any format recognises."""

    kind = "not-a-checkpoint"
    exit_code = 5


class DestinationExistsError(TensorkeepError):
    """Something is at the destination and ``overwrite`` was not asked for."""

    kind = "destination-exists"
    exit_code = 6


class UnsupportedError(TensorkeepError):
    """A dtype, codec, format or file that this installation cannot handle."""

    kind = "unsupported"
    exit_code = 7


class UnsupportedLeafError(UnsupportedError):
    """One value of the state cannot be saved; raised before a byte is written."""

    kind = "unsupported-leaf"

    def _subject(self) -> str | None:
        return None if self.name is None else f"key {self.name!r}"


class TechniqueNotActiveError(UnsupportedError):
    """A technique of training was asked for, and was not seen at work in the first step."""

    kind = "technique-not-active"


class MissingExtraError(UnsupportedError):
    """An optional dependency is not installed; the remedy is the ``pip install`` line."""

    kind = "missing-extra"


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception is what Python or torch raises where memory is not to be had."""
    # torch's is a RuntimeError, on the CPU without a name of its own.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )
