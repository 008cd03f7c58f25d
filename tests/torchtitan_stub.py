"""The part of torchtitan that `examples/torchtitan_checkpoints.py` uses, because torchtitan needs a nightly torch."""

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"


class ModelWrapper:
    """The state of all parts of a model in one dict."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict(state, strict=False)


class BaseCheckpointManager:
    """Calls the methods of a subclass if checkpoints are enabled."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        enable: bool = False
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: str = "float32"
        keep_latest_k: int = 10
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        load_only: bool = False

    enable: bool

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self.enable and self._save(curr_step, last_step)  # type: ignore[attr-defined]

    def load(self, step: int = -1) -> bool:
        return self.enable and self._load(step)  # type: ignore[attr-defined]

    def close(self) -> None:
        if self.enable:
            self._close()  # type: ignore[attr-defined]


def install() -> None:
    """Let imports of torchtitan find the classes above."""
    module: Any = ModuleType("torchtitan.components.checkpointer.base")
    for name in ("MODEL", "OPTIMIZER", "LR_SCHEDULER", "DATALOADER", "ModelWrapper", "BaseCheckpointManager"):
        setattr(module, name, globals()[name])
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.checkpointer", module.__name__):
        sys.modules.setdefault(name, module if name == module.__name__ else ModuleType(name))
