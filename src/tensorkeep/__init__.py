"""Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.

The public names, and nothing else. They are imported on first use: ``import tensorkeep`` costs a few milliseconds and
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tensorkeep.version import __version__

if TYPE_CHECKING:
    from tensorkeep.checkpoint.inspect.convert import convert
    from tensorkeep.checkpoint.inspect.diff import DiffReport, diff
    from tensorkeep.checkpoint.inspect.info import InfoReport, info
    from tensorkeep.checkpoint.inspect.verify import VerifyReport, verify
    from tensorkeep.checkpoint.load.lazy import Checkpoint, LazyTensor, open
    from tensorkeep.checkpoint.load.load import load
    from tensorkeep.checkpoint.manager.manager import CheckpointManager
    from tensorkeep.checkpoint.manager.retention import Keep, KeepBest, KeepEvery, KeepLast, KeepThinned
    from tensorkeep.checkpoint.manager.steps import Step
    from tensorkeep.checkpoint.manager.triggers import EverySteps, EveryTime, OnSignal, SaveWhen
    from tensorkeep.checkpoint.restore.stateful import RandomState
    from tensorkeep.checkpoint.save.background import save_async
    from tensorkeep.checkpoint.save.pending import PendingSave
    from tensorkeep.checkpoint.save.save import SaveReport, save
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
        StoreError,
        TechniqueNotActiveError,
        TensorkeepError,
        UnsupportedError,
        UnsupportedLeafError,
        UsageError,
    )
    from tensorkeep.state.registry import register

_HOMES = {
    "PendingSave": "checkpoint.save.pending",
    "save_async": "checkpoint.save.background",
    "convert": "checkpoint.inspect.convert",
    "DiffReport": "checkpoint.inspect.diff",
    "diff": "checkpoint.inspect.diff",
    "InfoReport": "checkpoint.inspect.info",
    "info": "checkpoint.inspect.info",
    "load": "checkpoint.load.load",
    "CheckpointManager": "checkpoint.manager.manager",
    "Checkpoint": "checkpoint.load.lazy",
    "LazyTensor": "checkpoint.load.lazy",
    "open": "checkpoint.load.lazy",
    "Keep": "checkpoint.manager.retention",
    "KeepBest": "checkpoint.manager.retention",
    "KeepEvery": "checkpoint.manager.retention",
    "KeepLast": "checkpoint.manager.retention",
    "KeepThinned": "checkpoint.manager.retention",
    "SaveReport": "checkpoint.save.save",
    "save": "checkpoint.save.save",
    "RandomState": "checkpoint.restore.stateful",
    "Step": "checkpoint.manager.steps",
    "EverySteps": "checkpoint.manager.triggers",
    "EveryTime": "checkpoint.manager.triggers",
    "OnSignal": "checkpoint.manager.triggers",
    "SaveWhen": "checkpoint.manager.triggers",
    "VerifyReport": "checkpoint.inspect.verify",
    "verify": "checkpoint.inspect.verify",
    "BusyError": "errors",
    "CorruptCheckpointError": "errors",
    "DestinationExistsError": "errors",
    "DivergedError": "errors",
    "TensorkeepError": "errors",
    "MissingExtraError": "errors",
    "NotACheckpointError": "errors",
    "NotFoundError": "errors",
    "OutOfMemoryError": "errors",
    "RanksDisagreeError": "errors",
    "StateMismatchError": "errors",
    "StoreError": "errors",
    "UnsupportedError": "errors",
    "TechniqueNotActiveError": "errors",
    "UnsupportedLeafError": "errors",
    "UsageError": "errors",
    "register": "state.registry",
}

__all__ = [
    "BusyError",
    "Checkpoint",
    "CheckpointManager",
    "CorruptCheckpointError",
    "DestinationExistsError",
    "DiffReport",
    "DivergedError",
    "EverySteps",
    "EveryTime",
    "InfoReport",
    "Keep",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepThinned",
    "LazyTensor",
    "MissingExtraError",
    "NotACheckpointError",
    "NotFoundError",
    "OnSignal",
    "OutOfMemoryError",
    "PendingSave",
    "RandomState",
    "RanksDisagreeError",
    "SaveReport",
    "SaveWhen",
    "StateMismatchError",
    "Step",
    "StoreError",
    "TechniqueNotActiveError",
    "TensorkeepError",
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
    "save_async",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tensorkeep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tensorkeep.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
