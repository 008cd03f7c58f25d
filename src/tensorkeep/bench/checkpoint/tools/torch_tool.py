"""``torch.save`` and ``torch.load(weights_only=True)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tensorkeep.bench.checkpoint.tools.base import Tool


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

        # A training state holds arrays, too, such as the states of numpy's random numbers.
        with torch.serialization.safe_globals(_array_parts()):
            return torch.load(path, weights_only=True)


def _array_parts() -> list[Any]:
    """Return what an array is pickled as; none of it runs code of the file's."""
    from numpy._core.multiarray import _reconstruct, scalar

    kinds = [each for each in vars(np.dtypes).values() if isinstance(each, type)]
    return [_reconstruct, scalar, np.ndarray, np.dtype, *kinds]
