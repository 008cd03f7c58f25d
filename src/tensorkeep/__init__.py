"""Fast, verified, crash-safe checkpoints for PyTorch, in files that other tools open.

The public names, and nothing else. They are imported on first use: ``import tensorkeep`` costs a few milliseconds and
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tensorkeep.version import __version__

if TYPE_CHECKING:
    from tensorkeep.checkpoint.background import save_async
    from tensorkeep.checkpoint.convert import convert
    from tensorkeep.checkpoint.diff import DiffReport, diff
    from tensorkeep.checkpoint.info import InfoReport, info
    from tensorkeep.checkpoint.load import load
    from tensorkeep.checkpoint.manager import CheckpointManager
    from tensorkeep.checkpoint.opened import Checkpoint, LazyTensor, open
    from tensorkeep.checkpoint.pending import PendingSave
    from tensorkeep.checkpoint.retention import Keep, KeepBest, KeepEvery, KeepLast, KeepThinned
    from tensorkeep.checkpoint.save import SaveReport, save
    from tensorkeep.checkpoint.stateful import RandomState
    from tensorkeep.checkpoint.steps import Step
    from tensorkeep.checkpoint.triggers import EverySteps, EveryTime, OnSignal, SaveWhen
    from tensorkeep.checkpoint.verify import VerifyReport, verify
    from tensorkeep.errors import (
        BusyError,
        CorruptCheckpointError,
        DestinationExistsError,
        DivergedError,
        MissingExtraError,
        NotACheckpointError,
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
    "PendingSave": "checkpoint.pending",
    "save_async": "checkpoint.background",
    "convert": "checkpoint.convert",
    "DiffReport": "checkpoint.diff",
    "diff": "checkpoint.diff",
    "InfoReport": "checkpoint.info",
    "info": "checkpoint.info",
    "load": "checkpoint.load",
    "CheckpointManager": "checkpoint.manager",
    "Checkpoint": "checkpoint.opened",
    "LazyTensor": "checkpoint.opened",
    "open": "checkpoint.opened",
    "Keep": "checkpoint.retention",
    "KeepBest": "checkpoint.retention",
    "KeepEvery": "checkpoint.retention",
    "KeepLast": "checkpoint.retention",
    "KeepThinned": "checkpoint.retention",
    "SaveReport": "checkpoint.save",
    "save": "checkpoint.save",
    "RandomState": "checkpoint.stateful",
    "Step": "checkpoint.steps",
    "EverySteps": "checkpoint.triggers",
    "EveryTime": "checkpoint.triggers",
    "OnSignal": "checkpoint.triggers",
    "SaveWhen": "checkpoint.triggers",
    "VerifyReport": "checkpoint.verify",
    "verify": "checkpoint.verify",
    "BusyError": "errors",
    "CorruptCheckpointError": "errors",
    "DestinationExistsError": "errors",
    "DivergedError": "errors",
    "TensorkeepError": "errors",
    "MissingExtraError": "errors",
    "NotACheckpointError": "errors",
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
    "OnSignal",
    "PendingSave",
    "RandomState",
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
