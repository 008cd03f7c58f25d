"""CUDA streams of copies in other threads, and page-locked host memory."""

import logging
import mmap
import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorkeep.state.leaf import Leaf, Source
from tensorkeep.units import format_bytes

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


def wait_for_caller(leaves: Iterable[Leaf]) -> None:
    """Wait for the caller's kernels on the leaves' devices; call it in the caller's thread."""
    # Every thread has its own current stream. Inside ``with torch.cuda.stream(s)`` the caller's kernels run on ``s``,
    # while the threads that gather and scatter copy on the default stream, which does not wait for ``s``.
    for device in _cuda_devices(leaves):
        import torch

        torch.cuda.current_stream(device).synchronize()


def wait_for_copies(leaves: Iterable[Leaf]) -> None:
    for device in _cuda_devices(leaves):
        import torch

        # The threads that scatter copy on the default streams; each thread would otherwise have to wait itself.
        torch.cuda.default_stream(device).synchronize()


def on_cuda(leaves: Iterable[Leaf]) -> bool:
    return bool(_cuda_devices(leaves))


def side_stream(source: Source) -> AbstractContextManager[Any]:
    """Let this thread copy a leaf on a stream of its own; call `wait_for_caller` before."""
    if not isinstance(source, Leaf) or not source.is_torch or not source.array.is_cuda:
        return nullcontext()
    import torch

    device = source.array.device
    if device not in _side_streams.by_device:
        _side_streams.by_device[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The copy does not wait for kernels queued later on the default stream, nor delay them.
    return torch.cuda.stream(_side_streams.by_device[device])


class _SideStreams(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[torch.device, torch.cuda.Stream] = {}


_side_streams = _SideStreams()


def _cuda_devices(leaves: Iterable[Leaf]) -> "set[torch.device]":
    return {leaf.array.device for leaf in leaves if leaf.is_torch and leaf.array.is_cuda}


class CudaPageLock:
    """Page-locks host memory by ``cudaHostRegister``, so that a GPU copies to it at the speed of its bus."""

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
