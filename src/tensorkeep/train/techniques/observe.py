"""Hooks and wrappers with which techniques observe a step; all of them are removed afterwards.

The hooks on modules ignore what runs without gradients, such as an evaluation.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tensorkeep.train.run.state import Run

Observer = Callable[[nn.Module, Tensor], object]
Operation = Literal["loss", "backward", "clip", "accepts", "update"]


@contextmanager
def count_calls(modules: Iterable[nn.Module]) -> Iterator[Counter[nn.Module]]:
    """Count how often the forward of each module runs."""
    calls: Counter[nn.Module] = Counter()
    with observe_inputs(modules, lambda module, inputs: calls.update([module])):
        yield calls


def observe_inputs(modules: Iterable[nn.Module], observer: Observer) -> AbstractContextManager[None]:
    """Call a function with the first input of each module, before other hooks change it."""

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            observer(module, inputs[0])

    return hooked(each.register_forward_pre_hook(hook, prepend=True) for each in modules)


def observe_outputs(modules: Iterable[nn.Module], observer: Observer) -> AbstractContextManager[None]:
    """Call a function with the output of each module."""

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        if torch.is_grad_enabled():
            observer(module, output)

    return hooked(each.register_forward_hook(hook) for each in modules)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Install hooks, and remove them at the end."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.callback(handle.remove)
        yield


@contextmanager
def replace_operation(run: Run, name: Operation, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace one of a run's `Operations` within this context."""
    original = getattr(run.operations, name)
    setattr(run.operations, name, replacement)
    try:
        yield
    finally:
        setattr(run.operations, name, original)


@contextmanager
def record_inputs(run: Run) -> Iterator[list[Tensor]]:
    """Record the inputs, on the CPU, of each call of the run's loss."""
    loss, inputs_of_step = run.operations.loss, []

    def recording_loss(inputs: Tensor, targets: Tensor) -> Tensor:
        inputs_of_step.append(inputs.cpu())
        return loss(inputs, targets)

    with replace_operation(run, "loss", recording_loss):
        yield inputs_of_step


def fingerprint(tensor: Tensor) -> int:
    """Return the sum of the bits of a float32 tensor, read as integers."""
    return int(tensor.view(torch.int32).sum(dtype=torch.int64))


@dataclass
class Updates:
    """How many updates of the weights were made, 0 if the gradient was not finite, and the steps of each optimizer."""

    count: int = 0
    optimizer_steps: Counter[str] = field(default_factory=Counter)


@contextmanager
def count_updates(run: Run) -> Iterator[Updates]:
    """Count the updates of the weights, and the steps of each optimizer by its name."""
    updates, update = Updates(), run.operations.update

    def counting_update() -> None:
        updates.count += 1
        update()

    def counting_hook(name: str) -> Any:
        return lambda *arguments: updates.optimizer_steps.update([name])

    handles = (each.register_step_pre_hook(counting_hook(name)) for name, each in run.optimizers.items())
    with hooked(handles), replace_operation(run, "update", counting_update):
        yield updates
