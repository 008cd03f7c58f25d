"""One visit to one arm: save, load cold, load warm, load into memory that exists; every load gated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from holdfast.bench.checkpoint_workload import Workload, check_same, touch
from holdfast.bench.peers import Arm
from holdfast.bench.probes import (
    durable_seconds,
    evict,
    make_cold,
    release_memory,
    seconds_of,
    size_on_disk,
    warm,
)
from holdfast.bench.rounds import NotRun
from holdfast.errors import HoldfastError

SAVE = "save"
COLD = "load, cold"
WARM = "load, warm"
INTO_COLD = "load into, cold"
INTO_WARM = "load into, warm"
STORED = "on disk"

SECONDS = (SAVE, COLD, WARM, INTO_COLD, INTO_WARM)
"""The measures in seconds; ``STORED`` is in bytes."""


def visitor(arm: Arm, workload: Workload, directory: Path) -> Callable[[], Mapping[str, float]]:
    """Return what measures an arm once, in a fresh file each time, and removes it.

    A cold load is missing from its figures where the file system keeps its files in memory, a load into existing
    memory where the state has values that cannot be filled.
    """
    return partial(_visit, arm, workload, directory)


def _visit(arm: Arm, workload: Workload, directory: Path) -> dict[str, float]:
    path = directory / f"state{arm.suffix}"
    try:
        return _measure(arm, workload, path)
    except (HoldfastError, OSError, MemoryError):
        raise
    except Exception as error:
        # A peer that cannot hold this state says so in its own way.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotRun(f"{arm.name} cannot hold this state: {reason}") from error
    finally:
        remove(path)


def _measure(arm: Arm, workload: Workload, path: Path) -> dict[str, float]:
    source, target = arm.view(workload.state), arm.view(workload.target)

    def load_new() -> float:
        loaded = []

        def call() -> None:
            loaded.append(arm.load(path))
            touch(loaded[0])

        with workload.reserve.lent():
            seconds = seconds_of(call)
            check_same(loaded.pop(), source, arm.name)
        return seconds

    def load_into() -> float:
        workload.wipe()
        with workload.reserve.lent():
            seconds = seconds_of(lambda: arm.load_into(path, target))
        check_same(target, source, arm.name)
        return seconds

    release_memory()
    with workload.reserve.lent():
        figures = {SAVE: durable_seconds(lambda: arm.save(source, path), path), STORED: float(size_on_disk(path))}
    loads = {COLD: load_new, WARM: load_new}
    if workload.fillable:
        loads |= {INTO_COLD: load_into, INTO_WARM: load_into}
    # From the device once, off the clock: a disk below, or its host, may cache what it reads for the first time.
    evict(path)
    warm(path)
    for measure, load in loads.items():
        release_memory()
        if _prepare(path, cold=measure in (COLD, INTO_COLD)):
            figures[measure] = load()
    return figures


def _prepare(path: Path, *, cold: bool) -> bool:
    """Return whether the checkpoint is as cold or as warm as it has to be."""
    if cold:
        return make_cold(path)
    warm(path)
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
