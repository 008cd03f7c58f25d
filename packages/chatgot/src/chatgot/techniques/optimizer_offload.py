"""Optimizer offload: AdamW's states are kept in CPU memory, and the CPU updates the weights."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from chatgot.optim.optimizers import weights_of
from chatgot.techniques.base import MemoryEffects, Proof, StepState, Technique, Verification
from chatgot.techniques.observe import observe_adamw
from tensorkeep.ext import format_bytes

# Weights that are updated together: while the CPU updates one bucket, other buckets are being copied.
_BUCKET_BYTES = 64 << 20


class OptimizerOffload(Technique):
    """Ren et al., arXiv 2101.06840. Muon stays on the device: its updates are matmuls."""

    name: ClassVar = "optimizer-offload"
    aliases: ClassVar = ("offload", "offloading", "cpu-offload", "cpu-offloading", "zero-offload")
    changes: ClassVar = "optimizer"
    # The kernel of another device adds in another order, and Adam divides by numbers that may be tiny.
    tolerance: ClassVar = 1e-3
    summary: ClassVar = "keeps AdamW's states in CPU memory, and updates copies of the weights there"
    effect: ClassVar = (
        "saves 8 bytes of GPU memory per weight and takes 16 on the CPU; each step moves 8 bytes per weight over the "
        "bus and waits for AdamW on the CPU"
    )
    reference: ClassVar = "arXiv 2101.06840"
    predicts_memory: ClassVar = True
    needs_cuda: ClassVar = True
    conflicts: ClassVar = {
        "fused-optimizer": "the optimizer on the CPU uses the fused kernel already",
        "low-bit-optimizer": "the optimizer on the CPU has 32-bit states",
        **dict.fromkeys(("fsdp", "hsdp"), "the weights are sharded, and fully_shard has an offload of its own"),
        "tensor-parallel": "the weights are sharded",
    }

    def apply(self, run: StepState) -> None:
        run.optimizers["adamw"] = HostOptimizer(run.optimizers["adamw"])

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.offloads_states = True

    def verify(self, run: StepState) -> Verification:
        optimizer: Any = run.optimizers["adamw"]
        before = getattr(optimizer, "fetched_bytes", 0)
        with observe_adamw(run, getattr(optimizer, "state_of", None)) as observed:
            yield
        if not observed.updates:
            return None
        expected = sum(weight.nbytes for weight in weights_of(optimizer))
        fetched = getattr(optimizer, "fetched_bytes", 0) - before
        states = [
            value
            for state in optimizer.state_dict()["state"].values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        devices = sorted({str(state.device) for state in states})
        if fetched != expected or devices != ["cpu"]:
            raise self.not_active(
                f"{format_bytes(fetched)} of {format_bytes(expected)} of gradients were copied to the CPU, and the "
                f"states are on {', '.join(devices) or 'no device'}"
            )
        observed.check(self)
        nbytes = sum(state.nbytes for state in states)
        summary = f"{format_bytes(nbytes)} of states are in CPU memory; {format_bytes(fetched)} of gradients came there"
        return Proof(summary, state_bytes=nbytes, fetched_bytes=fetched)


class _HostWeight:
    def __init__(self, live: Tensor) -> None:
        self.live = live
        # Pinned, because copies from pageable memory would make the CPU wait.
        self.master, self.gradient = (
            torch.empty_like(live, device="cpu", pin_memory=live.is_cuda, requires_grad=False) for _ in range(2)
        )


class HostOptimizer(torch.optim.Optimizer):
    """Steps the weights of a device on the CPU, and saves the states that the wrapped optimizer would.

    Nothing else may change the weights between two steps, except temporarily; ``load_state_dict`` reads them again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        # The groups hold the weights on the device, so that clipping, scaling and accumulation of gradients work as
        # before.
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        self._weights = [_HostWeight(live) for live in weights_of(self)]
        self._buckets = list(_in_buckets(self._weights, bucket_bytes))
        weights = iter(self._weights)
        kind: Any = type(optimizer)
        self._inner: torch.optim.Optimizer = kind(
            [
                {**_with_fused(group), "params": [next(weights).master for _ in group["params"]]}
                for group in self.param_groups
            ]
        )
        self._follow_inner_settings()
        self._device = self._weights[0].live.device
        self._backend: Any = torch.get_device_module(self._device)
        on_cuda = self._device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._device) if on_cuda else torch.cpu.Stream()  # type: ignore[no-untyped-call]
        self._copied_back = self._backend.Event()
        # A checkpoint may be restored before the first step, which copies the weights.
        self._masters_are_current = False
        self.fetched_bytes = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # The last step may still be copying the master weights, which this step overwrites.
        self._copied_back.synchronize()
        if not self._masters_are_current:
            for weight in self._weights:
                weight.master.copy_(weight.live)
            self._masters_are_current = True
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            # A schedule sets the learning rate of the groups on the device.
            inner.update(_settings(group))
        # At this point in the device's stream, the gradients are complete and the weights are no longer in use.
        self._stream.wait_stream(self._backend.current_stream(self._device))
        # All copies are queued first: while one bucket is updated, the next ones arrive.
        arrivals = [self._fetch_gradients(bucket) for bucket in self._buckets]
        for bucket, arrived in zip(self._buckets, arrivals, strict=True):
            arrived.synchronize()
            self._update(bucket)
        # The next forward pass waits for the copies; the CPU does not.
        self._copied_back.record(self._stream)
        self._backend.current_stream(self._device).wait_stream(self._stream)

    def _fetch_gradients(self, bucket: list[_HostWeight]) -> Any:
        with self._backend.stream(self._stream):
            for weight in bucket:
                if weight.live.grad is not None:
                    weight.gradient.copy_(weight.live.grad, non_blocking=True)
                    self.fetched_bytes += weight.gradient.nbytes
        arrived = self._backend.Event()
        arrived.record(self._stream)
        return arrived

    def _update(self, bucket: list[_HostWeight]) -> None:
        # The inner optimizer steps the weights that have a gradient: for this call, the weights of the bucket.
        with_gradient = [weight for weight in bucket if weight.live.grad is not None]
        for weight in with_gradient:
            weight.master.grad = weight.gradient
        self._inner.step()
        for weight in with_gradient:
            # Otherwise the next bucket would step these weights again.
            weight.master.grad = None
        with self._backend.stream(self._stream):
            for weight in with_gradient:
                weight.live.copy_(weight.master, non_blocking=True)

    def state_of(self, live: Tensor) -> dict[str, Any]:
        master = next(weight.master for weight in self._weights if weight.live is live)
        return dict(self._inner.state.get(master, {}))

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)
        for group in self._inner.param_groups:
            # The checkpoint may come from an optimizer with another kernel.
            group.update(_with_fused(_settings(group)))
        self._follow_inner_settings()
        self._masters_are_current = False

    def _follow_inner_settings(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_settings(inner))


def _in_buckets(weights: list[_HostWeight], most: int) -> Iterator[list[_HostWeight]]:
    bucket: list[_HostWeight] = []
    for weight in weights:
        bucket.append(weight)
        if sum(each.gradient.nbytes for each in bucket) >= most:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _with_fused(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the fused kernel, the only one that uses all cores of a CPU."""
    return {**settings, "fused": True, "foreach": None} if "fused" in settings else settings
