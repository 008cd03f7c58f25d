"""`TensorkeepIO` and `TensorkeepStrategy`: a ``Trainer`` of Lightning saves and loads with Tensorkeep.

With this module imported, ``load_from_checkpoint`` of modules and data modules opens what Tensorkeep has saved.
"""

import os
import zipfile
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from tensorkeep.checkpoint.background import PendingSave
from tensorkeep.checkpoint.loading import load
from tensorkeep.checkpoint.saving import save, save_async
from tensorkeep.errors import TensorkeepError, UnsupportedLeafError, UsageError, warn_caller
from tensorkeep.formats.native.directory import is_native
from tensorkeep.integrations import requires
from tensorkeep.paths import as_path
from tensorkeep.ranks.group import ranks_of
from tensorkeep.state.tree import flatten

with requires("lightning>=2.5"):
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.core import saving
    from lightning.pytorch.strategies import ModelParallelStrategy

__all__ = ["TensorkeepIO", "TensorkeepStrategy"]

_ALL: WeakSet["TensorkeepIO"] = WeakSet()


class TensorkeepIO(TorchCheckpointIO):
    """Saves in the background and loads verified; a plug-in for every ``Trainer`` that does not shard the model.

    ``ModelCheckpoint``, ``ckpt_path``, ``save_weights_only`` and ``load_from_checkpoint`` work as before. Lightning
    decides what is in a checkpoint, and where in an epoch a run resumes; it does not save random states. Training waits
    only while the state is copied. ``fit``, ``test`` and every load wait until the last checkpoint is durable. Nothing
    is unpickled, whatever ``weights_only`` is: checkpoints that Lightning has saved are loaded as well if they hold
    tensors and plain values.

    Parameters
    ----------
    **options
        Options of `tensorkeep.save_async`, such as ``compression="lossless"``. With ``format="torch"`` a checkpoint is
        one file, which programs without Tensorkeep open.

    Examples
    --------
    >>> from lightning.pytorch import Trainer
    >>> from tensorkeep.integrations.lightning import TensorkeepIO
    >>> trainer = Trainer(accelerator="cpu", logger=False, plugins=[TensorkeepIO(compression="lossless")])
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._pending: PendingSave | None = None
        _ALL.add(self)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Begin to save, once the save before is durable; raises its error, and the errors of `save_async`."""
        _refuse(storage_options)
        checkpoint = _without_code(checkpoint)
        self.teardown()
        old = Path(path)
        if not old.is_symlink() and ("format" in self._options or not zipfile.is_zipfile(old)):
            self._pending = save_async(checkpoint, path, overwrite=True, **self._options)
            return
        # A file of Lightning or a link, such as last.ckpt, which a checkpoint does not replace: kept until the save is
        # durable. Lightning's own files end through the link, in another checkpoint.
        beside = old.with_name(f"{old.name}.saving")
        save_async(checkpoint, beside, overwrite=True, **self._options).wait()
        old.unlink()
        beside.rename(old)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load with every block verified; raises as `tensorkeep.load`."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            # The checkpoint may still be in the making on rank 0.
            with ranks_of(dist.group.WORLD, None).collective("waiting for the last checkpoint"):
                self.teardown()
        return _load(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once the next one is durable."""
        self.teardown()
        super().remove_checkpoint(path)

    def teardown(self) -> None:
        """Wait for the save in progress, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


class TensorkeepStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` (FSDP2, tensor parallel) that saves one checkpoint with all ranks.

    Each rank writes and reads its shards. A run resumes on any number of ranks, and one process opens the checkpoint
    with ``load_from_checkpoint``. Sharded strategies do not use a ``CheckpointIO``.

    Takes the arguments of ``ModelParallelStrategy``. ``save_distributed_checkpoint`` has no effect.

    Examples
    --------
    >>> from tensorkeep.integrations.lightning import TensorkeepStrategy
    >>> strategy = TensorkeepStrategy(data_parallel_size=2, tensor_parallel_size=1)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the shards of all ranks; what is at the path remains until the new checkpoint is complete."""
        _refuse(storage_options)
        checkpoint = _without_code(checkpoint)
        state: dict[str, Any] = {"lightning": _Rest(checkpoint)}
        state |= {key: checkpoint.pop(key) for key in ("state_dict", "optimizer_states") if key in checkpoint}
        save(state, self._path(filepath), overwrite=True, group=dist.group.WORLD)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fill the shards of this rank; raises as `tensorkeep.load`."""
        rest = _Rest({})
        state: dict[str, Any] = {"state_dict": self.lightning_module_state_dict(), "lightning": rest}
        if self.optimizers:
            state["optimizer_states"] = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        state = load(self._path(checkpoint_path), into=state, group=dist.group.WORLD)
        set_model_state_dict(self.model, state["state_dict"])
        for optimizer, saved in zip(self.optimizers, state.get("optimizer_states", []), strict=True):
            set_optimizer_state_dict(self.model, optimizer, saved)
        # Lightning asks for these keys, and has nothing left to do with them.
        done: dict[str, Any] = {"state_dict": {}, "optimizer_states": [{} for _ in self.optimizers]}
        return rest.state | done

    def _path(self, path: Any) -> str:
        # The names of folders may hold the time, which differs between ranks.
        return str(self.broadcast(path))


class _Rest:
    """What a checkpoint of Lightning has besides shards: progress, callbacks, schedulers, hyperparameters."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _refuse(storage_options: object) -> None:
    if storage_options is not None:
        raise UsageError("storage_options has no effect", remedy="give options to TensorkeepIO, or leave it out")


def _without_code(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without the hyperparameters that are modules, classes or functions, and warn of them."""
    left_out = []
    for group in ("hyper_parameters", "datamodule_hyper_parameters"):
        given = checkpoint.get(group)
        if isinstance(given, dict):
            kept = {name: value for name, value in given.items() if _is_plain(value)}
            left_out += [str(name) for name in given if name not in kept]
            checkpoint = {**checkpoint, group: kept}
    if left_out:
        # As Lightning does with what it cannot pickle. A module would return as the dict of its weights.
        warn_caller(
            f"these hyperparameters cannot be saved, and are left out: {', '.join(left_out)}; give them to "
            f"load_from_checkpoint, and to save_hyperparameters(ignore={left_out})"
        )
    return checkpoint


def _is_plain(value: Any) -> bool:
    try:
        flatten(value)
    except UnsupportedLeafError:
        return False
    return True


def _load(path: Any, map_location: Any) -> dict[str, Any]:
    for each in list(_ALL):
        each.teardown()
    # Loaded tensors are on the CPU, unless a device is given: nothing to map.
    device = None if callable(map_location) or isinstance(map_location, dict) else map_location
    state: dict[str, Any] = load(path, device=device)
    # `TensorkeepStrategy` keeps the shards apart from the rest.
    return {**state.pop("lightning", {}), **state}


_load_file = saving.pl_load


def _load_any(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    is_path = isinstance(path, str | os.PathLike) and not os.fspath(path).startswith("http")
    for each in list(_ALL) if is_path else ():
        each.teardown()
    try:
        is_ours = is_path and is_native(as_path(path))
    except TensorkeepError:
        # Lightning may have other credentials, or more stores. Its error has this one as its context.
        return _load_file(path, map_location=map_location, weights_only=weights_only)
    if is_ours:
        return _load(path, map_location)
    return _load_file(path, map_location=map_location, weights_only=weights_only)


# `load_from_checkpoint` is a method of classes, which know no Trainer and ask no CheckpointIO: it always opens a file.
saving.pl_load = _load_any
