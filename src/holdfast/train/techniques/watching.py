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
def kept_bytes() -> Iterator[list[int]]:
    """Note, within, the bytes of each tensor that is kept for the backward pass; the same storage is noted once."""
    sizes: list[int] = []
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes.append(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
