"""``safetensors.torch.save_file`` and ``load_file``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from tensorkeep.bench.checkpoint.tools.base import Tool


class SafetensorsTool(Tool, frozen=True, tag="safetensors"):
    """``safetensors.torch``; it holds a flat dict of contiguous tensors that share nothing."""

    suffix: ClassVar[str] = ".safetensors"
    maps: ClassVar[bool] = True

    def save(self, state: Any, path: Path) -> None:
        from safetensors.torch import save_file

        # It refuses tensors that are not contiguous; making them so is part of saving with it.
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)

    def load(self, path: Path) -> Any:
        from safetensors.torch import load_file

        return load_file(path)
