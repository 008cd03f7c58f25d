"""The log of a run: one JSON object per line, without repeated steps after a resume."""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorkeep.errors import StoreError, first_line
from tensorkeep.storage.commit import replace_file
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.train.monitor.trackers import Tracker, figures_of

logger = logging.getLogger(__name__)


class RunLog:
    """Writes ``log.jsonl``, and passes its figures to trackers; a context manager.

    Nothing is opened or written before `begin`. A remote tracker that fails is left out from then on, with a warning.
    """

    def __init__(self, path: Path, trackers: Sequence[Tracker] = ()) -> None:
        self._path = path
        self._trackers = list(trackers)
        self._begun: list[Tracker] = []
        self._open = ExitStack()

    def begin(self, last_step: int) -> None:
        """Open the file, without its lines after the last step that the run has done, which a resumed run repeats.

        Raises StoreError if the operating system refuses.
        """
        kept = [line for line in _lines(self._path) if line["step"] <= last_step]
        # Replaced atomically, so that no crash loses the lines that are kept.
        replace_file(self._path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
        with store_errors(self._path, "write the log"):
            # Line-buffered: other processes, and whoever reads it after a crash, find every line.
            self._file = self._open.enter_context(self._path.open("a", buffering=1))
            for tracker in self._trackers:
                tracker.begin(last_step)
                self._begun.append(tracker)

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Write an event of a step. Numbers that are not finite become null, because JSON cannot represent them.

        Raises StoreError if the operating system refuses.
        """
        line = {"step": step, "kind": kind} | {name: _finite(value) for name, value in values.items()}
        with store_errors(self._path, "write the log"):
            self._file.write(json.dumps(line) + "\n")
            figures = dict(figures_of(kind, values)) if self._begun else {}
            for tracker in list(self._begun) if figures else ():
                with self._left_out_if_it_fails(tracker):
                    tracker.write(step, kind, figures)

    @contextmanager
    def _left_out_if_it_fails(self, tracker: Tracker) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not tracker.is_remote:
                raise
            self._begun.remove(tracker)
            logger.warning("%s is off from now on: %s; log.jsonl has all figures", tracker.name, first_line(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with store_errors(self._path, "write the log"), self._open:
                for tracker in list(self._begun):
                    with self._left_out_if_it_fails(tracker):
                        tracker.close(failed=error is not None)
        except StoreError as failure:
            # The error that ended the block is more important.
            if error is None:
                raise
            error.add_note(str(failure))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with store_errors(path, "read the log"):
        content = path.read_bytes() if path.exists() else b""
    return lines_of(content)


def lines_of(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, without damaged ones: the last line may be incomplete."""
    for text in content.decode(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
