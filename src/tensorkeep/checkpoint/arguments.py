"""Checks of arguments that several calls have."""

from pathlib import Path

from tensorkeep.errors import UsageError
from tensorkeep.state.leaf import Device
from tensorkeep.storage import storage_of
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.storage.parallel import default_threads
from tensorkeep.units import parse_bytes

STORE_THREADS = 8
"""They wait for the network, however few the processors are; a small memory budget allows fewer."""

MemorySize = int | str
"""Bytes, as a number or as a text such as ``"256MiB"``."""


def budget_pool(memory_budget: MemorySize) -> BufferPool:
    """Return a pool with this budget; UsageError if it is not a size, or below 64 MiB."""
    return BufferPool(parse_bytes(memory_budget))


def thread_count(threads: int | None, source: Path | None = None) -> int:
    """Return how many threads to use; UsageError below 1.

    The default is `default_threads`, or `STORE_THREADS` if they read a ``source`` in an object store.
    """
    if threads is None:
        return STORE_THREADS if source is not None and storage_of(source).remote else default_threads()
    if threads < 1:
        raise UsageError(f"threads is {threads}", remedy="give 1 or more")
    return threads


def check_device(device: Device) -> None:
    """Raise UsageError if tensors cannot be allocated on a device, before anything is read."""
    if device is None:
        return
    import torch

    try:
        torch.empty(1, device=device)
    # A build of torch without CUDA raises an AssertionError.
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        message = str(error).splitlines()[0]
        raise UsageError(
            f"tensors cannot be allocated on device {str(device)!r}: {message}",
            remedy='give "cpu", or a device that torch finds here',
        ) from None
