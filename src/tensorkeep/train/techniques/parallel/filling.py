"""The weights of one process, made from a model on the meta device, with the values that one process would draw."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.device import memory_errors_reported
from tensorkeep.train.run.state import Run

Keep = Callable[[str, Tensor, Tensor], Tensor]
"""``(name, parameter, full) -> tensor``: what a process has of a parameter on the meta device, given its values."""


@torch.no_grad()
def fill_parameters(run: Run, keep: Keep) -> None:
    """Make the parameters of a model on the meta device.

    Every process draws all values, one tensor after the other, and keeps its own: besides what is kept, the memory of
    one full tensor is needed.
    """
    model = run.model
    generator = torch.Generator().manual_seed(run.config.loop.seed)
    owners = _owners(model)
    with memory_errors_reported(run.config.model):
        model.fill_tables(run.device)
        for name, parameter in list(model.named_parameters()):
            kept = nn.Parameter(keep(name, parameter.data, model.initial_value(name, generator)))
            for module, attribute in owners[id(parameter)]:
                setattr(module, attribute, kept)


def _owners(model: GPT) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules that have each parameter, and its name there; a tied one has two."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    return owners


def update_parameters(run: Run, before: Mapping[str, nn.Parameter]) -> None:
    """Give the optimizers the parameters of the model in place of those that it had before."""
    after = dict(run.model.named_parameters())
    new = {id(old): after[name] for name, old in before.items()}
    for optimizer in run.optimizers.values():
        for group in optimizer.param_groups:
            group["params"] = [new[id(each)] for each in group["params"]]
