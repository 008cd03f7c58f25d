"""Fixtures that leave out of a bench or a training run what is not tested and takes long."""

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from tensorkeep import machine
from tensorkeep_bench.checkpoint.files import remove
from tensorkeep_bench.report import html as report_files
from tensorkeep_bench.results import Limits
from tensorkeep_bench.run import runner
from tensorkeep_bench.run.cell import run_task
from tensorkeep_bench.workload import Outcome, Task


@pytest.fixture(scope="module")
def quick_training() -> Iterator[None]:
    """Let runs measure no speed of this machine and record nothing of the repository, which take longer than they."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("chatgot.run.folder._git", lambda: None)
        patches.setattr(machine, "versions", cache(machine.versions))
        patches.setattr("chatgot.run.setup.measured_peak", lambda device: 1e9)
        yield


@pytest.fixture
def cells_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells of the bench in this process, where processes are not what is tested."""

    def run_cell(task: Task, limits: Limits) -> Outcome:
        try:
            return msgspec.structs.replace(run_task(task, time.perf_counter()), seconds=1.0)
        finally:
            remove(Path(task.directory))

    monkeypatch.setattr(runner, "run_cell", run_cell)


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports without plots, which take seconds, where the report is not what is tested."""
    monkeypatch.setattr(report_files, "draw_plots", lambda results, **_: [])
