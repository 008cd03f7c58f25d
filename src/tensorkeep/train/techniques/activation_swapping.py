"""Activation swapping: what the backward pass needs is moved to CPU memory, and back when it is needed.

Two streams, ``out`` and ``back``, copy beside the stream that computes. These rules keep gradients correct:

- A copy out starts after the tensor was computed, and the device memory is not reused before that copy has ended.
- A copy back starts after its copy out, and the computation that uses it starts after the copy back.
- A block of CPU memory is overwritten only after it was read; without this rule gradients are silently wrong.
"""

import weakref
from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tensorkeep.train.config.sections import Count, Section
from tensorkeep.train.run.state import Run
from tensorkeep.train.techniques.base import Proof, Technique, Verification
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.units import format_bytes


class ActivationSwappingSettings(Section, frozen=True):
    """How tensors are moved.

    Attributes
    ----------
    pool : bool
        True: through a pool of pinned memory, with two streams beside the one that computes. False: with torch's
        ``save_on_cpu``, which copies every saved tensor, weights included, in the stream that computes.
    least : int
        With the pool: smaller tensors, in bytes, are not moved.
    ahead : int
        With the pool: how many tensors are prefetched while one is used.
    """

    pool: bool = True
    least: Count = 1 << 20
    ahead: Annotated[int, Meta(ge=0)] = 2


class ActivationSwapping(Technique):
    """Rhu et al., arXiv 1602.08124, for all tensors that autograd saves."""

    name: ClassVar = "activation-swapping"
    kind: ClassVar = "systems"
    changes: ClassVar = "loss"
    summary: ClassVar = "moves activations to CPU memory, and back for the backward pass"
    effect: ClassVar = "activations take little GPU memory; steps take longer where the bus is slower than the layers"
    reference: ClassVar = "arXiv 1602.08124; torch.autograd.graph.save_on_cpu"
    Settings: ClassVar = ActivationSwappingSettings
    conflicts: ClassVar = {
        "activation-checkpointing": "checkpointed blocks save nothing that could be moved",
        "compile": "compiled code fetches everything it saved at once, which needs the memory that should be saved",
        "cuda-graphs": "a recorded graph does not ask for saved tensors, so none could be moved back",
        "fsdp": "it gathers weights again for the backward pass, and they would be moved like activations",
    }
    settings: ActivationSwappingSettings

    _mover: "Swapper | _SaveOnCPU"

    def lacks(self, machine: Machine) -> str | None:
        """Return that CUDA is missing."""
        return machine.lacks_cuda()

    def apply(self, run: Run) -> None:
        """Compute losses with hooks that move the tensors that autograd saves."""
        settings = self.settings
        if settings.pool:
            parameters = list(run.model.parameters())
            self._mover = Swapper(run.device, parameters, least=settings.least, ahead=settings.ahead)
        else:
            self._mover = _SaveOnCPU(pinned=run.device.type == "cuda")
        inner = run.operations.loss

        def loss(inputs: Tensor, targets: Tensor) -> Tensor:
            with self._mover.hooks():
                return inner(inputs, targets)

        run.operations.loss = loss

    def verify(self, run: Run) -> Verification:
        """Count the bytes that are moved, which must all come back."""
        mover = self._mover
        out, back = mover.out_bytes, mover.back_bytes
        yield
        out, back = mover.out_bytes - out, mover.back_bytes - back
        if not out or back < out:
            raise self.not_active(
                f"{format_bytes(out)} were moved to the CPU, and {format_bytes(back)} came back",
                f"give a smaller techniques.{self.name}.least than {self.settings.least:,}, or report it",
            )
        return Proof(f"{format_bytes(out)} were moved to CPU memory and back", out_bytes=out, back_bytes=back)


class _SaveOnCPU:
    """torch's ``save_on_cpu``, with the bytes counted."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self.out_bytes = 0
        self.back_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Return a context for one forward pass."""
        hooks = save_on_cpu(pin_memory=self._pinned)
        pack, unpack = hooks.pack_hook, hooks.unpack_hook

        def counting_pack(tensor: Tensor) -> Any:
            self.out_bytes += tensor.nbytes
            return pack(tensor)

        def counting_unpack(packed: Any) -> Tensor:
            tensor: Tensor = unpack(packed)
            self.back_bytes += tensor.nbytes
            return tensor

        hooks.pack_hook, hooks.unpack_hook = counting_pack, counting_unpack
        return hooks


@dataclass(slots=True)
class Block:
    """A block of CPU memory.

    Attributes
    ----------
    memory : Tensor
        uint8, 1-D.
    free_after : torch.cuda.Event, optional
        When all copies from or to it that were started have ended.
    """

    memory: Tensor
    free_after: Any = None


class Pool:
    """Blocks of CPU memory that are reused for tensors of the same size in bytes.

    Attributes
    ----------
    made, taken : int
        Blocks that were allocated, and how often one was taken.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self.made = 0
        self.taken = 0

    def take(self, nbytes: int) -> Block:
        """Return a block; a write to it must wait for its ``free_after``."""
        self.taken += 1
        if free := self._free[nbytes]:
            return free.pop()
        self.made += 1
        return Block(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))

    def give(self, block: Block) -> None:
        """Return a block to the pool."""
        self._free[len(block.memory)].append(block)


class Swapped:
    """A tensor that was moved out; its block returns to the pool when autograd has released the tensor."""

    def __init__(self, tensor: Tensor, pool: Pool, order: "list[weakref.ref[Swapped]]") -> None:
        self.device, self.dtype, self.size = tensor.device, tensor.dtype, tensor.size()
        # The strides of a copy: the tensor's own, if its elements fill its memory.
        self.strides = torch.empty_like(tensor, device="meta").stride()
        self.block = pool.take(tensor.nbytes)
        self.fetched: tuple[Tensor, Any] | None = None
        self.returned = False
        self.index = len(order)
        self.order = order
        order.append(weakref.ref(self))
        weakref.finalize(self, pool.give, self.block)

    def on_host(self) -> Tensor:
        """Return its block as a tensor."""
        return self.block.memory.view(self.dtype).as_strided(self.size, self.strides)

    def on_device(self) -> Tensor:
        """Return an uninitialised tensor for it on the device."""
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=self.device)


class Swapper:
    """Moves what autograd saves within `hooks`, and moves it back when the backward pass asks for it.

    Parameters
    ----------
    device : torch.device
        Tensors on other devices are not moved.
    kept : collection of Tensor
        Tensors that are not moved, nor are views of them: the parameters.
    least : int
        Smaller tensors, in bytes, are not moved.
    ahead : int
        How many tensors are prefetched while one is used.

    Attributes
    ----------
    out_bytes, back_bytes : int
        Bytes moved so far.
    """

    def __init__(self, device: torch.device, kept: Collection[Tensor], *, least: int, ahead: int) -> None:
        # With an index, as tensors name it: no tensor has the device "cuda".
        self._device = torch.empty(0, device=device).device
        self._kept = kept
        self._least = least
        self._ahead = ahead
        self._backend: Any = torch.get_device_module(device)
        on_cuda = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if on_cuda else torch.cpu.Stream()  # type: ignore[no-untyped-call]
        self._back: Any = torch.cuda.Stream(device) if on_cuda else torch.cpu.Stream()  # type: ignore[no-untyped-call]
        self._order: list[weakref.ref[Swapped]] = []
        self.pool = Pool(pinned=on_cuda)
        self.out_bytes = 0
        self.back_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Return a context for one forward pass."""
        self._order = []
        # Read each time: a parameter may have been given other memory.
        kept = {each.untyped_storage().data_ptr() for each in self._kept}

        def pack(tensor: Tensor) -> Tensor | Swapped:
            if tensor.nbytes < self._least or tensor.device != self._device:
                return tensor
            return tensor if tensor.untyped_storage().data_ptr() in kept else self._move_out(tensor)

        return saved_tensors_hooks(pack, self._unpack)

    def _move_out(self, tensor: Tensor) -> Swapped:
        swapped = Swapped(tensor, self.pool, self._order)
        self._out.wait_stream(self._backend.current_stream(self._device))
        with self._backend.stream(self._out):
            if swapped.block.free_after is not None:
                self._out.wait_event(swapped.block.free_after)
            swapped.on_host().copy_(tensor, non_blocking=True)
        if tensor.is_cuda:
            tensor.record_stream(self._out)
        swapped.block.free_after = self._event(self._out)
        self.out_bytes += tensor.nbytes
        return swapped

    def _unpack(self, packed: Tensor | Swapped) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        tensor, arrived = packed.fetched or self._fetch(packed)
        packed.fetched, packed.returned = None, True
        # The backward pass goes through the saved tensors in reverse order.
        for reference in packed.order[max(0, packed.index - self._ahead) : packed.index]:
            earlier = reference()
            if earlier is not None and earlier.fetched is None and not earlier.returned:
                earlier.fetched = self._fetch(earlier)
        current = self._backend.current_stream(self._device)
        current.wait_event(arrived)
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    def _fetch(self, swapped: Swapped) -> tuple[Tensor, Any]:
        """Begin to copy a tensor back; return it, and the event after which it is complete."""
        with self._backend.stream(self._back):
            self._back.wait_event(swapped.block.free_after)
            tensor = swapped.on_device()
            tensor.copy_(swapped.on_host(), non_blocking=True)
        arrived = swapped.block.free_after = self._event(self._back)
        self.back_bytes += tensor.nbytes
        return tensor, arrived

    def _event(self, stream: Any) -> Any:
        event = self._backend.Event()
        event.record(stream)
        return event
