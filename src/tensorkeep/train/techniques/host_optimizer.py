"""An optimizer that keeps its states in the memory of the CPU, and makes its updates there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensorkeep.train.techniques.streams import stream_of

_BUCKET_BYTES = 64 << 20
"""Weights that are updated together: while the CPU updates one bucket, others are on their way."""


@dataclass(slots=True)
class _Weight:
    """A weight, and what of it is on the CPU."""

    live: Tensor
    master: Tensor
    gradient: Tensor


class HostOptimizer(torch.optim.Optimizer):
    """Steps weights of a device on the CPU.

    Its groups, and so clipping, scaling and accumulation of gradients, are those of the weights on the device. A step
    copies the gradients to the CPU, updates copies of the weights there, and copies those back: on CUDA through pinned
    memory, in a stream of its own. The states that it saves are the other optimizer's.

    Between two steps nothing else may change the weights, except for a while; after ``load_state_dict`` they are looked
    at anew.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        A new one, for the weights on the device.
    bucket_bytes : int

    Attributes
    ----------
    fetched_bytes : int
        Of the gradients that were copied to the CPU in all steps so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        self._weights = [_on_host(live) for group in self.param_groups for live in group["params"]]
        self._buckets = list(_in_buckets(self._weights, bucket_bytes))
        masters = iter(self._weights)
        kind: Any = type(optimizer)
        self._inner: torch.optim.Optimizer = kind(
            [
                {**_fused(group), "params": [next(masters).master for _ in group["params"]]}
                for group in self.param_groups
            ]
        )
        self._follow()
        self._device = self._weights[0].live.device
        self._here: Any = torch.get_device_module(self._device)
        self._stream = stream_of(self._device)
        self._given_back = self._here.Event()
        self._masters_are_current = False
        self.fetched_bytes = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the weights that have a gradient."""
        # The copies that were given back are about to be written to.
        self._given_back.synchronize()
        if not self._masters_are_current:
            for weight in self._weights:
                weight.master.copy_(weight.live)
            self._masters_are_current = True
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update(_settings(group))
        # The gradients are there when the device comes to this point, and the weights are no longer in use.
        self._stream.wait_stream(self._here.current_stream(self._device))
        arrivals = [self._fetch(bucket) for bucket in self._buckets]
        for bucket, arrived in zip(self._buckets, arrivals, strict=True):
            arrived.synchronize()
            self._update(bucket)
        self._given_back.record(self._stream)
        self._here.current_stream(self._device).wait_stream(self._stream)

    def _fetch(self, bucket: list[_Weight]) -> Any:
        """Begin to copy the gradients of a bucket to the CPU; return the event of their arrival."""
        with self._here.stream(self._stream):
            for weight in bucket:
                if weight.live.grad is not None:
                    weight.gradient.copy_(weight.live.grad, non_blocking=True)
                    self.fetched_bytes += weight.gradient.nbytes
        arrived = self._here.Event()
        arrived.record(self._stream)
        return arrived

    def _update(self, bucket: list[_Weight]) -> None:
        """Update one bucket, as the only weights that have a gradient, and begin to copy it back."""
        there = [weight for weight in bucket if weight.live.grad is not None]
        for weight in there:
            weight.master.grad = weight.gradient
        self._inner.step()
        for weight in there:
            weight.master.grad = None
        with self._here.stream(self._stream):
            for weight in there:
                weight.live.copy_(weight.master, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer on the CPU, as it would be on the device."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave, or that of an optimizer on the device."""
        self._inner.load_state_dict(state_dict)
        for group in self._inner.param_groups:
            group.update(_fused(_settings(group)))
        self._follow()
        self._masters_are_current = False

    def _follow(self) -> None:
        """Give the groups on the device the settings of those on the CPU."""
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(inner))


def _on_host(live: Tensor) -> _Weight:
    pinned = live.is_cuda
    master, gradient = (torch.empty_like(live, device="cpu", pin_memory=pinned, requires_grad=False) for _ in range(2))
    return _Weight(live, master, gradient)


def _in_buckets(weights: list[_Weight], most: int) -> Iterator[list[_Weight]]:
    bucket: list[_Weight] = []
    for weight in weights:
        bucket.append(weight)
        if sum(each.gradient.nbytes for each in bucket) >= most:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _fused(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the fused kernel, which on the CPU is the only one that uses all cores."""
    return {**settings, "fused": True, "foreach": None} if "fused" in settings else settings
