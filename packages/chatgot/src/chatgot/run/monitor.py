"""What a run observes of its steps: their time, gradient norms by layer, and a profile. None changes a loss."""

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, schedule

from chatgot.run.state import OpenRun
from chatgot.step.state import check_steps
from tensorkeep.ext import machine
from tensorkeep.ext.storage import store_errors

logger = logging.getLogger(__name__)

_PROFILES = "profile"
# Steps of a process that are not profiled: they compile, allocate, and prove that techniques are active.
_SKIPPED = 2
# Steps with a discarded profile: the profiler is slow at first.
_WARM_UP = 1


@contextmanager
def timed_step(run: OpenRun) -> Iterator[None]:
    """Time a step. The first step of a process loads kernels and compiles, and does not count as training."""
    first = "first step" not in run.clock.seconds
    tokens = run.progress.tokens
    with run.clock.spent_on("first step" if first else "train"):
        yield
        # The wait for the GPU belongs to the first step.
        if first:
            check_steps(run)
    if not first:
        # Positions without a target that counts are computed as well. Techniques may draw windows of a shorter context,
        # which take fewer operations.
        flops = run.positions * run.config.model.flops_per_token(run.batches.context_length)
        _count(run, run.progress.tokens - tokens, flops, steps=1)


def settle(run: OpenRun) -> None:
    """Check the steps since the last call. The wait for the GPU counts as their time."""
    if run.unchecked:
        with run.clock.spent_on("train"):
            check_steps(run)
        _count(run, 0, 0, steps=0)


def _count(run: OpenRun, tokens: int, flops: int, *, steps: int) -> None:
    """Count training for the speed of the run, and warn if it has become slow: mostly, another process is the cause."""
    seconds = run.clock.last
    run.speed.add(tokens, flops, seconds)
    ratio = run.slowdown.add(flops, seconds, steps=steps)
    if ratio is not None and run.world.is_main:
        load, cpus = os.getloadavg()[0], len(machine.usable_processors())
        run.log.write(run.progress.step, "slowdown", ratio=ratio, load=load, cpus=cpus)
        logger.warning(
            "training is %.0f times slower than before, at step %d: the load of this machine is %.1f on %d CPUs; stop "
            "what else computes here, or keep it off the CPUs of this run (taskset)",
            *(ratio, run.progress.step, load, cpus),
        )


def observe_gradient_norms(run: OpenRun) -> None:
    """Make a run record, in logged steps, the norms of the gradient by layer before clipping."""
    # Techniques have wrapped it already, and what they do stays.
    clip = run.operations.clip

    def observed_clip() -> Tensor:
        # Afterwards, because `clip` makes the gradients final: it unscales them and adds the norms of all shards.
        # `_scaled` undoes the clipping.
        norm = clip()
        step = run.progress.step
        is_logged = step % run.config.log.every == 0 or step == run.config.loop.steps
        run.gradient_norms = _scaled(_layer_norms(run), norm) if is_logged else {}
        return norm

    run.operations.clip = observed_clip


def _layer_norms(run: OpenRun) -> dict[str, float]:
    """Return the norms of the gradients as they are now, by layer; a collective."""
    squares: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in run.model.named_parameters():
        if parameter.grad is not None:
            # A layer is a block, such as "blocks.11", or a module outside of the blocks.
            layer = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
            square: Any = parameter.grad.float().square().sum()
            # Each rank has summed its own shard: this adds the sums.
            squares[layer].append(square.full_tensor() if isinstance(square, DTensor) else square)
    norms = {layer: torch.stack(found).sum().sqrt() for layer, found in squares.items()}
    # Read at once: the host waits for the device one time.
    values = torch.stack(list(norms.values())).tolist() if norms else []
    own = dict(zip(norms, values, strict=True))
    # A pipeline stage has the gradients of its own layers only.
    # In reverse, so that the lowest rank decides if several have a layer.
    return {layer: value for each in reversed(run.world.all_gather(own)) for layer, value in each.items()}


def _scaled(norms: dict[str, float], total: Tensor) -> dict[str, float]:
    # The gradients are clipped already: the factor restores the norm before clipping.
    clipped = sum(each**2 for each in norms.values()) ** 0.5
    factor = total.item() / clipped if clipped else 1.0
    blocks = {name for name in norms if name.startswith("blocks.")}
    # Blocks come by number, after the others.
    order = [*sorted(norms.keys() - blocks), *sorted(blocks, key=lambda name: int(name.removeprefix("blocks.")))]
    return {layer: norms[layer] * factor for layer in order}


@contextmanager
def profiled(run: OpenRun, steps: int, written: Callable[[Path, int], None]) -> Iterator[Callable[[], None]]:
    """Profile some steps, from the fourth in this process on; yields a function to call after each step. 0 for none.

    Each rank writes a Chrome trace below ``profile/``, and calls ``written`` with its path and the number of steps.
    """
    if not steps:
        yield lambda: None
        return
    first = run.progress.step + 1 + _SKIPPED + _WARM_UP

    def write(profiler: profile) -> None:
        # A run may end before the last step to profile.
        last = min(first + steps - 1, run.progress.step)
        if last < first:
            return  # the run has ended in the warm-up
        path = run.folder.path / _PROFILES / f"steps-{first}-{last}-rank-{run.world.rank}.json.gz"
        with store_errors(path, "write the profile"):
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        written(path, last - first + 1)

    on_cuda = [ProfilerActivity.CUDA] if run.device.type == "cuda" else []
    with profile(
        activities=[ProfilerActivity.CPU, *on_cuda],
        schedule=schedule(skip_first=_SKIPPED, wait=0, warmup=_WARM_UP, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    ) as profiler:
        yield profiler.step
