"""The steps of a training run: checkpoints ``step-000100``, ``step-000200``, ... in one folder."""

import logging
import math
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, SupportsIndex

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    PathLike,
    TensorkeepError,
    UsageError,
)
from tensorkeep.formats.native.directory import Summary, foreign_names, is_native, summarise
from tensorkeep.formats.probe import exists, names_in
from tensorkeep.io.commit import remove_checkpoint
from tensorkeep.io.files import store_errors
from tensorkeep.paths import as_path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{6,18})")
_LARGEST = 10**18 - 1
_NEAREST = 4


@dataclass(frozen=True, slots=True)
class Step:
    """A step with a valid manifest and files of the right sizes; tensors are not read.

    Attributes
    ----------
    number : int
    path : str
    saved_at : float
        Seconds since 1970 (UTC), by the clock of the machine that saved it.
    metrics : mapping of str to float
    nbytes, own_bytes : int
        Bytes of its files, and of those that no other step shares, which deleting it would free.
    """

    number: int
    path: str
    saved_at: float
    metrics: Mapping[str, float]
    nbytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class StepListing:
    """The complete steps of a folder, by number, and for the others what is wrong with each."""

    steps: list[Step]
    broken: Mapping[int, TensorkeepError]


def step_number(number: SupportsIndex, root: PathLike | None = None) -> int:
    """Return the number of a step as an int; integers of numpy and torch are accepted.

    Raises UsageError if it is negative, not an integer, or has more than 18 digits.
    """
    try:
        found = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = -1
    if not 0 <= found <= _LARGEST:
        raise UsageError(f"{number!r} is not the number of a step", path=root, remedy="give an int of 0 or more")
    return found


def step_path(root: PathLike, number: SupportsIndex) -> Path:
    """Return the path of a step; UsageError as `step_number`."""
    return as_path(root) / f"step-{step_number(number, root):06d}"


def existing_step(root: PathLike, number: SupportsIndex) -> Path:
    """Return the path of a step, complete or not; the NotFoundError names the nearest steps if it does not exist."""
    path = step_path(root, number)
    if exists(path):
        return path
    found = sorted(sorted(numbers_in(root), key=lambda other: abs(other - operator.index(number)))[:_NEAREST])
    remedy = "it has no steps: check the folder"
    if found:
        remedy = f"the nearest step{'s are' if len(found) > 1 else ' is'} {', '.join(map(str, found))}"
    raise NotFoundError(f"has no step {number}", path=root, remedy=remedy)


def numbers_in(root: PathLike) -> list[int]:
    """Return the numbers of the names of steps in a folder, in order; an empty list if the folder does not exist."""
    found = (match for name in names_in(as_path(root)) if (match := _NAME.fullmatch(name)))
    return sorted(int(match[1]) for match in found if f"step-{int(match[1]):06d}" == match[0])


def read_step(root: PathLike, number: int) -> Step:
    """Return a step by its manifest, having checked that its files exist and have the right sizes."""
    path = step_path(root, number)
    return step_of(path, number, summarise(path))


def step_of(path: Path, number: int, summary: Summary) -> Step:
    """Return a step by the summary of its checkpoint."""
    record = summary.outline.step
    with store_errors(path, "look at the step"):
        try:
            saved_at = record.saved_at if record else path.stat().st_mtime
        except FileNotFoundError as error:
            raise NotFoundError("this step does not exist", path=path) from error
    metrics = MappingProxyType({name: float(value) for name, value in record.metrics.items()} if record else {})
    return Step(number, os.fspath(path), saved_at, metrics, summary.nbytes, summary.own_bytes)


def is_damaged(path: Path) -> bool:
    """Return whether a path is a step whose manifest is damaged, or whose files are missing or truncated."""
    try:
        summarise(path)
    except CorruptCheckpointError:
        return True
    except TensorkeepError:
        pass  # nothing is there, or it was written by another tool or a later version
    return False


def list_steps(root: PathLike) -> StepListing:
    """Look at every step of a folder; no tensor is read."""
    steps: list[Step] = []
    broken: dict[int, TensorkeepError] = {}
    for number in numbers_in(root):
        try:
            steps.append(read_step(root, number))
        except TensorkeepError as error:
            # A step that its writer has deleted meanwhile is not broken.
            if not isinstance(error, NotACheckpointError) or exists(step_path(root, number)):
                broken[number] = error
    return StepListing(steps, MappingProxyType(broken))


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Return metrics as a `StepRecord` stores them: numbers, and the texts "nan", "inf" and "-inf".

    Raises UsageError if one is not a number, or its name is not text.
    """
    found: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value)
            str(name).encode()
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"the metric {name!r:.80} is {value!r:.80}", remedy="give a number, under a name that is text"
            ) from error
        found[str(name)] = number if math.isfinite(number) else str(number)
    return found


def check_removable(path: Path) -> None:
    """Check that deleting a path deletes a step and nothing else.

    Raises UsageError if it holds files that do not belong to the step; NotACheckpointError if it is not a step: another
    file or folder of that name, a link, or a step that has lost its manifest.
    """
    with store_errors(path, "look at the step"):
        if path.is_symlink() or not is_native(path):
            raise NotACheckpointError(
                "is not a checkpoint of Tensorkeep, or has lost its manifest, so it is not deleted",
                path=path,
                remedy="if it is not needed, remove it yourself",
            )
        foreign = foreign_names(path)
    if foreign:
        raise UsageError(
            f"holds {foreign[0]!r}, which does not belong to the step, so it is not deleted",
            path=path,
            remedy="move that file elsewhere first",
        )


def remove_step(path: Path) -> None:
    """Delete a step, complete or damaged; raise as `check_removable`. Nothing happens if it is gone already."""
    if not exists(path):
        return
    check_removable(path)
    with store_errors(path, "delete the step"):
        try:
            remove_checkpoint(path)
        except FileNotFoundError:
            return
    logger.info("deleted %s", path)
