"""`TensorkeepCheckpointManager`: a checkpoint manager to name in the configuration of a torchtitan run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from tensorkeep.checkpoint.loading import load
from tensorkeep.errors import NotFoundError, UnsupportedError, UsageError
from tensorkeep.integrations import requires
from tensorkeep.manager import CheckpointManager

with requires("torchtitan>=0.3"):
    from torchtitan.components.checkpointer import (
        DATALOADER,
        LR_SCHEDULER,
        MODEL,
        OPTIMIZER,
        BaseCheckpointManager,
        ModelWrapper,
    )
    from torchtitan.config import TORCH_DTYPE_MAP

__all__ = ["TensorkeepCheckpointManager"]


class TensorkeepCheckpointManager(BaseCheckpointManager):
    """Saves and loads the states of torchtitan's trainer, with all ranks, in the background.

    In the configuration, ``checkpoint=TensorkeepCheckpointManager.Config(enable=True, interval=500)``. Any number of
    ranks, or one process with `tensorkeep.load`, loads a checkpoint. The steps are ``step-000500`` and so on.

    Raises
    ------
    UnsupportedError
        If an option for Hugging Face files is set: ``tensorkeep convert`` writes such files from a checkpoint.
    UsageError
        If ``exclude_from_loading`` names a state that does not exist.

    Examples
    --------
    >>> from tensorkeep.integrations.torchtitan import TensorkeepCheckpointManager
    >>> config = TensorkeepCheckpointManager.Config(enable=True, interval=500, keep_latest_k=3)
    >>> config.compression
    'lossless'
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's options, and ``compression`` as in `tensorkeep.save`."""

        compression: str = "lossless"

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
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
        for name in ("initial_load_in_hf", "last_save_in_hf"):
            if getattr(config, name):
                text = f"checkpoint.{name} is not supported"
                raise UnsupportedError(text, remedy="convert the checkpoint with `tensorkeep convert`")
        self._config = config
        self._states = {
            **states,
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: _Flat(optimizers),
            LR_SCHEDULER: lr_schedulers,
            DATALOADER: dataloader,
        }
        if unknown := sorted({*config.exclude_from_loading} - {*self._states}):
            text = f"checkpoint.exclude_from_loading names {unknown[0]!r}, which is not saved"
            raise UsageError(text, remedy=f"choose from: {', '.join(sorted({*self._states} - {MODEL}))}")
        self._manager = CheckpointManager(
            Path(base_folder, config.folder),
            keep_last=config.keep_latest_k or None,
            compression=config.compression,
            group=dist.group.WORLD,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        first = curr_step == 1 and self._config.enable_first_step_checkpoint
        if self._config.load_only or not (first or last_step or curr_step % self._config.interval == 0):
            return False
        states = self._states
        if last_step and self._config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[self._config.export_dtype]
            states = {MODEL: {name: _exported(value, dtype) for name, value in states[MODEL].state_dict().items()}}
        # As torchtitan does, which saves the last step also if it was saved at its interval.
        self._manager.save(curr_step, states, overwrite=True)
        if last_step:
            self._manager.wait()
        return True

    def _load(self, step: int = -1) -> bool:
        latest = self._manager.latest()
        states = {key: value for key, value in self._states.items() if key not in self._config.exclude_from_loading}
        if latest is not None:
            # Step 0 is a seed, which has only a model.
            only_model = 0 in (step, latest.number)
            self._manager.restore(None if step == -1 else step, into={MODEL: states[MODEL]} if only_model else states)
            return True
        if step != -1:
            text = f"has no checkpoint of step {step}"
            raise NotFoundError(text, path=self._manager.root, remedy="leave out checkpoint.load_step")
        if self._config.initial_load_path:
            initial = {MODEL: states[MODEL]} if self._config.initial_load_model_only else states
            load(self._config.initial_load_path, into=initial, group=dist.group.WORLD)
        return bool(self._config.initial_load_path)

    def _wait_for_saving(self) -> None:
        self._manager.wait()

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a save returns when the shards were copied."""

    def _close(self) -> None:
        if hasattr(self, "_manager"):
            self._manager.close()


class _Flat:
    """The state of torchtitan's optimizers: flat, unlike the state of the class ``Optimizer`` that they derive from."""

    def __init__(self, optimizers: Any) -> None:
        self.state_dict, self.load_state_dict = optimizers.state_dict, optimizers.load_state_dict


def _exported(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
