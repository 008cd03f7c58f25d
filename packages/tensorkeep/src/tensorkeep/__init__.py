"""Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.

The public names are imported on first use: ``import tensorkeep`` takes a few milliseconds and does not import torch.
"""

import gc
import importlib
import sys
from typing import TYPE_CHECKING

from tensorkeep.version import __version__


# The syntax of this file is old on purpose: an old Python must raise this error, and not a SyntaxError.
def _check_supported() -> None:
    """Raises ImportError with a remedy where Tensorkeep cannot work."""
    if sys.platform != "linux":
        found = sys.platform
        remedy = "it needs system calls of Linux: use a container, a virtual machine or, on Windows, WSL 2"
    elif sys.version_info < (3, 11):  # noqa: UP036 - a copy of the files, which pip did not check
        found = "Python {}.{}".format(*sys.version_info[:2])
        remedy = "install Python 3.11 or later"
    elif sys.maxsize < 2**32:
        found = "a 32-bit Python"
        remedy = "it maps files of any size: install a 64-bit Python"
    elif sys.byteorder != "little":
        found = "a big-endian processor"
        remedy = "it stores little-endian bytes: use x86-64 or AArch64"
    else:
        return
    supported = "supported: Linux on x86-64 and AArch64, Python 3.11 or later, 64 bits"
    raise ImportError(f"tensorkeep does not run on {found}; {supported}\n{remedy}")


_check_supported()

if TYPE_CHECKING:
    from tensorkeep.checkpoint.background import PendingSave, SaveReport
    from tensorkeep.checkpoint.convert import convert
    from tensorkeep.checkpoint.data_loader import ResumableLoader
    from tensorkeep.checkpoint.diff import DiffReport, diff
    from tensorkeep.checkpoint.info import InfoReport, info
    from tensorkeep.checkpoint.lazy import Checkpoint, LazyTensor, open
    from tensorkeep.checkpoint.loading import load
    from tensorkeep.checkpoint.log import RunLog, log
    from tensorkeep.checkpoint.saving import save, save_async
    from tensorkeep.checkpoint.stateful import RandomState
    from tensorkeep.checkpoint.verify import VerifyReport, verify
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
    from tensorkeep.manager import CheckpointManager, SaveOptions
    from tensorkeep.pages.show import Page, show
    from tensorkeep.placeholder import Placeholder
    from tensorkeep.runs.retention import Keep, KeepBest, KeepEvery, KeepLast, KeepThinned, Retention
    from tensorkeep.runs.steps import Step, UploadStatus
    from tensorkeep.runs.tiered import LocalTier
    from tensorkeep.runs.triggers import EverySteps, EveryTime, OnSignal, SaveWhen
    from tensorkeep.state.skeleton import register

_EXPORTS = {
    "checkpoint.convert": ("convert",),
    "checkpoint.data_loader": ("ResumableLoader",),
    "checkpoint.diff": ("DiffReport", "diff"),
    "checkpoint.info": ("InfoReport", "info"),
    "checkpoint.log": ("RunLog", "log"),
    "checkpoint.verify": ("VerifyReport", "verify"),
    "checkpoint.lazy": ("Checkpoint", "LazyTensor", "open"),
    "checkpoint.loading": ("load",),
    "manager": ("CheckpointManager", "SaveOptions"),
    "runs.retention": ("Keep", "KeepBest", "KeepEvery", "KeepLast", "KeepThinned", "Retention"),
    "runs.steps": ("Step", "UploadStatus"),
    "runs.tiered": ("LocalTier",),
    "runs.triggers": ("EverySteps", "EveryTime", "OnSignal", "SaveWhen"),
    "checkpoint.stateful": ("RandomState",),
    "checkpoint.background": ("PendingSave", "SaveReport"),
    "checkpoint.saving": ("save", "save_async"),
    "pages.show": ("Page", "show"),
    "placeholder": ("Placeholder",),
    "state.skeleton": ("register",),
}
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "BusyError", "Checkpoint", "CheckpointManager", "CorruptCheckpointError", "DestinationExistsError",
    "DiffReport", "DivergedError", "EverySteps", "EveryTime", "InfoReport", "Keep", "KeepBest", "KeepEvery",
    "KeepLast", "KeepThinned", "LazyTensor", "LocalTier", "MissingExtraError", "NotACheckpointError",
    "NotFoundError", "OnSignal", "OutOfMemoryError", "Page", "PendingSave", "Placeholder", "RandomState",
    "RanksDisagreeError", "ResumableLoader", "Retention", "RunLog", "SaveOptions", "SaveReport", "SaveWhen",
    "StateMismatchError", "StateMismatchWarning", "Step", "StoreError", "TechniqueNotActiveError",
    "TensorNotFoundError", "TensorkeepError", "UnsupportedError", "UnsupportedLeafError", "UploadStatus",
    "UsageError", "VerifyReport", "__version__", "convert", "diff", "info", "load", "log", "open", "register",
    "save", "save_async", "show", "verify"
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
