"""Order between the caller's CUDA streams and the threads that copy.

The current stream is a setting of each thread. Inside ``with torch.cuda.stream(s)`` the caller's kernels run on ``s``,
while the threads that gather and scatter leaves copy on the default stream, which does not wait for ``s``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from holdfast.state.leaf import Leaf

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


def _cuda_devices(leaves: Iterable[Leaf]) -> set[torch.device]:
    return {leaf.array.device for leaf in leaves if leaf.is_torch and leaf.array.is_cuda}
