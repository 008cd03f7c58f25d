"""The model of a run, from its last or its best checkpoint."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tensorkeep.checkpoint.load.load import load
from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.manager.steps import Step
from tensorkeep.errors import NotACheckpointError
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.run import METRIC

Which = Literal["last", "best"]


class Trained(NamedTuple):
    """A model that was trained, in evaluation mode, and what belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    step: Step


def load_trained(folder: RunFolder, *, which: Which = "last", device: str = "auto") -> Trained:
    """Return the model of a run; its averaged weights, if the run averages them.

    Parameters
    ----------
    folder : RunFolder
    which : str
        ``"last"``, or ``"best"`` by the validation loss.
    device : str
        See `chosen_device`.

    Raises
    ------
    NotACheckpointError
        If there is no run, or it has no checkpoint.
    CorruptCheckpointError
        If the checkpoint is damaged.
    """
    config = folder.config()
    tokenizer = folder.tokenizer()
    manager = CheckpointManager(folder.checkpoints)
    step = manager.best(METRIC) if which == "best" else manager.latest()
    if step is None:
        raise NotACheckpointError(
            f"holds no {which} checkpoint", path=folder.checkpoints, remedy="train on, with a smaller checkpoint.every"
        )
    model = GPT(config.model, device=chosen_device(device))
    weights = dict(model.named_parameters())
    name = "average" if config.ema.decay else "model"
    with torch.no_grad():
        tensors = {key: weight.detach() for key, weight in weights.items()}
        load(step.path, into={name: tensors}, select=[f"{name}.{key}" for key in tensors])
    return Trained(model.eval(), tokenizer, step)
