"""`tensorkeep.log`: the steps of a training run, their metrics and disk space, by manifests and file sizes only."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tensorkeep.checkpoint.verify import verify as verify_step
from tensorkeep.errors import NotACheckpointError, PathLike, TensorkeepError, UsageError
from tensorkeep.formats.native.reader import occupied_bytes
from tensorkeep.paths import as_path
from tensorkeep.plugins import Registry
from tensorkeep.runs.address import backend_of, run_root
from tensorkeep.runs.pruned import PrunedStep, read_pruned
from tensorkeep.runs.steps import Step, best_step, checked_mode, metric_names, mode_of, step_of, usual_metric
from tensorkeep.storage.parallel import Progress

RECORD = "run.json"
"""The file in the folder of a run that says how it was trained."""

RUN_RECORDS: Registry[Callable[[Path], tuple[dict[str, Any], list[str]]]] = Registry(
    "run_record", "chatgot", elsewhere={RECORD: "chatgot"}
)
"""Functions that describe the segments of the run in a folder, as JSON and as text, by the name of its record."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step of a `RunLog`.

    Attributes
    ----------
    number, path : int, str
    saved_at : float or None
        Seconds since 1970 (UTC).
    metrics : dict of str to float
    nbytes, new_bytes : int
        Bytes of its files, and of the files that no earlier step of the run has.
    occupied_bytes : int
        The disk space of the new files.
    state_bytes : int
        Raw bytes of its tensors.
    compression : str or None
    best : bool
        Whether it is the best complete step by the metric of the log.
    problem : str or None
        What is wrong with a damaged or incomplete step; unless that was found by ``verify``, only its space is known.
    """

    number: int
    path: str
    saved_at: float | None = None
    metrics: dict[str, float] | None = None
    nbytes: int = 0
    new_bytes: int = 0
    occupied_bytes: int = 0
    state_bytes: int = 0
    compression: str | None = None
    best: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RunLog:
    """The steps of a training run, returned by `tensorkeep.log`.

    Attributes
    ----------
    path : str
        The folder that contains the steps.
    steps : list of LoggedStep
        All steps, by number.
    metric, mode : str or None
        The metric that the best step is found by, and whether its ``"min"`` or ``"max"`` is best; None if the steps
        have no metrics, or it is not clear which one counts.
    pruned : list of PrunedStep
        ``number``, ``saved_at`` and ``metrics`` of steps that had metrics and were deleted, by number.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> with tensorkeep.CheckpointManager(folder.name) as manager:
    ...     for step, loss in ((10, 2.0), (20, 1.5)):
    ...         pending = manager.save(step, {"w": torch.ones(9)}, metrics={"loss": loss})
    >>> log = tensorkeep.log(folder.name)
    >>> log.metric, log.best.number, log.summary()["steps"]
    ('loss', 20, 2)
    >>> folder.cleanup()
    """

    path: str
    steps: list[LoggedStep]
    metric: str | None
    mode: str | None
    pruned: list[PrunedStep] = field(default_factory=list)

    @property
    def saved(self) -> list["LoggedStep | PrunedStep"]:
        """All steps that were saved, deleted or not, by number."""
        return sorted([*self.pruned, *self.steps], key=lambda step: step.number)

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the number and the value of each `saved` step that has a metric, by the name of the metric."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step in self.saved:
            for name, value in (step.metrics or {}).items():
                found.setdefault(name, []).append((step.number, value))
        return found

    @property
    def best(self) -> LoggedStep | None:
        """The best complete step."""
        return next((step for step in self.steps if step.best), None)

    def as_dict(self, *, last: int | None = None) -> dict[str, Any]:
        """Return the log as plain values, as ``--json`` prints it; only the ``last`` steps if given."""
        steps = self.steps if last is None else self.steps[-last:]
        return {**asdict(replace(self, steps=[])), "count": len(self.steps), "steps": [asdict(step) for step in steps]}

    def summary(self) -> dict[str, Any]:
        """Return the totals of the run as plain values, as ``tensorkeep info RUN --json`` prints them."""
        complete = [step for step in self.steps if step.problem is None]
        added = [step.new_bytes for step in complete if step.new_bytes < step.nbytes]
        return {
            "path": self.path,
            "steps": len(self.steps),
            "first": asdict(self.steps[0]),
            "last": asdict(self.steps[-1]),
            "best": None if self.best is None else asdict(self.best),
            "metric": self.metric,
            "mode": self.mode,
            "nbytes": sum(step.nbytes for step in self.steps),
            "new_bytes": sum(step.new_bytes for step in self.steps),
            "occupied_bytes": sum(step.occupied_bytes for step in self.steps),
            "incremental_steps": len(added),
            "median_incremental_bytes": median(added) if added else None,
            "pruned": len(self.pruned),
            "metrics": {name: _range([value for _, value in points]) for name, points in self.curves().items()},
            "problems": {str(step.number): step.problem for step in self.steps if step.problem},
        }


def log(
    run: PathLike,
    *,
    metric: str | None = None,
    mode: str | None = None,
    verify: bool = False,
    progress: Progress | None = None,
) -> RunLog:
    """Return the steps of a training run; damaged and incomplete ones are named, not raised.

    Parameters
    ----------
    run : path-like
        The folder of the run: the root of a `CheckpointManager`, or a folder that has it as ``checkpoints/``.
    metric, mode : str, optional
        Find the best step by this metric, and by its ``"min"`` or ``"max"``; see `CheckpointManager.best`.
    verify : bool
        Read every byte. Otherwise only manifests are read, and the sizes of files are checked.
    progress : callable, optional
        Called with (bytes done, bytes in all) of the step that is verified, from the reading threads.

    Raises
    ------
    NotFoundError, NotACheckpointError
        If nothing is at the path, or it contains no steps.
    UsageError
        If the path is one step, such as ``"run@best"``; if no step has the metric, or its mode is not known.
    StoreError
        If the folder cannot be read.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> with tensorkeep.CheckpointManager(folder.name) as manager:
    ...     for step, loss in ((10, 2.0), (20, 1.5), (30, 1.8)):
    ...         pending = manager.save(step, {"w": torch.ones(9)}, metrics={"loss": loss})
    >>> [(step.number, step.metrics, step.best) for step in tensorkeep.log(folder.name).steps]
    [(10, {'loss': 2.0}, False), (20, {'loss': 1.5}, True), (30, {'loss': 1.8}, False)]
    >>> folder.cleanup()
    """
    checked_mode(mode)
    root = run_root(run)
    seen: set[tuple[int, int]] = set()
    entries: list[LoggedStep] = []
    complete: list[Step] = []
    backend = backend_of(root)
    for number, summary in backend.summaries():
        path = backend.path_of(number)
        if isinstance(summary, TensorkeepError):
            entry = LoggedStep(number, os.fspath(path), problem=_problem(summary, path))
            entries.append(_with_space(entry, backend.files_of(path), seen))
            continue
        step = step_of(path, number, summary)
        entry = LoggedStep(
            number,
            step.path,
            step.saved_at,
            dict(step.metrics),
            state_bytes=summary.outline.state_bytes,
            compression=summary.outline.compression,
        )
        entry = _with_space(entry, summary.files, seen)
        if verify:
            entry = replace(entry, problem=_verified(path, progress))
        entries.append(entry)
        if entry.problem is None:
            complete.append(step)
    chosen = _metric(complete, metric, mode)
    best = best_step(complete, chosen, mode) if chosen else None
    entries = [replace(entry, best=best is not None and entry.number == best.number) for entry in entries]
    there = {entry.number for entry in entries}
    pruned = [step for number, step in read_pruned(root).items() if number not in there]
    return RunLog(os.fspath(root), entries, chosen, mode_of(chosen, mode) if chosen else None, pruned)


def _with_space(entry: LoggedStep, files: list[os.stat_result], seen: set[tuple[int, int]]) -> LoggedStep:
    """Return an entry with the bytes of its files; new files are added to ``seen``."""
    # By device and inode: steps share files by hard links.
    new = [status for status in files if (status.st_dev, status.st_ino) not in seen]
    seen.update((status.st_dev, status.st_ino) for status in new)
    return replace(
        entry,
        nbytes=sum(status.st_size for status in files),
        new_bytes=sum(status.st_size for status in new),
        occupied_bytes=sum(map(occupied_bytes, new)),
    )


def _metric(steps: list[Step], metric: str | None, mode: str | None) -> str | None:
    """The metric to find the best step by; None if it is not given and not clear."""
    if metric is not None:
        return metric
    with suppress(UsageError):
        found = usual_metric(metric_names(steps))
        if found and mode_of(found, mode):
            return found
    return None


def _verified(path: Path, progress: Progress | None) -> str | None:
    problems = verify_step(path, progress=progress).problems
    more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
    if not problems:
        return None
    first = problems[0]
    where = [first.file, None if first.name is None else repr(first.name)]
    return f"damaged: {': '.join([*filter(None, where), first.message])}{more}"


def _problem(error: TensorkeepError, path: Path) -> str:
    """An error in one line that begins with "incomplete", "damaged", "unsupported" or "unreadable"."""
    kinds = {"corrupt": "damaged", "unsupported": "unsupported"}
    kind = "incomplete" if isinstance(error, NotACheckpointError) else kinds.get(error.kind, "unreadable")
    inside = error.path is not None and as_path(error.path) != path
    return f"{kind}: {as_path(error.path or '').name + ': ' if inside else ''}{error.message}"


def _range(values: list[float]) -> dict[str, Any]:
    # A NaN counts only if nothing else was logged.
    numbers = [value for value in values if value == value] or [float("nan")]
    return {"first": values[0], "last": values[-1], "min": min(numbers), "max": max(numbers)}


def lines_of(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, without damaged ones: the last line may be incomplete."""
    # A crash may cut the last line within a character.
    for text in content.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line
