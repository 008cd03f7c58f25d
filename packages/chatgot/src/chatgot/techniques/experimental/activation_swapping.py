"""Activation swapping: 0.14 times the plain speed on an H200, with 2.9 of 15.4 GB; checkpointing needs 3.5 GB at 0.8.

Two streams, ``out`` and ``back``, copy saved tensors to CPU memory and back, beside the stream that computes.
"""

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from chatgot.settings import Count
from chatgot.techniques.base import MemoryEffects, Proof, Section, StepState, Technique, Verification
from tensorkeep.ext import format_bytes


class ActivationSwappingSettings(Section, frozen=True):
    """How tensors are moved."""

    # True: through a pool of pinned memory, with two streams beside the one that computes. False: with torch's
    # save_on_cpu, which copies every saved tensor, weights included, in the stream that computes.
    pool: bool = True
    # With the pool: smaller tensors, in bytes, are not moved.
    least: Count = 1 << 20
    # With the pool: how many tensors are prefetched while one is used.
    ahead: Annotated[int, Meta(ge=0)] = 2


class ActivationSwapping(Technique):
    """Rhu et al., arXiv 1602.08124, for all tensors that autograd saves."""

    name: ClassVar = "activation-swapping"
    aliases: ClassVar = ("buffer-swapping", "optimal-buffer-swapping", "swapping", "activation-offload", "save-on-cpu")
    changes: ClassVar = "loss"
    summary: ClassVar = "moves activations to CPU memory, and back for the backward pass"
    effect: ClassVar = "activations take little GPU memory; steps take longer where the bus is slower than the layers"
    reference: ClassVar = "arXiv 1602.08124; torch.autograd.graph.save_on_cpu"
    predicts_memory: ClassVar = True
    needs_cuda: ClassVar = True
    conflicts: ClassVar = {
        "activation-checkpointing": "checkpointed blocks save nothing that could be moved",
        "compile": "compiled code fetches everything it saved at once, which needs the memory that should be saved",
        "cuda-graphs": "replaying a captured graph does not run the saved-tensor hooks, so none could be moved back",
        **dict.fromkeys(
            ("fsdp", "hsdp"), "it gathers weights again for the backward pass, and they would be moved like activations"
        ),
    }
    settings: ActivationSwappingSettings

    _out_bytes = _back_bytes = 0

    def apply(self, run: StepState) -> None:
        settings, inner = self.settings, run.operations.loss
        swapper = Swapper(run.device, list(run.model.parameters()), least=settings.least, ahead=settings.ahead)

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            hooks = swapper.hooks() if settings.pool else save_on_cpu(pin_memory=run.device.type == "cuda")
            with self._counting(hooks):
                return inner(inputs, targets)

        run.operations.loss = loss

    def _counting(self, hooks: saved_tensors_hooks) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Any:
            packed = hooks.pack_hook(tensor)
            # A tensor that stays on the device is returned as it is.
            self._out_bytes += 0 if packed is tensor else tensor.nbytes
            return packed

        def unpack(packed: Any) -> Tensor:
            tensor: Tensor = hooks.unpack_hook(packed)
            self._back_bytes += 0 if packed is tensor else tensor.nbytes
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def affect_memory(self, effects: MemoryEffects) -> None:
        effects.swaps_activations = True

    def verify(self, run: StepState) -> Verification:
        self._out_bytes = self._back_bytes = 0
        yield
        out, back = self._out_bytes, self._back_bytes
        if not out or back < out:
            raise self.not_active(
                f"{format_bytes(out)} were moved to the CPU, and {format_bytes(back)} came back",
                f"give a smaller techniques.{self.name}.least than {self.settings.least:,}, or report it",
            )
        return Proof(f"{format_bytes(out)} were moved to CPU memory and back", out_bytes=out, back_bytes=back)


@dataclass(eq=False)
class SwappedTensor:
    """A tensor in CPU memory: number ``index`` in the ``order`` of the forward pass."""

    host: Tensor
    copied: Any
    order: "list[weakref.ref[SwappedTensor]]"
    index: int
    # A prefetched copy on the device and the event that completes it, until the copy is returned.
    fetched: tuple[Tensor, Any] | None = None
    returned: bool = False


class Swapper:
    """Moves the tensors that autograd saves within `hooks`, and moves them back for the backward pass.

    Tensors below ``least`` bytes and views of ``kept`` tensors (parameters) stay. ``ahead`` tensors are prefetched.
    """

    def __init__(self, device: torch.device, kept: Collection[Tensor], *, least: int, ahead: int) -> None:
        # Tensors name their device with an index: "cuda:0", never "cuda".
        self._device = torch.empty(0, device=device).device
        self._kept = kept
        self._least = least
        self._ahead = ahead
        self._backend: Any = torch.get_device_module(device)
        self._pinned = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if self._pinned else torch.cpu.Stream()  # type: ignore[no-untyped-call]
        self._back: Any = torch.cuda.Stream(device) if self._pinned else torch.cpu.Stream()  # type: ignore[no-untyped-call]
        # Weak references: autograd decides how long a saved tensor lives.
        self._order: list[weakref.ref[SwappedTensor]] = []

    def hooks(self) -> saved_tensors_hooks:
        self._order = []
        # Read for each forward pass: a parameter may have been given other memory.
        kept = {each.untyped_storage().data_ptr() for each in self._kept}

        def pack(tensor: Tensor) -> Tensor | SwappedTensor:
            if tensor.nbytes < self._least or tensor.device != self._device:
                return tensor
            return tensor if tensor.untyped_storage().data_ptr() in kept else self._move_out(tensor)

        return saved_tensors_hooks(pack, self._unpack)

    def _move_out(self, tensor: Tensor) -> SwappedTensor:
        # empty_like keeps the strides of a dense tensor, so that the copy is one transfer.
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
        # The copy starts after the tensor was computed.
        self._out.wait_stream(self._backend.current_stream(self._device))
        with self._backend.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            # The allocator does not reuse the memory before this stream has read it.
            tensor.record_stream(self._out)
        swapped = SwappedTensor(host, self._event(self._out), self._order, len(self._order))
        self._order.append(weakref.ref(swapped))
        return swapped

    def _unpack(self, packed: Tensor | SwappedTensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor, arrived = packed.fetched or self._fetch(packed)
        packed.fetched, packed.returned = None, True
        # The backward pass needs the saved tensors in reverse order.
        for reference in packed.order[max(0, packed.index - self._ahead) : packed.index]:
            earlier = reference()
            if earlier is not None and earlier.fetched is None and not earlier.returned:
                earlier.fetched = self._fetch(earlier)
        current = self._backend.current_stream(self._device)
        # The computation starts after the copy back.
        current.wait_event(arrived)
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    def _fetch(self, swapped: SwappedTensor) -> tuple[Tensor, Any]:
        with self._backend.stream(self._back):
            # The copy back starts after the copy out has ended.
            self._back.wait_event(swapped.copied)
            tensor = torch.empty_like(swapped.host, device=self._device)
            # The host memory may be freed before this copy ends: the allocator of pinned memory waits for it.
            tensor.copy_(swapped.host, non_blocking=True)
        return tensor, self._event(self._back)

    def _event(self, stream: Any) -> Any:
        event = self._backend.Event()
        event.record(stream)
        return event
