"""``pruned.jsonl`` in the folder of a run: the metrics of deleted steps, one line a step.

A step that exists has its metrics in its own manifest. A line is written before the step is deleted, so a step and its
line may both exist after a crash, and the step counts.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tensorkeep.errors import TensorkeepError
from tensorkeep.runs.steps import Step, checked_metrics
from tensorkeep.storage import append_lines, first_bytes
from tensorkeep.storage.clock import clock
from tensorkeep.structs import json_decoder

logger = logging.getLogger(__name__)

FILE_NAME = "pruned.jsonl"
# The end of a longer file is not read.
_MOST_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class PrunedStep:
    """A step that was deleted from a run.

    Attributes
    ----------
    number : int
    saved_at : float
        Seconds since 1970 (UTC).
    metrics : dict of str to float
    """

    number: int
    saved_at: float
    metrics: dict[str, float]


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    step: Annotated[int, msgspec.Meta(ge=0)]
    saved_at: float
    # JSON has no NaN and no infinities.
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]] = {}
    # The run returned to this step: the lines before this one, for this step and later steps, are of another branch.
    returned: bool = False


def read_pruned(root: Path) -> dict[int, PrunedStep]:
    """Return the deleted steps that have metrics, by number, without abandoned branches. Raises StoreError."""
    content = first_bytes(root / FILE_NAME, _MOST_BYTES) or b""
    decode = json_decoder(_Line).decode
    found: dict[int, PrunedStep | None] = {}
    end: float = float("inf")
    # From the last line to the first, because the last line of a step counts.
    for text in reversed(content.splitlines()):
        try:
            line = decode(text)
        except (msgspec.DecodeError, RecursionError):
            continue  # a crash has cut it
        if line.returned:
            end = min(end, line.step)
        elif line.step < end and line.step not in found:
            metrics = {name: float(value) for name, value in line.metrics.items()}
            found[line.step] = PrunedStep(line.step, line.saved_at, metrics) if metrics else None
    return {number: step for number, step in sorted(found.items()) if step is not None}


class PrunedSteps:
    """Writes the records of a run's deleted steps, in the process that deletes them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[int, dict[str, Any]] | None = None  # metrics in the file, read at the first use
        self._waiting: list[_Line] = []
        self._error: TensorkeepError | None = None
        # Two threads delete steps: the user's, and the thread that has saved a step.
        self._lock = threading.Lock()

    def add(self, steps: Iterable[Step | PrunedStep]) -> None:
        """Record steps that will be deleted, and steps that could not be recorded before; see `take_warnings`."""
        self._write(_Line(step.number, step.saved_at, checked_metrics(step.metrics)) for step in steps)

    def saved(self, number: int, existing: Callable[[], Iterable[int]]) -> None:
        """Record the return to an earlier step, if all later ones than the saved step were deleted."""
        self._write(self._return_to(number, existing))

    def take_warnings(self) -> list[str]:
        error, self._error = self._error, None
        return [] if error is None else [f"the metrics of deleted steps are not recorded yet: {error}"]

    def _return_to(self, number: int, existing: Callable[[], Iterable[int]]) -> Iterator[_Line]:
        # Rules keep the last step. While it exists, an earlier one may have been saved again without a return.
        if any(other > number for other in self._read()) and all(other <= number for other in existing()):
            yield _Line(number, clock().time(), returned=True)

    def _read(self) -> dict[int, dict[str, Any]]:
        if self._known is None:
            self._known = {number: checked_metrics(step.metrics) for number, step in read_pruned(self._root).items()}
        return self._known

    def _write(self, lines: Iterable[_Line]) -> None:
        with self._lock:
            try:
                self._waiting += lines
                if self._waiting:
                    self._write_waiting()
                self._error = None
            # The metrics of old steps are not worth a failed save, or a disk that stays full.
            except TensorkeepError as error:
                logger.info("cannot record deleted steps of %s: %s", self._root, error)
                self._error = error

    def _write_waiting(self) -> None:
        known, needed = dict(self._read()), []
        for line in self._waiting:
            if line.returned:
                known = {number: metrics for number, metrics in known.items() if number < line.step}
                needed.append(line)
            # A step that cannot be deleted is asked for again and again. One without metrics needs a line only if an
            # earlier step of its number has one.
            elif known.get(line.step, {}) != line.metrics:
                known[line.step] = line.metrics
                needed.append(line)
        if needed:
            append_lines(self._root / FILE_NAME, b"".join(msgspec.json.encode(line) + b"\n" for line in needed))
        self._known, self._waiting = known, []
