"""The steps of a training run: checkpoints ``step-000100``, ``step-000200``, ... in one folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from holdfast.errors import HoldfastError, PathLike, UsageError
from holdfast.formats.native.reader import look

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
    broken : mapping of int to HoldfastError
        What is wrong with those that are no steps to go on from: incomplete, damaged, or of another kind.
    """

    steps: list[Step]
    broken: Mapping[int, HoldfastError] = field(default_factory=lambda: MappingProxyType({}))


def step_path(root: PathLike, number: int) -> Path:
    """Return where a step lies.

    Raises
    ------
    UsageError
        If the number is negative, or no integer.
    """
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST:
        raise UsageError(f"{number!r} is no number of a step", path=root, remedy="give an int of 0 or more")
    return Path(root) / f"step-{number:06d}"


def numbers_in(root: PathLike) -> list[int]:
    """Return the numbers of what is called a step in a folder, in order; none where there is no folder."""
    try:
        names = [path.name for path in Path(root).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = (match for name in names if (match := _NAME.fullmatch(name)))
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
    saved_at = record.saved_at if record else path.stat().st_mtime
    metrics = MappingProxyType({name: float(value) for name, value in record.metrics.items()} if record else {})
    return Step(number, os.fspath(path), saved_at, metrics, nbytes, own)


def survey(root: PathLike) -> Survey:
    """Look at every step of a folder; no tensor is read."""
    steps: list[Step] = []
    broken: dict[int, HoldfastError] = {}
    for number in numbers_in(root):
        try:
            steps.append(read_step(root, number))
        except HoldfastError as error:
            broken[number] = error
    return Survey(steps, broken)
