"""The batch size that fills the memory of a GPU: steps with small batches are measured, and the choice is tried."""

# A step has the same sequences in the same order, so only rounding and the zeros of dropout depend on the choice.

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from chatgot.config.config import Config
from chatgot.run.state import OpenRun
from chatgot.step.state import StepState
from chatgot.step.world import World
from chatgot.techniques.stack import Stack
from chatgot.techniques.wrapped_batches import with_loop
from tensorkeep.errors import OutOfMemoryError, UsageError, is_out_of_memory
from tensorkeep.ext import format_bytes

# The fraction of the free memory that a step may take: allocations leave gaps between them.
_FRACTION = 0.9

# The fraction with several ranks. If one rank ran out of memory, the others would wait for it, so the choice is not
# tried.
_FRACTION_UNTRIED = 0.8


class Peaks(NamedTuple):
    """The most bytes in use while the gradient of a step is computed, and while the weights are updated."""

    gradient: int
    update: int


# Returns the peaks of a step with batches of so many sequences on this rank; None if it ran out of memory.
Measure = Callable[[int], Peaks | None]

# Builds a run of a configuration, which is not kept. It writes nothing.
Trial = Callable[[Config], AbstractContextManager[OpenRun]]


class GpuMemory:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        # What torch has reserved and does not use is free for this process.
        return free + torch.cuda.memory_reserved(self._device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def release(self) -> None:
        # Cycles keep tensors of an earlier trial alive.
        gc.collect()
        # cuBLAS keeps a workspace for each stream of earlier trials.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        self.reset_peak()


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """Return the memory of a device; None for a CPU, because its memory is not only training's."""
    return GpuMemory(device) if device.type == "cuda" else None


def filled(config: Config, memory: GpuMemory, world: World, trial: Trial) -> tuple[Config, str]:
    """Return a configuration with batches that fill the memory, and a note on the choice; a collective."""
    for each in Stack.of(config.techniques).techniques:
        if each.cannot_accumulate is not None:
            raise UsageError(
                f"loop.auto_batch_size is true, and {each.name} {each.cannot_accumulate} cannot accumulate batches, of "
                "which small ones are tried",
                remedy="give loop.batch_size, loop.auto_batch_size false, or another mode",
            )
    sequences = config.loop.batch_size * config.loop.gradient_accumulation_steps
    # With a batch of all sequences: the given batch size will be replaced, and need not be divisible by the ranks.
    replicas = _replicas(trial(with_batch_size(config, sequences)))
    memory.release()
    # All ranks have equal batches: the rank with the least memory decides.
    available = min(world.all_gather(memory.available()))

    def measure(rows: int) -> Peaks | None:
        sized = with_batch_size(config, rows * replicas)
        # The second batch, beside the gradient of the first, takes as much memory as any later one.
        shortened = with_loop(sized, gradient_accumulation_steps=min(2, sized.loop.gradient_accumulation_steps))
        found = _measured(trial(shortened), memory)
        memory.release()
        # A rank that ran out of memory takes part, too: the others would wait for it.
        of_ranks = [each for each in world.all_gather(None if found is None else [*found]) if each is not None]
        return Peaks(*map(max, *of_ranks, [0, 0])) if len(of_ranks) == world.size else None

    rows = largest_batch(sequences // replicas, available, measure, tried=world.size == 1)
    if rows is None:
        raise OutOfMemoryError(
            f"a step with a batch of one sequence for each process does not fit into {format_bytes(available)}",
            remedy="use a smaller model or context, or see tensorkeep tune training",
        )
    config = with_batch_size(config, rows * replicas)
    note = (
        f"batches that fill the memory: loop.batch_size is {config.loop.batch_size}, and "
        f"loop.gradient_accumulation_steps {config.loop.gradient_accumulation_steps}, for {sequences} sequences a step"
    )
    return config, note


def largest_batch(sequences: int, memory: int, measure: Measure, *, tried: bool = True) -> int | None:
    """Return the largest batch, a divisor of ``sequences``, that fits into the memory; None if none does."""
    # The two smallest are measured. The peaks of all others follow from them, because activations grow with the batch
    # and nothing else does. With ``tried``, the result is measured as well.
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    limit = (_FRACTION if tried else _FRACTION_UNTRIED) * memory
    measured: dict[int, Peaks | None] = {}
    for size in sizes[:2]:
        measured[size] = measure(size)
        if not _fits(measured[size], limit):
            # The size before was measured, and fits.
            return sizes[sizes.index(size) - 1] if size > 1 else None
    if len(sizes) == 1:
        return 1
    first, second = (found for found in measured.values() if found is not None)
    # Activations grow in proportion to the rows. The update does not, and is often larger for small batches.
    # At least one byte: noise must not make rows look free.
    by_row = max(1.0, (second.gradient - first.gradient) / (sizes[1] - 1))
    predicted = [size for size in sizes[2:] if first.gradient + by_row * (size - 1) <= limit]
    if not tried:
        return max(predicted, default=sizes[1])
    return next((size for size in reversed(predicted) if _fits(measure(size), limit)), sizes[1])


def _fits(peaks: Peaks | None, limit: float) -> bool:
    return peaks is not None and max(peaks) <= limit


def with_batch_size(config: Config, batch_size: int) -> Config:
    """Return a configuration with another batch size and the same sequences in a step; UsageError if not a divisor."""
    sequences = config.loop.batch_size * config.loop.gradient_accumulation_steps
    if sequences % batch_size:
        raise UsageError(f"{sequences} sequences do not divide into batches of {batch_size}", remedy="give a divisor")
    return with_loop(config, batch_size=batch_size, gradient_accumulation_steps=sequences // batch_size)


# These functions alone refer to a run, so that its memory is free when they return.


def _replicas(trial: AbstractContextManager[OpenRun]) -> int:
    with trial as run:
        return run.replicas


def _measured(trial: AbstractContextManager[OpenRun], memory: GpuMemory) -> Peaks | None:
    """Return the peaks of a step; None if the memory is not enough."""
    try:
        with trial as run:
            # The last steps, as windows may be shorter at first.
            run.progress.step = max(0, run.config.loop.steps - 2)
            memory.reset_peak()
            run.techniques.warm_up(run)
            _add_gradients(run)
            first, before = memory.peak(), memory.allocated()
            memory.reset_peak()
            _update(run)
            update, states = memory.peak(), max(0, memory.allocated() - before)
            # The first gradient is computed without the states of the optimizers, the second without the warm-up.
            memory.reset_peak()
            _add_gradients(run)
            return Peaks(max(first + states, memory.peak()), update)
    except (MemoryError, RuntimeError) as error:
        # Another error would end the run itself, too.
        if not is_out_of_memory(error):
            raise
        return None


def _add_gradients(run: StepState) -> None:
    run.progress.step += 1
    batches = run.config.loop.gradient_accumulation_steps
    for number in range(1, batches + 1):
        run.is_last_batch = number == batches
        run.operations.backward(run.operations.loss(*run.move(*next(run.batches))))


def _update(run: StepState) -> None:
    run.operations.clip()
    run.operations.update()
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
