"""``torch.save`` and ``torch.load``, with torch's signatures: ``import tensorkeep.torch`` and change one line.

What `save` writes, ``torch.load`` opens. It is durable on return and visible whole or not at all, so that an accident
never costs the file that was there before. `load` never unpickles more than ``weights_only=True`` allows, opens every
format that Tensorkeep knows, and checks what the format lets it check.

Every argument that torch takes is taken. What has no meaning here is ignored, as its description says; what would ask
for another result is refused.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tensorkeep.checkpoint.finding import find_format
from tensorkeep.checkpoint.inspect.verify import verify
from tensorkeep.checkpoint.load.load import load as _load
from tensorkeep.checkpoint.save.save import save as _save
from tensorkeep.errors import CorruptCheckpointError, PathLike, UnsupportedError, UsageError
from tensorkeep.io.files import store_error

if TYPE_CHECKING:
    import torch

    MapLocation = torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None

__all__ = ["load", "save"]

_UNPICKLERS_OWN = frozenset(("encoding", "errors", "fix_imports", "buffers"))


def save(
    obj: object,
    f: PathLike | IO[bytes],
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> None:
    """Save an object as a torch file; what is at the path is replaced.

    Parameters
    ----------
    obj : nested state
        As for `tensorkeep.save`.
    f : path-like or binary file
        Of a file object nothing can be promised: the bytes are written to it, from a temporary file.
    pickle_module : module, optional
        Python's `pickle`; another one is refused.
    pickle_protocol : int
        Ignored: it is torch's default, which ``weights_only=True`` reads.
    _use_new_zipfile_serialization : bool
        False is refused: that format cannot be read without running code.
    _disable_byteorder_record : bool
        Ignored: the byte order is always recorded.

    Raises
    ------
    UnsupportedLeafError, UnsupportedError
        If it holds something that ``torch.load(weights_only=True)`` would refuse, or an argument asks for that.
    DestinationExistsError
        If something other than a torch file is at the path.
    StoreError, BusyError, UsageError
    """
    _refuse_other_pickles(pickle_module)
    if not _use_new_zipfile_serialization:
        raise UnsupportedError(
            "files as torch wrote them before version 1.6 are not written",
            remedy="leave _use_new_zipfile_serialization out; every torch since reads the new ones",
        )
    if isinstance(f, str | os.PathLike):
        _save(obj, f, format="torch", overwrite=True)
        return
    file = _binary_file(f, "write")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "state.pt")
        _save(obj, place, format="torch")
        with place.open("rb") as saved:
            shutil.copyfileobj(saved, file)


def load(
    f: PathLike | IO[bytes],
    map_location: MapLocation = None,
    pickle_module: Any = None,
    *,
    weights_only: bool | None = None,
    mmap: bool | None = None,
    **pickle_load_args: Any,
) -> Any:
    """Load a torch file, or a checkpoint of any other format.

    Parameters
    ----------
    f : path-like or binary file
        A file object is read to its end, into a temporary file.
    map_location : torch.device, str, dict or callable, optional
        Where all tensors go; the CPU by default, not where they once were. A dict from device to device, or a function
        of a storage and its device, is followed as torch does; for torch files only.
    pickle_module : module, optional
        Python's `pickle`; another one is refused, and so is whatever ``weights_only=True`` does not allow.
    weights_only : bool, optional
        False is refused: nothing is ever unpickled that could run code.
    mmap : bool, optional
        Ignored: reading is direct and parallel.
    **pickle_load_args
        ``encoding`` and the like are ignored, as torch does with ``weights_only=True``.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError, UsageError
    """
    _refuse_other_pickles(pickle_module)
    unknown = sorted(pickle_load_args.keys() - _UNPICKLERS_OWN)
    if unknown:
        raise UsageError(f"there is no argument {unknown[0]!r}", remedy="see the documentation of torch.load")
    if weights_only is not None and not weights_only:
        raise UsageError(
            "weights_only=False would run code that the file brings",
            remedy="leave it out; what it held besides tensors and plain values must be saved in another way",
        )
    with _on_disk(f) as path:
        if callable(map_location) or isinstance(map_location, Mapping):
            return _load_mapped(path, map_location)
        return _load(path, device=map_location)


def _load_mapped(path: PathLike, map_location: Any) -> Any:
    """Let torch put each storage where it belongs, which our reader does not tell; what it loads is verified first."""
    import torch

    if find_format(path).name != "torch":
        raise UnsupportedError(
            f"only torch files can be loaded with a {type(map_location).__name__} as map_location",
            path=path,
            remedy="give one device, or its name",
        )
    for problem in verify(path, format="torch").problems:
        raise CorruptCheckpointError(problem.message, path=path, name=problem.name)
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=False)
    except RuntimeError as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"its tensors cannot be put where map_location says: {reason}",
            path=path,
            remedy="name devices that torch finds here",
        ) from error


def _refuse_other_pickles(module: Any) -> None:
    if module is not None and module is not pickle:
        raise UnsupportedError(
            f"nothing is pickled or unpickled by {getattr(module, '__name__', module)!r}",
            remedy="leave pickle_module out; save what it was for as tensors and plain values",
        )


@contextmanager
def _on_disk(f: PathLike | IO[bytes]) -> Iterator[PathLike]:
    """Give what is to be loaded a path."""
    if isinstance(f, str | os.PathLike):
        yield f
        return
    file = _binary_file(f, "read")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "state.pt")
        try:
            with place.open("wb") as copy:
                shutil.copyfileobj(file, copy)
        except OSError as error:
            raise store_error(error, place, "copy the file object to a temporary file") from error
        yield place


def _binary_file(f: Any, method: str) -> IO[bytes]:
    if isinstance(f, io.TextIOBase):
        raise UsageError("a text file cannot hold tensors", remedy="open it in binary mode")
    if not hasattr(f, method):
        raise UsageError(f"a {type(f).__name__} is no path and no binary file", remedy="give the path of a file")
    file: IO[bytes] = f
    return file
