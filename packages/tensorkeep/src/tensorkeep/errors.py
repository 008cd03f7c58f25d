"""Every error class of Tensorkeep, and warnings.

The tree groups errors by what the caller does next. An error has a stable ``kind``, the exit code of the command line,
and a built-in exception as a second base, so that ``except FileNotFoundError`` works as expected::

    TensorkeepError
    ├── DivergedError (ArithmeticError)             1  training diverged; resume from a checkpoint with gentler settings
    ├── UsageError (ValueError)                     2  change the call
    │   ├── StateMismatchError                      2  the state given to ``into=`` does not fit the checkpoint
    │   └── TensorNotFoundError (KeyError)          2  an open checkpoint has no tensor of this name
    ├── StoreError (OSError)                        3  the disk or the network failed
    │   └── BusyError (BlockingIOError)             3  another process is writing there; wait or stop it
    ├── OutOfMemoryError (MemoryError)              3  an allocation failed, or a memory budget is too small
    ├── RanksDisagreeError (RuntimeError)           3  the ranks of one job passed different arguments, or one failed
    ├── CorruptCheckpointError (ValueError)         4  do not use this checkpoint; take another one
    ├── NotACheckpointError (ValueError)            5  something else is at the path
    │   └── NotFoundError (FileNotFoundError)       5  nothing is at the path
    ├── DestinationExistsError (FileExistsError)    6  choose another path, or ``overwrite=True``
    └── UnsupportedError (NotImplementedError)      7  cannot be saved or read here; the message names a remedy
        ├── UnsupportedLeafError (TypeError)        7  one value of the state cannot be saved
        ├── TechniqueNotActiveError                 7  a training technique was requested and is not active
        └── MissingExtraError (ImportError)         7  an optional package is not installed
"""

import errno as codes
import functools
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, ParamSpec, TypedDict, TypeVar, Unpack

PathLike = str | os.PathLike[str]


class Context(TypedDict, total=False):
    """Keyword arguments of errors: where an error happened, and what to do about it."""

    path: PathLike | None
    name: str | None
    remedy: str | None
    errno: int | None  # of a StoreError
    block: int | None  # of a CorruptCheckpointError
    missing: tuple[str, ...]  # this and the following: of a StateMismatchError
    extra: tuple[str, ...]
    different: tuple[str, ...]


class TensorkeepError(Exception):
    """Base of all errors below.

    Parameters
    ----------
    message : str
        What happened, in one sentence.
    path : path-like, optional
        The checkpoint or file.
    name : str, optional
        The tensor (leaf).
    remedy : str, optional
        What to do next.

    Attributes
    ----------
    kind : str
        Stable identifier, for programs.
    exit_code : int
        The exit code of the command line.
    message, path, name, remedy : str or None
        The arguments.

    Examples
    --------
    >>> print(StoreError("cannot write", path="run/step-10", remedy="free some space"))
    run/step-10: cannot write
    free some space
    """

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    # Shadow the slots of ImportError and OSError: their constructors reset the slots, and pickle would lose them.
    name: str | None = None
    remedy: str | None = None

    def __init_subclass__(cls, *, kind: str | None = None, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        cls.kind = kind or cls.kind
        cls.exit_code = exit_code or cls.exit_code

    def __init__(self, message: str, **context: Unpack[Context]) -> None:
        super().__init__(message)
        self.message = message
        path = context.pop("path", None)
        self.path = None if path is None else os.fspath(path)
        vars(self).update(context)

    def __str__(self) -> str:
        where = [part for part in (self.path, self._subject()) if part]
        text = f"{': '.join(where)}: {self.message}" if where else self.message
        return f"{text}\n{self.remedy}" if self.remedy else text

    def _subject(self) -> str | None:
        return None if self.name is None else f"tensor {self.name!r}"

    def as_dict(self) -> dict[str, object]:
        """Return the error as plain values, as ``--json`` prints it."""
        return {name: getattr(self, name) for name in ("kind", "message", "path", "name", "remedy", "exit_code")}


class DivergedError(TensorkeepError, ArithmeticError, kind="diverged"):
    """A loss or a gradient of a training run is not finite."""


class UsageError(TensorkeepError, ValueError, kind="usage", exit_code=2):
    """The call itself is wrong: an unknown option, a value out of range."""


class StateMismatchError(UsageError, kind="state-mismatch"):
    """The state given to ``into=`` does not fit the checkpoint; it was not changed.

    Attributes
    ----------
    missing, extra, different : tuple of str
        Names in the state only, names in the checkpoint only, and names that differ in shape or dtype.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


class TensorNotFoundError(UsageError, KeyError, kind="tensor-not-found"):
    """An open checkpoint has no tensor of this name."""


class StateMismatchWarning(UserWarning):
    """A load with ``strict=False`` skipped what does not fit.

    Attributes
    ----------
    missing, extra, different : tuple of str
        Names in the state only, names in the checkpoint only, and names that differ in shape.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep, warnings
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = tensorkeep.save({"w": torch.ones(2), "b": torch.ones(1)}, f"{folder.name}/c")
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     _ = tensorkeep.load(f"{folder.name}/c", into={"w": torch.zeros(2)}, strict=False)
    >>> caught[0].message.extra
    ('b',)
    >>> folder.cleanup()
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    different: tuple[str, ...] = ()


class StoreError(TensorkeepError, OSError, kind="store", exit_code=3):
    """The disk or the network failed: no space, no permission, an I/O error.

    Attributes
    ----------
    errno : int or None
        The error number of the operating system, if it refused a call.
    """

    errno: int | None = None  # Shadows the slot of OSError, which pickle would lose.


class BusyError(StoreError, BlockingIOError, kind="busy"):
    """Another live process is writing to this path."""

    errno = codes.EAGAIN


class OutOfMemoryError(TensorkeepError, MemoryError, kind="out-of-memory", exit_code=3):
    """An allocation failed, or a memory budget is too small for the request."""


class RanksDisagreeError(TensorkeepError, RuntimeError, kind="ranks-disagree", exit_code=3):
    """The ranks of one job passed different arguments, or another rank failed."""


# The remedy for a block whose checksum is wrong.
BLOCK_CHANGED = "the stored bytes have changed since the save: take another checkpoint or copy"


class CorruptCheckpointError(TensorkeepError, ValueError, kind="corrupt", exit_code=4):
    """The checkpoint's bytes have changed since they were written, or violate the format.

    Attributes
    ----------
    block : int or None
        Index of the bad block within the tensor.
    """

    remedy: str | None = "take another checkpoint or copy"
    block: int | None = None

    def _subject(self) -> str | None:
        subject = super()._subject()
        return subject if self.block is None else f"{subject or 'file'} block {self.block}"

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "block": self.block}


class NotACheckpointError(TensorkeepError, ValueError, kind="not-a-checkpoint", exit_code=5):
    """The path has something that is not a checkpoint in any known format."""


class NotFoundError(NotACheckpointError, FileNotFoundError, kind="not-found"):
    """Nothing is at the path."""

    errno = codes.ENOENT


class DestinationExistsError(TensorkeepError, FileExistsError, kind="destination-exists", exit_code=6):
    """Something is at the destination and ``overwrite`` is not set."""

    errno = codes.EEXIST


class UnsupportedError(TensorkeepError, NotImplementedError, kind="unsupported", exit_code=7):
    """A dtype, codec, format or file that this installation cannot handle."""


class UnsupportedLeafError(UnsupportedError, TypeError, kind="unsupported-leaf"):
    """One value of the state cannot be saved; raised before a byte is written."""

    def _subject(self) -> str | None:
        return None if self.name is None else f"key {self.name!r}"


class TechniqueNotActiveError(UnsupportedError, kind="technique-not-active"):
    """A training technique was requested and is not active in the first step."""


class MissingExtraError(UnsupportedError, ImportError, kind="missing-extra"):
    """An optional dependency is not installed. The remedy is the command that installs it."""


def import_extra(module: str, package: str, what: str) -> Any:
    """Import a module of an optional dependency; ``what`` begins the message. Raises MissingExtraError.

    ``package`` is what installs the module: a package of Tensorkeep, such as ``chatgot`` or ``tensorkeep[cloud]``.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{what}, which is not installed", remedy=installation_of(package)) from error


def installation_of(package: str) -> str:
    # A package that is needed and not installed either is named too: pip would look for it on PyPI.
    needed = {"chatgot": "chatgot", "tensorkeep_formats": "tensorkeep-formats"} if package == "tensorkeep-bench" else {}
    folders = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    # From a clone, and by its path: Tensorkeep is not on PyPI, where a stranger could publish a package of this name.
    paths = [f"./packages/{folder}" for folder in (*folders, package)]
    return f"in a clone of Tensorkeep: pip install {' '.join(repr(path) if '[' in path else path for path in paths)}"


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def explains_keywords(**remedies: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function so that its TypeError for an unknown keyword has a remedy, given here or the nearest name.

    ``remedies`` are for keywords of other libraries, such as ``map_location``.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs:
                if name not in names:
                    known = [each for each in names if each != "self"]
                    remedy = remedies.get(name) or did_you_mean(name, known, "its arguments")
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}: {remedy}")
            return function(*args, **kwargs)

        return call

    return decorate


def did_you_mean(
    name: str, known: Collection[str], what: str = "known", *, aliases: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The remedy for an unknown name: the nearest known name, or ``what`` and all known names.

    Case and punctuation do not count. ``aliases`` are other words, and the known names that they mean.
    """
    import difflib  # of no use to a program that makes no mistake

    def plain(word: str) -> str:
        return re.sub(r"[\W_]", "", word.lower())

    words = {plain(each): each for each in known} | {plain(word): each for word, each in aliases.items()}
    near = difflib.get_close_matches(plain(name), words, n=1)
    return f"did you mean {words[near[0]]!r}?" if near else f"{what}: {', '.join(known) or 'none'}"


def warn_caller(message: str | Warning) -> None:
    """Warn at the line outside of this package that led here, however deep the call is."""
    # `skip_file_prefixes` does this from Python 3.12 on.
    package = __name__.partition(".")[0]
    frame, level = sys._getframe(), 1
    # With the dot: a user's package may be named `tensorkeep_tools`.
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith(f"{package}."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def skipped(name: str, error: TensorkeepError) -> str:
    """Return the warning for a step that is not loaded because it is damaged or incomplete."""
    return f"{name} is skipped: {error}"


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_out_of_memory(error: BaseException) -> bool:
    # torch raises RuntimeError: on a GPU a subclass, on the CPU only a message.
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error))
    )
