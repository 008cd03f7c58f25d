"""Order between the caller's CUDA streams and the threads that copy.

The current stream is a setting of each thread. Inside ``with torch.cuda.stream(s)`` the caller's kernels run on ``s``,
while the threads that gather and scatter leaves copy on the default stream, which does not wait for ``s``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from tensorkeep.state.leaf import Leaf
from tensorkeep.state.source import Source

if TYPE_CHECKING:
    import torch


def wait_for_caller(leaves: Iterable[Leaf]) -> None:
    """Wait until all that the calling thread has queued for the leaves' CUDA devices is done.

    To be called in the caller's thread, before other threads read or overwrite the leaves.
    """
    for device in _cuda_devices(leaves):
        import torch

        torch.cuda.current_stream(device).synchronize()


def wait_for_copies(leaves: Iterable[Leaf]) -> None:
    """Wait until what other threads copied into the leaves has arrived; they copied on the default streams."""
    for device in _cuda_devices(leaves):
        import torch

        torch.cuda.default_stream(device).synchronize()


def on_cuda(leaves: Iterable[Leaf]) -> bool:
    """Say whether any of the leaves lies on a CUDA device."""
    return bool(_cuda_devices(leaves))


def beside_the_caller(source: Source) -> AbstractContextManager[Any]:
    """Return a context in which a leaf is copied on a CUDA stream of the calling thread's own.

    Such a copy neither waits for kernels that are queued on the default stream meanwhile nor holds them up. What the
    leaf's values come from must be done before: see `wait_for_caller`. Nothing for a leaf that is not on a CUDA device.
    """
    if not isinstance(source, Leaf) or not source.is_torch or not source.array.is_cuda:
        return nullcontext()
    import torch

    device = source.array.device
    if device not in _own.streams:
        _own.streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(_own.streams[device])


class _Own(threading.local):
    """The streams of one thread, by device."""

    def __init__(self) -> None:
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


_own = _Own()


def _cuda_devices(leaves: Iterable[Leaf]) -> set[torch.device]:
    return {leaf.array.device for leaf in leaves if leaf.is_torch and leaf.array.is_cuda}
