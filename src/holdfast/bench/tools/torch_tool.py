"""``torch.save`` and ``torch.load(weights_only=True)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from holdfast.bench.tools.base import Tool


class TorchTool(Tool, frozen=True, tag="torch"):
    """``torch.save``.

    Attributes
    ----------
    crc32 : bool
        Whether it computes the CRC-32 of every record, as it does by default.
    """

    crc32: bool = True

    suffix: ClassVar[str] = ".pt"
    nested: ClassVar[bool] = True

    def save(self, state: Any, path: Path) -> None:
        import torch

        default = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(self.crc32)
        try:
            torch.save(state, path)
        finally:
            torch.serialization.set_crc32_options(default)

    def load(self, path: Path) -> Any:
        import torch

        return torch.load(path, weights_only=True)
