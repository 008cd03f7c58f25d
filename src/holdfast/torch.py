"""``torch.save`` and ``torch.load``, with torch's signatures: ``import holdfast.torch`` and change one line.

What `save` writes, ``torch.load`` opens. It is durable on return and visible whole or not at all, so that an accident
never costs the file that was there before. `load` never unpickles more than ``weights_only=True`` allows, opens every
format that Holdfast knows, and checks what the format lets it check.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.load import load as _load
from holdfast.checkpoint.save import save as _save
from holdfast.errors import PathLike, UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["load", "save"]


def save(obj: object, f: PathLike) -> None:
    """Save an object as a torch file; what is at the path is replaced.

    Parameters
    ----------
    obj : nested state
        As for `holdfast.save`.
    f : path-like
        torch's other kind, a file object, cannot be made durable, and is refused.

    Raises
    ------
    UnsupportedLeafError
        If it holds something that ``torch.load(weights_only=True)`` would refuse.
    DestinationExistsError
        If something other than a torch file is at the path.
    StoreError, BusyError, UsageError
    """
    _save(obj, _path(f), format="torch", overwrite=True)


def load(
    f: PathLike,
    map_location: torch.device | str | None = None,
    *,
    weights_only: bool = True,
    mmap: bool | None = None,
) -> Any:
    """Load a torch file, or a checkpoint of any other format.

    Parameters
    ----------
    f : path-like
    map_location : torch.device or str, optional
        Where all tensors go; the CPU by default, not where they once were.
    weights_only : bool
        False is refused: nothing is ever unpickled that could run code.
    mmap : bool, optional
        Accepted and not needed: reading is direct and parallel.

    Raises
    ------
    CorruptCheckpointError, NotACheckpointError, UnsupportedError, StoreError, UsageError
    """
    if not weights_only:
        raise UsageError(
            "weights_only=False would run code that the file brings",
            path=_path(f),
            remedy="leave it out; what it held besides tensors and plain values must be saved in another way",
        )
    if callable(map_location) or isinstance(map_location, dict):
        raise UsageError(
            f"map_location is a {type(map_location).__name__}", path=_path(f), remedy="give a device, or its name"
        )
    return _load(_path(f), device=map_location)


def _path(f: object) -> PathLike:
    if isinstance(f, str | os.PathLike):
        return f
    raise UsageError(f"a {type(f).__name__} is no path", remedy="give the path of a file")
