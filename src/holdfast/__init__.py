"""Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.

The public names, and nothing else. They are imported on first use: ``import holdfast`` costs a few milliseconds and
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.checkpoint.convert import convert
    from holdfast.checkpoint.diff import DiffReport, diff
    from holdfast.checkpoint.info import InfoReport, info
    from holdfast.checkpoint.load import load
    from holdfast.checkpoint.opened import Checkpoint, LazyTensor, open
    from holdfast.checkpoint.save import SaveReport, save
    from holdfast.checkpoint.verify import VerifyReport, verify
    from holdfast.errors import (
        BusyError,
        CorruptCheckpointError,
        DestinationExistsError,
        HoldfastError,
        MissingExtraError,
        NotACheckpointError,
        StateMismatchError,
        StoreError,
        UnsupportedError,
        UnsupportedLeafError,
        UsageError,
    )
    from holdfast.state.registry import register

_HOMES = {
    "convert": "checkpoint.convert",
    "DiffReport": "checkpoint.diff",
    "diff": "checkpoint.diff",
    "InfoReport": "checkpoint.info",
    "info": "checkpoint.info",
    "load": "checkpoint.load",
    "Checkpoint": "checkpoint.opened",
    "LazyTensor": "checkpoint.opened",
    "open": "checkpoint.opened",
    "SaveReport": "checkpoint.save",
    "save": "checkpoint.save",
    "VerifyReport": "checkpoint.verify",
    "verify": "checkpoint.verify",
    "BusyError": "errors",
    "CorruptCheckpointError": "errors",
    "DestinationExistsError": "errors",
    "HoldfastError": "errors",
    "MissingExtraError": "errors",
    "NotACheckpointError": "errors",
    "StateMismatchError": "errors",
    "StoreError": "errors",
    "UnsupportedError": "errors",
    "UnsupportedLeafError": "errors",
    "UsageError": "errors",
    "register": "state.registry",
}

__all__ = [
    "BusyError",
    "Checkpoint",
    "CorruptCheckpointError",
    "DestinationExistsError",
    "DiffReport",
    "HoldfastError",
    "InfoReport",
    "LazyTensor",
    "MissingExtraError",
    "NotACheckpointError",
    "SaveReport",
    "StateMismatchError",
    "StoreError",
    "UnsupportedError",
    "UnsupportedLeafError",
    "UsageError",
    "VerifyReport",
    "__version__",
    "convert",
    "diff",
    "info",
    "load",
    "open",
    "register",
    "save",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"holdfast.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
