"""Addresses of checkpoints: a path, a run's folder, ``RUN@latest``, ``RUN@best``, ``RUN@best:METRIC`` or ``RUN@1200``.

The folder of a run is the root of a `CheckpointManager`, or a folder that has it as ``checkpoints/``. Where one
checkpoint is read, it stands for the last complete step. A path that exists is taken literally, ``@`` included.
"""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tensorkeep.errors import (
    NotACheckpointError,
    NotFoundError,
    PathLike,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
    stack_level_of_caller,
)
from tensorkeep.formats.finding import is_checkpoint
from tensorkeep.formats.native import FORMAT as NATIVE
from tensorkeep.paths import as_path, checked_path
from tensorkeep.runs.backends import place_of
from tensorkeep.runs.metrics import metric_names, usual_metric
from tensorkeep.runs.retention import best_step
from tensorkeep.runs.steps import step_numbers
from tensorkeep.storage import exists, names_in, storage_of

CHECKPOINTS = "checkpoints"

# The name of a metric may have slashes: ``eval/loss``.
_ADDRESS = re.compile(r"(.+)@([^@/]*|best:[^@]*)", re.DOTALL)
_FORMS = "write RUN@latest, RUN@best, RUN@best:METRIC, or RUN@1200 with the number of a step"


class Address(NamedTuple):
    """What an address names.

    Attributes
    ----------
    path : path-like
        The checkpoint.
    step : int or None
        Its number, if it was found as a step of a run.
    reason : str or None
        Why this step, if the address does not give its number: ``"the latest"``.
    skipped : mapping of int to TensorkeepError
        Later steps that are damaged or incomplete.
    """

    path: PathLike
    step: int | None = None
    reason: str | None = None
    skipped: Mapping[int, TensorkeepError] = MappingProxyType({})


def checkpoint_path(path: PathLike) -> PathLike:
    """Return the path of the checkpoint that an address names, and warn of later steps that are skipped.

    Raises as `find_checkpoint`.
    """
    address = find_checkpoint(path)
    for number, error in address.skipped.items():
        warnings.warn(f"step {number} is skipped: {error}", stacklevel=stack_level_of_caller())
    return address.path


def find_checkpoint(path: PathLike) -> Address:
    """Return what an address names; a path that is neither a run nor a step of one is returned as it is.

    Raises NotFoundError if the step or its run does not exist; NotACheckpointError if the folder has no steps;
    UsageError if a step is given in another form; the error of the last step if all are damaged.
    """
    place, wanted = split_address(path)
    if wanted is None:
        root = find_run(place)
        return Address(place) if root is None else _latest(root)
    # Python converts no number of thousands of digits.
    if wanted.isdecimal() and len(wanted) < 100:
        return _numbered(as_path(place), int(wanted))
    root = run_root(place)
    if wanted == "latest":
        return _latest(root)
    best, colon, metric = wanted.partition(":")
    if best != "best" or (colon and not metric):
        raise UsageError(f"{wanted!r} is not a step", path=path, remedy=_FORMS)
    return _best(root, metric or None)


def split_address(path: PathLike) -> tuple[PathLike, str | None]:
    """Return the path of an address, and what stands behind its ``@``, or None."""
    path = checked_path(path, stores=True)
    # `Path` takes the empty string for the current folder, which may be a run.
    if not os.fspath(path):
        raise UsageError("the path is empty", remedy="give the path of a checkpoint or a run")
    match = _ADDRESS.fullmatch(os.fspath(path))
    return (path, None) if match is None or exists(as_path(path)) else (match[1], match[2])


def steps_of_run(path: PathLike) -> list[Path]:
    """Return the paths of all steps of a run, damaged ones included; an empty list if the path is not a run."""
    place, wanted = split_address(path)
    root = find_run(place) if wanted is None else None
    if root is None:
        return []
    steps = place_of(root)
    return [steps.path_of(number) for number in steps.numbers()]


def find_run(path: PathLike) -> Path | None:
    """Return the folder that contains the steps of a run; None if the path is a checkpoint, or not a run."""
    folder = as_path(path)
    # Most paths are native checkpoints, which are recognised faster than their names are listed.
    root = None if NATIVE.recognises(folder) else _root_of(folder)
    return None if root is not None and is_checkpoint(folder) else root


def run_root(path: PathLike) -> Path:
    """Return the folder that contains the steps of a run.

    Raises UsageError if the path is the address of one step; NotFoundError, NotACheckpointError if it is not a run.
    """
    place, wanted = split_address(path)
    if wanted is not None:
        raise UsageError("is one step, not a run", path=path, remedy=f"leave out @{wanted}")
    root = _root_of(as_path(place))
    if root is not None:
        return root
    folder = as_path(place)
    if not storage_of(folder).lists(folder):
        raise UnsupportedError(
            "a web server lists no names, so the steps of a run are not found",
            path=place,
            remedy="give the number of a step: RUN@1200",
        )
    if not exists(folder):
        raise NotFoundError("does not exist", path=place, remedy="check the path")
    raise NotACheckpointError("contains no steps", path=place, remedy="give the folder that contains step-000100")


def _root_of(folder: Path) -> Path | None:
    return next((place for place in (folder, folder / CHECKPOINTS) if _has_steps(place)), None)


def _has_steps(folder: Path) -> bool:
    try:
        return bool(step_numbers(names_in(folder)))
    except UnsupportedError:
        # An object of another name that cannot be listed. A listing of the steps passes over some of those.
        return bool(place_of(folder).numbers())


def _numbered(folder: Path, number: int) -> Address:
    # Without a listing, which a web server does not give.
    for steps in map(place_of, (folder, folder / CHECKPOINTS)):
        path = steps.path_of(number)
        if steps.exists(path):
            return Address(path, number)
    if not storage_of(folder).lists(folder):
        raise NotFoundError(
            f"has no step {number}", path=folder, remedy="check the URL and the number: a web server lists no steps"
        )
    return Address(place_of(run_root(folder)).existing(number), number)


def _latest(root: Path) -> Address:
    skipped: dict[int, TensorkeepError] = {}
    steps = place_of(root)
    for number in reversed(steps.numbers()):
        try:
            return Address(steps.read(number).path, number, "the latest", skipped)
        except TensorkeepError as error:
            # A step that the store does not give may be whole: an earlier one is not the latest.
            if isinstance(error, StoreError) and storage_of(root).remote:
                raise
            # Unless its writer has deleted it meanwhile.
            if steps.exists(steps.path_of(number)):
                skipped[number] = error
    raise next(iter(skipped.values()), NotACheckpointError("contains no steps", path=root))


def _best(root: Path, metric: str | None) -> Address:
    steps = place_of(root).listing().steps
    metric = metric or usual_metric(metric_names(steps))
    step = best_step(steps, metric)
    if step is None:
        raise NotFoundError("has no step with a metric", path=root, remedy="give the number of a step, or @latest")
    return Address(step.path, step.number, f"the best: {metric} {step.metrics[metric or '']:.6g}")
