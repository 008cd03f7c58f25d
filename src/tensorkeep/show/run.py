"""What a training run is: the figures of its log, its steps and the bytes that they share, and how its layers moved."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.checkpoint.log import RunLog
from tensorkeep.checkpoint.log import log as read_log
from tensorkeep.errors import PathLike, TensorkeepError
from tensorkeep.formats.native.directory import summarise
from tensorkeep.formats.torch_file.unpickle import Allow
from tensorkeep.paths import as_path
from tensorkeep.show.motion import Motion, read_motion
from tensorkeep.storage import first_bytes
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import Progress

_LOG = "log.jsonl"
_LONGEST_LOG = 256 * 1024**2

Points = list[tuple[int, float]]
"""Steps and the values there."""


@dataclass(frozen=True, slots=True)
class RunContents:
    """A run.

    Attributes
    ----------
    log : RunLog
        Its steps: metrics, sizes and problems.
    figures : dict of str to Points
        The numbers in its ``log.jsonl`` by kind and name, such as ``"train/loss"``; empty without that file.
    origins : dict of int to dict of int to int
        For each complete step, the bytes of its files by the step that wrote them.
    motion : Motion or None
        How far each layer moved from step to step; None with fewer than two steps, or without weights.
    cut : bool
        Whether the log is so long that its end was not read.
    problems : dict of int to str
        What is wrong with damaged and incomplete steps.
    """

    log: RunLog
    figures: dict[str, Points]
    origins: dict[int, dict[int, int]]
    motion: Motion | None
    cut: bool = False
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def moves(self) -> Motion | None:
        """The motion, if at least two steps could be read."""
        return self.motion if self.motion is not None and len(self.motion.steps) > 1 else None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values, as ``--json`` prints it."""
        return {
            "kind": "run",
            **self.log.as_dict(),
            "figures": {name: [list(point) for point in points] for name, points in self.figures.items()},
            "origins": {step: dict(found) for step, found in self.origins.items()},
            "motion": None if self.motion is None else self.motion.as_dict(),
            "problems": self.problems,
        }


def read_run(
    path: PathLike,
    *,
    sample: int,
    allow: Allow | None = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    progress: Progress | None = None,
) -> RunContents:
    """Read a run: its log and manifests, and a sample of its weights; damaged steps are named, not raised.

    Raises the errors of `tensorkeep.log`.
    """
    found = read_log(path)
    problems = {step.number: step.problem for step in found.steps if step.problem}
    complete = {step.number: as_path(step.path) for step in found.steps if step.problem is None}
    motion = read_motion(
        complete, sample=sample, allow=allow, threads=threads, memory_budget=memory_budget, progress=progress
    )
    content = _log_content(as_path(found.path))
    return RunContents(
        found,
        figures_of(content),
        dict(_origins(complete)),
        motion,
        len(content) >= _LONGEST_LOG,
        problems | (motion.problems if motion else {}),
    )


def _log_content(root: Path) -> bytes:
    """Return the content of the log of a run of ``tensorkeep train``, in its folder or that of its steps."""
    for place in (root, root.parent):
        if content := first_bytes(place / _LOG, _LONGEST_LOG):
            return content
    return b""


def figures_of(content: bytes) -> dict[str, Points]:
    """Return the numbers in the lines of a log, by kind and name; a step that was repeated has its last value.

    A number that was not finite is null in the log, and NaN here.
    """
    if not content:
        return {}
    # Imports torch, which the rest does without.
    from tensorkeep.train.run.log import lines_of

    found: dict[str, dict[int, float]] = {}
    for line in lines_of(content):
        kind = line.get("kind")
        for name, value in line.items():
            if name not in ("step", "kind") and isinstance(value, int | float | None) and not isinstance(value, bool):
                found.setdefault(f"{kind}/{name}", {})[line["step"]] = math.nan if value is None else value
    return {name: sorted(points.items()) for name, points in found.items()}


def _origins(steps: Mapping[int, Path]) -> Iterator[tuple[int, dict[int, int]]]:
    """Yield each step with the bytes of its files by the step that wrote them, the first one that has them."""
    first: dict[tuple[int, int], int] = {}
    for number, path in steps.items():
        try:
            files = summarise(path).files
        except TensorkeepError:
            continue  # deleted meanwhile
        yield number, _added_up((first.setdefault(_identity(status), number), status.st_size) for status in files)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _added_up(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, count in pairs:
        found[key] = found.get(key, 0) + count
    return found
