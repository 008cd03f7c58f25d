"""Addresses of checkpoints: a path, a run's folder, ``RUN@latest``, ``RUN@best``, ``RUN@best:METRIC`` or ``RUN@1200``.

A run's folder is the root of a `CheckpointManager`, or a folder that contains it as ``checkpoints/``.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tensorkeep.errors import (
    NotACheckpointError,
    NotFoundError,
    PathLike,
    TensorkeepError,
    UnsupportedError,
    UsageError,
    skipped,
    warn_caller,
)
from tensorkeep.formats.finding import is_checkpoint
from tensorkeep.formats.native import FORMAT as NATIVE
from tensorkeep.paths import StorePath, as_path, checked_path
from tensorkeep.runs.backends import LocalBackend, SingleTierBackend
from tensorkeep.runs.object_store import StoreBackend
from tensorkeep.runs.steps import Step, best_step, metric_names, step_numbers, usual_metric
from tensorkeep.storage import exists, names_in, storage_of

CHECKPOINTS = "checkpoints"

# Metric names may contain slashes: ``eval/loss``.
_ADDRESS = re.compile(r"(.+)@([^@/]*|best:[^@]*)", re.DOTALL)
_FORMS = "write RUN@latest, RUN@best, RUN@best:METRIC, or RUN@1200 with the number of a step"


def backend_of(root: PathLike) -> SingleTierBackend:
    path = as_path(root)
    return StoreBackend(path) if isinstance(path, StorePath) else LocalBackend(path)


class Address(NamedTuple):
    path: PathLike
    # The number of the step, if the checkpoint was found in a run.
    step: int | None = None
    # Why this step was chosen, if the address does not give a number: "the latest".
    reason: str | None = None
    # Later steps that are damaged or incomplete, with the reason.
    skipped: Mapping[int, TensorkeepError] = MappingProxyType({})


def checkpoint_path(path: PathLike) -> PathLike:
    """Return the path of the checkpoint that an address means, and warn of skipped steps; see `find_checkpoint`."""
    address = find_checkpoint(path)
    for number, error in address.skipped.items():
        warn_caller(skipped(f"step {number}", error))
    return address.path


def find_checkpoint(path: PathLike) -> Address:
    """Find the checkpoint that an address means. A path that is not a run is returned as it is."""
    # All errors are of the step or the run that was meant; if all steps are damaged, the error of the last one.
    given, wanted = split_address(path)
    if wanted is None:
        root = find_run(given)
        return Address(given) if root is None else _latest(root)
    # Python converts no number of thousands of digits.
    if wanted.isdecimal() and len(wanted) < 100:
        return _numbered(as_path(given), int(wanted))
    root = run_root(given)
    if wanted == "latest":
        return _latest(root)
    best, colon, metric = wanted.partition(":")
    if best != "best" or (colon and not metric):
        raise UsageError(f"{wanted!r} is not a step", path=path, remedy=_FORMS)
    return _best(root, metric or None)


def split_address(path: PathLike) -> tuple[PathLike, str | None]:
    path = checked_path(path, stores=True)
    # `Path("")` is the current folder, which may be a run.
    if not os.fspath(path):
        raise UsageError("the path is empty", remedy="give the path of a checkpoint or a run")
    # A path that exists is taken literally, even with an `@`.
    match = _ADDRESS.fullmatch(os.fspath(path))
    return (path, None) if match is None or exists(as_path(path)) else (match[1], match[2])


def steps_of_run(path: PathLike) -> list[Path]:
    """Return the paths of all steps of a run, damaged ones included; an empty list if the path is not a run."""
    given, wanted = split_address(path)
    root = find_run(given) if wanted is None else None
    if root is None:
        return []
    backend = backend_of(root)
    return [backend.path_of(number) for number in backend.numbers()]


def find_run(path: PathLike) -> Path | None:
    """Return the folder that contains the steps of a run; None if the path is a checkpoint, or not a run."""
    folder = as_path(path)
    # Most paths are native checkpoints, and recognising one is faster than listing a folder.
    root = None if NATIVE.recognises(folder) else _root_of(folder)
    return None if root is not None and is_checkpoint(folder) else root


def run_root(path: PathLike) -> Path:
    """Return the folder that contains the steps of a run. UsageError if the path is the address of one step."""
    given, wanted = split_address(path)
    if wanted is not None:
        raise UsageError("is one step, not a run", path=path, remedy=f"leave out @{wanted}")
    folder = as_path(given)
    root = _root_of(folder)
    if root is not None:
        return root
    if not storage_of(folder).lists(folder):
        text = "a web server lists no names, so the steps of a run are not found"
        raise UnsupportedError(text, path=given, remedy="give the number of a step: RUN@1200")
    if not exists(folder):
        raise NotFoundError("does not exist", path=given, remedy="check the path")
    raise NotACheckpointError("contains no steps", path=given, remedy="give the folder that contains step-000100")


def _root_of(folder: Path) -> Path | None:
    return next((each for each in (folder, folder / CHECKPOINTS) if _has_steps(each)), None)


def _has_steps(folder: Path) -> bool:
    try:
        return bool(step_numbers(names_in(folder)))
    except UnsupportedError:
        # One object has a name that cannot be listed. The backend lists the steps without it, if that is possible.
        return bool(backend_of(folder).numbers())


def _numbered(folder: Path, number: int) -> Address:
    # Without a listing, because web servers have none.
    for backend in map(backend_of, (folder, folder / CHECKPOINTS)):
        path = backend.path_of(number)
        if backend.exists(path):
            return Address(path, number)
    if not storage_of(folder).lists(folder):
        text = f"has no step {number}"
        raise NotFoundError(text, path=folder, remedy="check the URL and the number: a web server lists no steps")
    return Address(backend_of(run_root(folder)).find(number), number)


def _latest(root: Path) -> Address:
    skipped: dict[int, TensorkeepError] = {}
    for number, found in backend_of(root).newest_first():
        if isinstance(found, Step):
            return Address(found.path, number, "the latest", skipped)
        skipped[number] = found
    raise next(iter(skipped.values()), NotACheckpointError("contains no steps", path=root))


def _best(root: Path, metric: str | None) -> Address:
    steps = backend_of(root).listing().steps
    metric = metric or usual_metric(metric_names(steps))
    step = best_step(steps, metric)
    if step is None:
        raise NotFoundError("has no step with a metric", path=root, remedy="give the number of a step, or @latest")
    return Address(step.path, step.number, f"the best: {metric} {step.metrics[metric or '']:.6g}")
