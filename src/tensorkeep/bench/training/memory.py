"""The peak memory of one training step, counted in bytes of tensors.

On CUDA the caching allocator counts. On a CPU the resident memory of a process depends on malloc, loaded libraries and
earlier steps, so torch's profiler records each allocation and release of one step instead. The count is exact, the same
in every run, and comparable with the memory ledger, which predicts it from shapes.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def step_peak(step: Callable[[], object]) -> int:
    """Return the peak bytes of CPU tensors in a step: of those that exist before it, and of those that it allocates.

    A tensor that exists before the step and is freed within it counts until the end.
    """
    before = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    tree = recorded.profiler.kineto_results.experimental_event_tree()
    allocations = sorted(_allocations(tree), key=lambda event: event.start_time_ns)
    used = peak = 0
    for event in allocations:
        used += event.extra_fields.alloc_size  # negative where memory is released
        peak = max(peak, used)
    return before + peak


def live_bytes() -> int:
    """Return the bytes of the CPU tensors that Python objects hold; tensors that share storage count once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        # Not isinstance: it would call the properties of lazy modules and proxies.
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu" and found.layout == torch.strided:
            # Subclasses that wrap other tensors, such as quantised ones, have no memory of their own.
            try:
                storage = found.untyped_storage()
                address = storage.data_ptr()
            except RuntimeError:
                continue
            if address:
                storages[address] = storage.nbytes()
    return sum(storages.values())


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    """Yield the events of allocations and releases in a profiler's tree."""
    for event in events:
        if event.typed[0].name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event
        yield from _allocations(event.children)
