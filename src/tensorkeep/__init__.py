"""Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.

The public names are imported on first use: ``import tensorkeep`` takes a few milliseconds and does not import torch.
"""

import gc
import importlib
from typing import TYPE_CHECKING

from tensorkeep.supported import check_supported
from tensorkeep.version import __version__

check_supported()

if TYPE_CHECKING:
    from tensorkeep.checkpoint.inspect.convert import convert
    from tensorkeep.checkpoint.inspect.diff import DiffReport, diff
    from tensorkeep.checkpoint.inspect.info import InfoReport, info
    from tensorkeep.checkpoint.inspect.log import RunLog, log
    from tensorkeep.checkpoint.load.lazy import Checkpoint, LazyTensor, open
    from tensorkeep.checkpoint.load.load import load
    from tensorkeep.checkpoint.load.verify import VerifyReport, verify
    from tensorkeep.checkpoint.manager.manager import CheckpointManager
    from tensorkeep.checkpoint.manager.retention import Keep, KeepBest, KeepEvery, KeepLast, KeepThinned
    from tensorkeep.checkpoint.manager.steps import Step, UploadStatus
    from tensorkeep.checkpoint.manager.triggers import EverySteps, EveryTime, OnSignal, SaveWhen
    from tensorkeep.checkpoint.save.job import PendingSave, SaveReport
    from tensorkeep.checkpoint.save.save import save, save_async
    from tensorkeep.checkpoint.stateful import RandomState
    from tensorkeep.errors import (
        BusyError,
        CorruptCheckpointError,
        DestinationExistsError,
        DivergedError,
        MissingExtraError,
        NotACheckpointError,
        NotFoundError,
        OutOfMemoryError,
        RanksDisagreeError,
        StateMismatchError,
        StateMismatchWarning,
        StoreError,
        TechniqueNotActiveError,
        TensorkeepError,
        TensorNotFoundError,
        UnsupportedError,
        UnsupportedLeafError,
        UsageError,
    )
    from tensorkeep.placeholder import Placeholder
    from tensorkeep.state.registry import register

_EXPORTS = {
    "checkpoint.inspect.convert": ("convert",),
    "checkpoint.inspect.diff": ("DiffReport", "diff"),
    "checkpoint.inspect.info": ("InfoReport", "info"),
    "checkpoint.inspect.log": ("RunLog", "log"),
    "checkpoint.load.verify": ("VerifyReport", "verify"),
    "checkpoint.load.lazy": ("Checkpoint", "LazyTensor", "open"),
    "checkpoint.load.load": ("load",),
    "checkpoint.manager.manager": ("CheckpointManager",),
    "checkpoint.manager.retention": ("Keep", "KeepBest", "KeepEvery", "KeepLast", "KeepThinned"),
    "checkpoint.manager.steps": ("Step", "UploadStatus"),
    "checkpoint.manager.triggers": ("EverySteps", "EveryTime", "OnSignal", "SaveWhen"),
    "checkpoint.stateful": ("RandomState",),
    "checkpoint.save.job": ("PendingSave", "SaveReport"),
    "checkpoint.save.save": ("save", "save_async"),
    "placeholder": ("Placeholder",),
    "state.registry": ("register",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "BusyError", "Checkpoint", "CheckpointManager", "CorruptCheckpointError", "DestinationExistsError",
    "DiffReport", "DivergedError", "EverySteps", "EveryTime", "InfoReport", "Keep", "KeepBest", "KeepEvery",
    "KeepLast", "KeepThinned", "LazyTensor", "MissingExtraError", "NotACheckpointError", "NotFoundError",
    "OnSignal", "OutOfMemoryError", "PendingSave", "Placeholder", "RandomState", "RanksDisagreeError",
    "RunLog", "SaveReport", "SaveWhen", "StateMismatchError", "StateMismatchWarning", "Step", "StoreError",
    "TechniqueNotActiveError", "TensorNotFoundError", "TensorkeepError", "UnsupportedError",
    "UnsupportedLeafError", "UploadStatus", "UsageError", "VerifyReport", "__version__", "convert", "diff",
    "info", "load", "log", "open", "register", "save", "save_async", "verify"
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tensorkeep' has no attribute {name!r}")
    # What is imported lives as long as the process: a garbage collection meanwhile would look at all objects of torch
    # for nothing, which takes longer than the import.
    collecting = gc.isenabled()
    gc.disable()
    try:
        # All other names are errors, from `errors`.
        value = getattr(importlib.import_module(f"tensorkeep.{_MODULES.get(name, 'errors')}"), name)
    finally:
        if collecting:
            gc.enable()
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
