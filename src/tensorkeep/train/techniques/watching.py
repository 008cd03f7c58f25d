"""How techniques watch a step: hooks that count, and are gone afterwards.

What is computed beside the training, without gradients, is none of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def counted_calls(modules: Iterable[nn.Module]) -> Iterator[Counter[nn.Module]]:
    """Count, within, how often the forward of each module runs."""
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, inputs: object) -> None:
        calls[module] += torch.is_grad_enabled()

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(count).remove)
        yield calls


@contextmanager
def seen_outputs(modules: Iterable[nn.Module], see: Callable[[nn.Module, torch.Tensor], Any]) -> Iterator[None]:
    """Call a function, within, with each tensor that a module returns."""

    def look(module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            see(module, output)

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(look).remove)
        yield


@contextmanager
def seen_inputs(modules: Iterable[nn.Module], see: Callable[[nn.Module, torch.Tensor], Any]) -> Iterator[None]:
    """Call a function, within, with the first tensor that a module is given, before other hooks make anything of it."""

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            see(module, inputs[0])

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(look, prepend=True).remove)
        yield
