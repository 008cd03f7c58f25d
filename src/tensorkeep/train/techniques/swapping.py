"""Tensors that autograd saves, moved to the memory of the CPU and back, through memory that is used again.

Two streams do the copying beside the one that computes, ``out`` and ``back``. What keeps them apart from each other:

- A copy out begins after what was computed before, and the device's memory is not used again before it ended.
- A copy back begins after its copy out, and what is computed from it after the copy back.
- A block of the CPU's memory is written again only after it was read: without that, gradients are silently wrong.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tensorkeep.train.techniques.streams import stream_of


@dataclass(slots=True)
class Block:
    """Memory on the CPU.

    Attributes
    ----------
    memory : Tensor
        Bytes, 1-D.
    free_after : torch.cuda.Event, optional
        When all copies from or to it that were begun have ended.
    """

    memory: Tensor
    free_after: Any = None


class Pool:
    """Blocks of memory that are given back and taken again, each for tensors of its size in bytes.

    Parameters
    ----------
    pinned : bool

    Attributes
    ----------
    made, taken : int
        Blocks that were made, and how often one was taken.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: defaultdict[int, list[Block]] = defaultdict(list)
        self.made = 0
        self.taken = 0

    def take(self, nbytes: int) -> Block:
        """Return a block; what is written to it must wait for its ``free_after``."""
        self.taken += 1
        if free := self._free[nbytes]:
            return free.pop()
        self.made += 1
        return Block(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))

    def give(self, block: Block) -> None:
        """Give a block back."""
        self._free[len(block.memory)].append(block)


class Swapped:
    """A tensor that was moved out; its block is given back when nothing can ask for it any more."""

    def __init__(self, tensor: Tensor, pool: Pool, order: list[weakref.ref[Swapped]]) -> None:
        self.device, self.dtype, self.size = tensor.device, tensor.dtype, tensor.size()
        # Those of a copy: the tensor's, where its elements fill its memory.
        self.strides = torch.empty_like(tensor, device="meta").stride()
        self.block = pool.take(tensor.nbytes)
        self.fetched: tuple[Tensor, Any] | None = None
        self.returned = False
        self.place = len(order)
        self.order = order
        order.append(weakref.ref(self))
        weakref.finalize(self, pool.give, self.block)

    def on_host(self) -> Tensor:
        """Return its block as a tensor."""
        return self.block.memory.view(self.dtype).as_strided(self.size, self.strides)

    def on_device(self) -> Tensor:
        """Return a new tensor for it, without values."""
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=self.device)


class Swapper:
    """Moves what autograd saves within `hooks`, and back when the backward pass asks for it.

    Parameters
    ----------
    device : torch.device
        Tensors elsewhere are left alone.
    kept : collection of Tensor
        Tensors that stay, as do views of them: the parameters.
    least : int
        Tensors of fewer bytes stay.
    ahead : int
        How many tensors are on their way back while one is used.

    Attributes
    ----------
    pool : Pool
    out_bytes, back_bytes : int
        That were moved so far.
    """

    def __init__(self, device: torch.device, kept: Collection[Tensor], *, least: int, ahead: int) -> None:
        # With the number that its tensors name it by: "cuda" is no tensor's device.
        self._device = torch.empty(0, device=device).device
        self._kept = kept
        self._least = least
        self._ahead = ahead
        self._here: Any = torch.get_device_module(device)
        self._out, self._back = stream_of(device), stream_of(device)
        self._order: list[weakref.ref[Swapped]] = []
        self.pool = Pool(pinned=device.type == "cuda")
        self.out_bytes = 0
        self.back_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """Return a context for one forward pass."""
        self._order = []
        # Looked at each time: a parameter may have been given other memory.
        staying = {each.untyped_storage().data_ptr() for each in self._kept}

        def pack(tensor: Tensor) -> Tensor | Swapped:
            stays = tensor.nbytes < self._least or tensor.device != self._device
            return tensor if stays or tensor.untyped_storage().data_ptr() in staying else self._move_out(tensor)

        return saved_tensors_hooks(pack, self._unpack)

    def _move_out(self, tensor: Tensor) -> Swapped:
        swapped = Swapped(tensor, self.pool, self._order)
        self._out.wait_stream(self._here.current_stream(self._device))
        with self._here.stream(self._out):
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
        for reference in packed.order[max(0, packed.place - self._ahead) : packed.place]:
            earlier = reference()
            if earlier is not None and earlier.fetched is None and not earlier.returned:
                earlier.fetched = self._fetch(earlier)
        current = self._here.current_stream(self._device)
        current.wait_event(arrived)
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    def _fetch(self, swapped: Swapped) -> tuple[Tensor, Any]:
        """Begin to copy a tensor back; return it, and the event after which it is there."""
        with self._here.stream(self._back):
            self._back.wait_event(swapped.block.free_after)
            tensor = swapped.on_device()
            tensor.copy_(swapped.on_host(), non_blocking=True)
        arrived = swapped.block.free_after = self._event(self._back)
        self.back_bytes += tensor.nbytes
        return tensor, arrived

    def _event(self, stream: Any) -> Any:
        event = self._here.Event()
        event.record(stream)
        return event
