"""Page-locking of host memory, so that a GPU copies to it by itself, at the speed of its bus.

Copies to memory that is not page-locked go through a small buffer of the driver's: several times slower.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from typing import Any, Protocol

import numpy as np

from tensorkeep.units import format_bytes


class PageLock(Protocol):
    """Page-locks buffers, and lets go of them."""

    def lock(self, memory: mmap.mmap) -> None:
        """Page-lock a buffer; where the system refuses, warn, and leave it as it is."""

    def unlock(self, memory: mmap.mmap) -> None:
        """Let go of a buffer, before anybody else gets it; nothing happens where it is not page-locked."""


class CudaPageLock:
    """Page-locks by ``cudaHostRegister``, which takes memory of any origin and size.

    torch's own pinned memory is rounded up to powers of two, which no budget could be held with.
    """

    _PORTABLE = 1  # for all devices of the process, not the current one alone

    def __init__(self) -> None:
        self._locked: set[int] = set()
        self._guard = threading.Lock()
        self._process = os.getpid()

    def lock(self, memory: mmap.mmap) -> None:
        address = _address(memory)
        error = int(_runtime().cudaHostRegister(address, len(memory), self._PORTABLE))
        if error:
            _forget_last_error()
            warnings.warn(
                f"CUDA does not page-lock {format_bytes(len(memory))} of memory (cudaHostRegister returns {error}): "
                "copies from the GPU are slower",
                stacklevel=2,
            )
            return
        with self._guard:
            self._locked.add(address)

    def unlock(self, memory: mmap.mmap) -> None:
        # What a forked child inherits is locked for its parent, and CUDA cannot be used in it.
        if os.getpid() != self._process:
            return
        address = _address(memory)
        with self._guard:
            locked = address in self._locked
            self._locked.discard(address)
        if locked:
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    import torch

    runtime: Any = torch.cuda  # which is not typed
    return runtime.cudart()


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _forget_last_error() -> None:
    """Let the error not come out of the next kernel, which has nothing to do with it."""
    import torch

    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.zeros(1, device="cuda")
