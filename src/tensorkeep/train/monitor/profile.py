"""A profile of some steps by `torch.profiler`, written as a Chrome trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from tensorkeep.storage.direct_io import store_errors
from tensorkeep.train.run.state import Run

FOLDER = "profile"

_SKIPPED = 2
"""Steps of a process that are not profiled: they compile, allocate, and prove that techniques are active."""
_WARM_UP = 1
"""Steps in which the profiler runs and its results are discarded: it is slow at first."""


@contextmanager
def profiled(run: Run, steps: int, written: Callable[[Path, int], None]) -> Iterator[Callable[[], None]]:
    """Profile some steps of a run, from its fourth in this process on; with 0 steps nothing is profiled.

    Yields a function to call after each step. Each rank writes a file below ``profile/`` in the folder of the run, with
    all that happens in its steps, and calls ``written`` with its path and the number of steps, which are fewer if the
    run ends before.

    Raises StoreError if the file cannot be written.
    """
    if not steps:
        yield lambda: None
        return
    first = run.progress.step + 1 + _SKIPPED + _WARM_UP

    def write(profiler: profile) -> None:
        last = min(first + steps - 1, run.progress.step)
        if last < first:
            return  # the run has ended in the warm-up
        path = run.folder.path / FOLDER / f"steps-{first}-{last}-rank-{run.world.rank}.json.gz"
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
