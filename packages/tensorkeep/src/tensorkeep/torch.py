"""``save`` and ``load`` with the signatures of ``torch.save`` and ``torch.load``.

`save` writes files for ``torch.load``, durably and atomically. `load` reads every format of Tensorkeep, checks the
checksums, and unpickles no more than ``weights_only=True`` allows. Arguments that have no meaning here are ignored;
arguments that would change the result are refused.
"""

import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from tensorkeep.checkpoint.loading import load as _load
from tensorkeep.checkpoint.saving import save as _save
from tensorkeep.checkpoint.verify import verify
from tensorkeep.errors import CorruptCheckpointError, PathLike, UnsupportedError, UsageError
from tensorkeep.formats.finding import find_format
from tensorkeep.paths import StorePath, as_path
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state.tree import flatten
from tensorkeep.storage.system_errors import store_errors

if TYPE_CHECKING:
    import torch

    MapLocation = torch.device | str | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None

__all__ = ["load", "save"]

_UNPICKLER_ARGUMENTS = frozenset(("encoding", "errors", "fix_imports", "buffers"))


def save(
    obj: object,
    f: PathLike | IO[bytes],
    pickle_module: Any = None,
    pickle_protocol: int = 2,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
) -> None:
    """Save an object as a torch file; an existing torch file is replaced.

    Parameters
    ----------
    obj : nested dict, list, tuple of tensors, arrays and plain values
    f : path-like or binary file
        A file object is written from a temporary file, and is neither durable nor atomic.
    pickle_module, _use_new_zipfile_serialization : optional
        Pickles other than Python's are refused, and so is False: the old format cannot be read without running code.
    pickle_protocol, _disable_byteorder_record : optional
        Ignored: ``weights_only=True`` reads only protocol 2, and the byte order is always recorded.

    Raises
    ------
    UnsupportedLeafError, UnsupportedError
        If ``torch.load(weights_only=True)`` would refuse a value, or an argument asks for another pickle or format.
    DestinationExistsError, BusyError, StoreError
        If something other than a torch file is at the path, another process is writing to it, or the disk failed.
    UsageError
        If ``f`` is neither a path nor a binary file, or has a suffix of safetensors.

    Examples
    --------
    >>> import io, torch, tensorkeep.torch
    >>> file = io.BytesIO()
    >>> tensorkeep.torch.save({"w": torch.ones(2)}, file)
    >>> _ = file.seek(0)
    >>> torch.load(file)
    {'w': tensor([1., 1.])}
    """
    _refuse_other_pickles(pickle_module)
    if not _use_new_zipfile_serialization:
        raise UnsupportedError(
            "the file format of torch before version 1.6 cannot be written",
            remedy="leave _use_new_zipfile_serialization out; every later torch reads the new files",
        )
    flatten(obj)  # refuses a module, which torch would pickle, and our save would replace by its state dict
    if isinstance(f, str | os.PathLike):
        _save(obj, f, format="torch", overwrite=True)
        return
    file = _binary_file(f, "write")
    with tempfile.TemporaryDirectory() as folder:
        _save(obj, Path(folder, "state.pt"), format="torch")
        with Path(folder, "state.pt").open("rb") as saved:
            shutil.copyfileobj(saved, file)


def load(
    f: PathLike | IO[bytes],
    map_location: "MapLocation" = None,
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
        The device of all tensors; the CPU by default, not the device that they were saved from. A dict from device to
        device, or a function of a storage and its device, is supported for torch files only.
    pickle_module, weights_only : optional
        Pickles other than Python's are refused, and so is False: it would run code from the file.
    mmap : bool, optional
        Return tensors over the mapped file: bytes are read when they are used, and are not checked. Writes to the
        tensors remain in memory. Has no effect for other devices than the CPU.
    **pickle_load_args : optional
        ``allow`` as in `tensorkeep.load`, but not with a dict or a function as ``map_location``. ``encoding`` and other
        arguments of unpicklers are ignored, as in torch.

    Raises
    ------
    NotFoundError, NotACheckpointError, CorruptCheckpointError
        If nothing is at the path, or not a checkpoint, or a damaged one.
    UsageError, UnsupportedError, StoreError
        If an argument is wrong or a device does not exist, the file holds what ``weights_only=True`` does not allow, or
        the disk failed.

    Examples
    --------
    >>> import io, torch, tensorkeep.torch
    >>> file = io.BytesIO()
    >>> torch.save({"w": torch.ones(2)}, file)
    >>> _ = file.seek(0)
    >>> tensorkeep.torch.load(file, map_location="cpu")
    {'w': tensor([1., 1.])}
    """
    _refuse_other_pickles(pickle_module)
    allow = pickle_load_args.pop("allow", None)
    unknown = sorted(pickle_load_args.keys() - _UNPICKLER_ARGUMENTS)
    if unknown:
        raise UsageError(f"{unknown[0]!r} is not an argument of load", remedy="see the documentation of torch.load")
    if weights_only is not None and not weights_only:
        raise UsageError(
            "weights_only=False would run code from the file",
            remedy="leave it out; `allow` names classes, and their objects are read as dicts",
        )
    with _on_disk(f) as path:
        if callable(map_location) or isinstance(map_location, Mapping):
            if allow is not None:
                raise UsageError("`allow` needs one device as map_location", path=path, remedy="give a device, or none")
            return _load_mapped(path, map_location)
        on_cpu = str(map_location or "cpu") == "cpu"
        return _load(path, device=map_location, mmap=bool(mmap) and on_cpu, allow=allow)


def _load_mapped(path: PathLike, map_location: Any) -> Any:
    """Verify the file, then let torch load it: our reader does not know the devices of storages."""
    import torch

    path = checkpoint_path(path)
    if isinstance(as_path(path), StorePath):
        raise UnsupportedError(
            f"a {type(map_location).__name__} as map_location is not possible in an object store",
            path=path,
            remedy="give one device, or its name; or copy the file to a disk first",
        )
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
            f"map_location names a device that cannot be used: {reason}",
            path=path,
            remedy="name devices that torch finds here",
        ) from error


def _refuse_other_pickles(module: Any) -> None:
    if module is not None and module is not pickle:
        raise UnsupportedError(
            f"{getattr(module, '__name__', module)!r} cannot be used: nothing is pickled or unpickled here",
            remedy="leave pickle_module out, and save tensors and plain values",
        )


@contextmanager
def _on_disk(f: PathLike | IO[bytes]) -> Iterator[PathLike]:
    """Yield a path; for a file object, the path of a temporary copy."""
    if isinstance(f, str | os.PathLike):
        yield f
        return
    file = _binary_file(f, "read")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        with store_errors(path, "copy the file object to a temporary file"), path.open("wb") as copy:
            shutil.copyfileobj(file, copy)
        yield path


def _binary_file(f: Any, method: str) -> IO[bytes]:
    if isinstance(f, io.TextIOBase):
        raise UsageError("a text file cannot hold tensors", remedy="open it in binary mode")
    if not hasattr(f, method):
        raise UsageError(f"a {type(f).__name__} is neither a path nor a binary file", remedy="give the path of a file")
    return cast("IO[bytes]", f)
