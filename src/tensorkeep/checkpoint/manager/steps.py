"""The steps of a training run: checkpoints ``step-000100``, ``step-000200``, ... in one folder."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import SupportsIndex

from tensorkeep.errors import NotACheckpointError, NotFoundError, PathLike, TensorkeepError, UsageError
from tensorkeep.formats.native.reader import foreign_names, is_native, look
from tensorkeep.formats.probe import names_in
from tensorkeep.io.commit import remove_checkpoint
from tensorkeep.io.files import store_error

_NAME = re.compile(r"step-(\d{6,18})")
_MOST = 10**18 - 1


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is there, whole as far as can be told without reading its tensors.

    Attributes
    ----------
    number : int
    path : str
    saved_at : float
        Seconds since 1970 (UTC), by the clock of the machine that saved it.
    metrics : mapping of str to float
    nbytes : int
        Bytes of its files, those that it shares with other steps included.
    own_bytes : int
        Bytes of files that no other step has; what removing it alone would free.
    """

    number: int
    path: str
    saved_at: float
    metrics: Mapping[str, float]
    nbytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a folder of steps.

    Attributes
    ----------
    steps : list of Step
        By number.
    broken : mapping of int to TensorkeepError
        What is wrong with those that are no steps to go on from: incomplete, damaged, or of another kind.
    """

    steps: list[Step]
    broken: Mapping[int, TensorkeepError] = field(default_factory=lambda: MappingProxyType({}))


def step_number(number: SupportsIndex, root: PathLike | None = None) -> int:
    """Return the number of a step as an int; integers of numpy and torch are numbers, too.

    Raises
    ------
    UsageError
        If it is negative, or no integer.
    """
    try:
        found = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = -1
    if not 0 <= found <= _MOST:
        raise UsageError(f"{number!r} is no number of a step", path=root, remedy="give an int of 0 or more")
    return found


def step_path(root: PathLike, number: SupportsIndex) -> Path:
    """Return where a step lies; UsageError as for `step_number`."""
    return Path(root) / f"step-{step_number(number, root):06d}"


def numbers_in(root: PathLike) -> list[int]:
    """Return the numbers of what is called a step in a folder, in order; none where there is no folder.

    Raises
    ------
    StoreError
        If the operating system does not let one look.
    """
    found = (match for name in names_in(Path(root)) if (match := _NAME.fullmatch(name)))
    return sorted(int(match[1]) for match in found if f"step-{int(match[1]):06d}" == match[0])


def read_step(root: PathLike, number: int) -> Step:
    """Return a step by its manifest, whose files must be there and as long as it says.

    Raises
    ------
    NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
        If it is none to go on from.
    """
    path = step_path(root, number)
    record, nbytes, own = look(path)
    saved_at = record.saved_at if record else _changed_at(path)
    metrics = MappingProxyType({name: float(value) for name, value in record.metrics.items()} if record else {})
    return Step(number, os.fspath(path), saved_at, metrics, nbytes, own)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError as error:
        raise NotFoundError("there is no such step", path=path) from error
    except OSError as error:
        raise store_error(error, path, "look at the step") from error


def survey(root: PathLike) -> Survey:
    """Look at every step of a folder; no tensor is read.

    Raises
    ------
    StoreError
        If the operating system does not let one look into the folder.
    """
    steps: list[Step] = []
    broken: dict[int, TensorkeepError] = {}
    for number in numbers_in(root):
        try:
            steps.append(read_step(root, number))
        except TensorkeepError as error:
            # What its writer has deleted since is not broken.
            if not isinstance(error, NotACheckpointError) or os.path.lexists(step_path(root, number)):
                broken[number] = error
    return Survey(steps, broken)


def check_removable(path: Path) -> None:
    """Hold that removing a path removes a step and nothing else.

    Raises
    ------
    UsageError
        If it holds files that are no part of the step, which nobody asked to remove.
    NotACheckpointError
        If it is no step of ours: another file or folder of that name, or a link, or what has lost its manifest.
    StoreError
        If the operating system does not let one look.
    """
    try:
        if path.is_symlink() or not is_native(path):
            raise NotACheckpointError(
                "is no checkpoint that was saved here, or has lost its manifest, so it is not deleted",
                path=path,
                remedy="if nobody needs it, remove it yourself",
            )
        foreign = foreign_names(path)
    except OSError as error:
        raise store_error(error, path, "look at the step") from error
    if foreign:
        raise UsageError(
            f"holds {foreign[0]!r}, which is no part of the step, so it is not deleted",
            path=path,
            remedy="move that elsewhere first",
        )


def remove_step(path: Path) -> None:
    """Remove a step, whole or damaged, if it is one and nothing else; of one that is gone already nothing is said.

    Raises
    ------
    UsageError, NotACheckpointError, StoreError
        As for `check_removable`; or if the operating system refuses.
    """
    if not os.path.lexists(path):
        return
    check_removable(path)
    try:
        remove_checkpoint(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise store_error(error, path, "delete the step") from error
