"""Checkpoints of many ranks: `PerRank` values, and reader and writer for ``torch.distributed.checkpoint``.

Modules are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorkeep.distributed.dcp import DcpReader, DcpWriter
    from tensorkeep.state.skeleton import PerRank

_MODULES = {"DcpReader": "distributed.dcp", "DcpWriter": "distributed.dcp", "PerRank": "state.skeleton"}

__all__ = ["DcpReader", "DcpWriter", "PerRank"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tensorkeep.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tensorkeep.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
