"""`TensorkeepAccelerator`: ``save_state`` and ``load_state`` of accelerate with Tensorkeep."""

import re
import shutil
from pathlib import Path
from typing import Any

from torch import distributed as dist

from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save
from tensorkeep.checkpoint.stateful import RandomState
from tensorkeep.distributed import PerRank
from tensorkeep.errors import NotFoundError, UnsupportedError, UsageError
from tensorkeep.integrations import requires
from tensorkeep.paths import absolute, as_path

with requires("accelerate>=1.10"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

__all__ = ["TensorkeepAccelerator"]


class TensorkeepAccelerator(Accelerator):
    """An ``Accelerator`` that saves what was prepared and registered, with all ranks, as one checkpoint.

    Takes the arguments of ``Accelerator``. Works with one process, DDP and FSDP2 (``fsdp_version: 2``); with FSDP2 on
    any number of ranks, each of which saves and loads its shards. A checkpoint has the models, optimizers, schedulers,
    the scaler, registered objects, the states of stateful data loaders, and the random states of each rank. Automatic
    naming and ``total_limit`` of a ``ProjectConfiguration`` work as before; old checkpoints are deleted once the new
    one is durable.

    Positions in other data loaders are not saved, as in accelerate: use ``skip_first_batches``.

    Examples
    --------
    >>> import tempfile, torch
    >>> from tensorkeep.integrations.accelerate import TensorkeepAccelerator
    >>> folder = tempfile.TemporaryDirectory()
    >>> accelerator = TensorkeepAccelerator(cpu=True)
    >>> model = torch.nn.Linear(4, 4)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    >>> path = accelerator.save_state(f"{folder.name}/step-10")
    >>> accelerator.load_state(path)
    >>> folder.cleanup()
    """

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save with all ranks, and return the path; a checkpoint at the path is replaced once this one is durable.

        Parameters
        ----------
        output_dir : path-like, optional
            By default ``checkpoints/checkpoint_N`` of the project, with ``automatic_checkpoint_naming``.
        **options
            Options of `tensorkeep.save`, such as ``compression="lossless"``.

        Raises
        ------
        UnsupportedError
            With DeepSpeed, Megatron-LM or FSDP1, or if hooks for ``save_state`` are registered.
        UsageError
            If ``output_dir`` is missing, or ``safe_serialization`` is off: nothing is ever pickled.
        """
        if not safe_serialization:
            raise UsageError("safe_serialization=False is not supported", remedy="leave it out: nothing is pickled")
        self._check(self._save_model_state_pre_hook)
        automatic = self.project_configuration.automatic_checkpoint_naming
        if automatic:
            output_dir = self._checkpoints() / f"checkpoint_{self.save_iteration}"
        elif output_dir is None:
            raise UsageError("save_state needs a path", remedy="give output_dir, or automatic_checkpoint_naming=True")
        save(self._state(), output_dir, group=self._group(), **{"overwrite": not automatic, **options})
        self.project_configuration.iteration += 1
        if automatic and self.is_main_process and self.project_configuration.total_limit is not None:
            for old in self._named()[: -self.project_configuration.total_limit]:
                shutil.rmtree(old)
        return str(output_dir)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Load into what was prepared and registered, with all ranks.

        Parameters
        ----------
        input_dir : path-like, optional
            By default the last checkpoint of the project, with ``automatic_checkpoint_naming``.
        load_kwargs, **options
            Options of `tensorkeep.load`, such as ``strict=False``.

        Raises
        ------
        NotFoundError
            If the checkpoint does not exist.
        UnsupportedError, UsageError, StateMismatchError
            As `save_state`, or if the checkpoint has other models or objects.
        """
        self._check(self._load_model_state_pre_hook)
        if input_dir is None:
            if not self.project_configuration.automatic_checkpoint_naming:
                raise UsageError("load_state needs a path", remedy="give input_dir")
            named = self._named()
            if not named:
                text = "contains no checkpoints"
                raise NotFoundError(text, path=self._checkpoints(), remedy="start without load_state")
            input_dir = named[-1]
        state = load(input_dir, into=self._state(), group=self._group(), **(load_kwargs or {}), **options)
        self.step = state["accumulated"]

    def _check(self, hooks: dict[int, Any]) -> None:
        kinds = DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM
        fsdp1 = self.distributed_type == DistributedType.FSDP and not self.is_fsdp2
        if self.distributed_type in kinds or fsdp1:
            found = "FSDP1" if fsdp1 else self.distributed_type.value
            raise UnsupportedError(
                f"TensorkeepAccelerator does not support {found}", remedy="use fsdp_version: 2, or DDP"
            )
        if hooks:
            remedy = "save what the hook saves with `tensorkeep.save`, or register it with register_for_checkpointing"
            raise UnsupportedError("pre-hooks of save_state and load_state write files of their own", remedy=remedy)

    def _checkpoints(self) -> Path:
        return absolute(as_path(Path(self.project_dir, "checkpoints")))

    def _named(self) -> list[Path]:
        """Return the checkpoints of the project, in their order."""
        found = {
            path: re.fullmatch(r"checkpoint_(\d+)", path.name) for path in self._checkpoints().glob("checkpoint_*")
        }
        return sorted(
            (path for path, match in found.items() if match), key=lambda path: int(path.name.rpartition("_")[2])
        )

    def _group(self) -> Any:
        return dist.group.WORLD if self.num_processes > 1 else None

    def _state(self) -> dict[str, Any]:
        loaders = [each for each in self._dataloaders if getattr(each, "use_stateful_dataloader", False)]
        of_rank = {"random": RandomState(), **({"dataloaders": loaders} if loaders else {})}
        return {
            "models": [self.unwrap_model(model) for model in self._models],
            "optimizers": list(self._optimizers),
            "schedulers": list(self._schedulers),
            "scaler": self.scaler,
            "registered": list(self._custom_objects),
            **{name: PerRank(each) if self.num_processes > 1 else {"0": each} for name, each in of_rank.items()},
            "accumulated": self.step,
        }
