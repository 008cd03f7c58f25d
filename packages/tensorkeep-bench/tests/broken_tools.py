"""Tools that load something else, or fail: other processes import them by name."""

from pathlib import Path
from typing import Any

import torch

from tensorkeep_bench.checkpoint.tools import TorchTool


class LoadsZeros(TorchTool, frozen=True):
    """Returns zeros of the right shapes."""

    def load(self, path: Path) -> Any:
        return {"w": torch.zeros(8)}

    def load_into(self, path: Path, state: Any) -> None:
        pass


class Raises(TorchTool, frozen=True):
    """Cannot load."""

    def load(self, path: Path) -> Any:
        raise ValueError("no such thing")
