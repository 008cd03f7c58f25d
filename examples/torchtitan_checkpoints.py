"""torchtitan with Tensorkeep: a checkpoint manager to name in the configuration of a training run.

``checkpoint=TensorkeepCheckpointManager.Config(enable=True, interval=500)``. All ranks save one checkpoint in the
background, which any number of ranks, or one process, loads. For torchtitan of August 2026 and later, which has
``components/checkpointer``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)

import tensorkeep


class TensorkeepCheckpointManager(BaseCheckpointManager):
    """Saves and loads the states of torchtitan's trainer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options; those for Hugging Face's files and other dtypes are refused."""

        compression: str = "lossless"

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[Any],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # the manager waits for its saves itself
        if not config.enable:
            return
        if config.initial_load_in_hf or config.last_save_in_hf or config.export_dtype != "float32":
            raise ValueError("checkpoint: convert with `tensorkeep convert`, instead of *_in_hf and export_dtype")
        self._config = config
        self._states = {
            **states,
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            LR_SCHEDULER: lr_schedulers,
            DATALOADER: dataloader,
        }
        self._manager = tensorkeep.CheckpointManager(
            Path(base_folder, config.folder),
            keep_last=config.keep_latest_k or None,
            compression=config.compression,
            group=dist.group.WORLD,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        first = curr_step == 1 and self._config.enable_first_step_checkpoint
        if self._config.load_only or not (first or last_step or curr_step % self._config.interval == 0):
            return False
        model_only = last_step and self._config.last_save_model_only
        self._manager.save(curr_step, {MODEL: self._states[MODEL]} if model_only else self._states)
        if last_step:
            self._manager.wait()
        return True

    def _load(self, step: int = -1) -> bool:
        latest = self._manager.latest()
        states = {key: value for key, value in self._states.items() if key not in self._config.exclude_from_loading}
        if latest is not None:
            # Step 0 is a seed, which has only a model.
            number = None if step == -1 else step
            only_model = 0 in (step, latest.number)
            self._manager.restore(number, into={MODEL: states[MODEL]} if only_model else states)
        elif self._config.initial_load_path:
            initial = {MODEL: states[MODEL]} if self._config.initial_load_model_only else states
            tensorkeep.load(self._config.initial_load_path, into=initial, group=dist.group.WORLD)
        return latest is not None or bool(self._config.initial_load_path)

    def _wait_for_saving(self) -> None:
        self._manager.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save returns when the shards were copied."""

    def _close(self) -> None:
        self._manager.close()
