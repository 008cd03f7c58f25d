"""Page-locked host memory, which a GPU copies to at the speed of its bus."""

import logging
import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np

from tensorkeep.units import format_bytes

logger = logging.getLogger(__name__)


class CudaPageLock:
    """Page-locks host memory by ``cudaHostRegister``."""

    _PORTABLE = 1  # for all devices of the process, not only the current one

    def __init__(self) -> None:
        self._locked: set[int] = set()
        self._process = os.getpid()

    def lock(self, memory: mmap.mmap) -> None:
        """If CUDA refuses, log a warning and leave the buffer as it is."""
        # Not torch's pinned memory: it is rounded up to powers of two, which would break a memory budget.
        address = _address(memory)
        error = int(_runtime().cudaHostRegister(address, len(memory), self._PORTABLE))
        if error:
            _clear_last_error()
            logger.warning(
                "CUDA refuses to page-lock %s of host memory (cudaHostRegister returns %d): copies from the GPU are "
                "slower",
                format_bytes(len(memory)),
                error,
            )
            return
        self._locked.add(address)

    def unlock(self, memory: mmap.mmap) -> None:
        # Memory that a forked child inherits is locked for its parent, and CUDA cannot be used in the child.
        if os.getpid() != self._process:
            return
        address = _address(memory)
        with suppress(KeyError):
            self._locked.remove(address)
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    import torch

    runtime: Any = torch.cuda  # which is not typed
    return runtime.cudart()


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _clear_last_error() -> None:
    import torch

    # CUDA reports the error once, by the next kernel, which has nothing to do with it.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        torch.zeros(1, device="cuda")
