"""Loading the trained model of a run from its last or its best checkpoint."""

from typing import Literal, NamedTuple

import torch

from tensorkeep.checkpoint.loading import load
from tensorkeep.errors import NotACheckpointError, PathLike, UsageError
from tensorkeep.manager.manager import CheckpointManager
from tensorkeep.runs.address import find_checkpoint
from tensorkeep.runs.backends import place_of
from tensorkeep.runs.steps import Step
from tensorkeep.train.data.tokenizers.base import Tokenizer
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.data import mask_documents
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.state import METRIC

Which = Literal["last", "best"]


class TrainedModel(NamedTuple):
    """A trained model in evaluation mode, the tokenizer of its data, the step of its checkpoint, and its run."""

    model: GPT
    tokenizer: Tokenizer
    step: Step
    folder: RunFolder


def load_trained_at(address: PathLike, *, which: Which = "last", device: str = "auto") -> TrainedModel:
    """Return the model of a run at the address of its folder, its ``checkpoints/``, or one step such as ``run@1200``.

    Raises as `load_trained` and `find_checkpoint`; UsageError if both a step and ``which="best"`` are given.
    """
    folder, wanted = RunFolder.at(address)
    if wanted is None:
        return load_trained(folder, which=which, device=device)
    if which != "last":
        raise UsageError(f"both a step and {which!r} are given", path=address, remedy=f"leave out --which {which}")
    number = find_checkpoint(f"{folder.checkpoints}@{wanted}").step
    return load_trained(folder, which=which, device=device, step=place_of(folder.checkpoints).read(number or 0))


def load_trained(
    folder: RunFolder, *, which: Which = "last", device: str = "auto", step: Step | None = None
) -> TrainedModel:
    """Return the model of a run, with its averaged weights if the run averages them.

    ``"best"`` is by the validation loss; a step overrides that. The device is that of `chosen_device`.

    Raises NotACheckpointError if there is no run, or it has no checkpoint; CorruptCheckpointError if the checkpoint is
    damaged.
    """
    config = folder.record().config
    tokenizer = folder.tokenizer()
    if step is None:
        manager = CheckpointManager(folder.checkpoints)
        step = manager.best(METRIC) if which == "best" else manager.latest()
    if step is None:
        raise NotACheckpointError(
            f"holds no {which} checkpoint",
            path=folder.checkpoints,
            remedy="take the last one: --which last" if which == "best" else "resume the run",
        )
    model = GPT(config.model, device=chosen_device(device))
    mask_documents(model, config, tokenizer)
    name = "average" if config.ema.decay else "model"
    with torch.no_grad():
        tensors = {key: weight.detach() for key, weight in model.named_parameters()}
        load(step.path, into={name: tensors}, select=[f"{name}.{key}" for key in tensors])
    return TrainedModel(model.eval(), tokenizer, step, folder)
