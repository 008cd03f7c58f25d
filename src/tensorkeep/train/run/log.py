"""The log of a run: one JSON object per line, without repeated steps after a resume."""

import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorkeep.errors import MissingExtraError, StoreError
from tensorkeep.io.commit import replace_file
from tensorkeep.io.files import store_errors


class RunLog:
    """Writes ``log.jsonl``, and TensorBoard files if asked to; a context manager.

    Nothing is opened or written before `begin`. Raises MissingExtraError if TensorBoard is requested and not installed.
    """

    def __init__(self, path: Path, *, tensorboard: bool = False) -> None:
        self._path = path
        self._writer_class = _summary_writer() if tensorboard else None
        self._board: Any = None
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
            if self._writer_class is not None:
                # TensorBoard ignores the events of these steps in its earlier files.
                self._board = self._writer_class(str(self._path.parent / "tensorboard"), purge_step=last_step + 1)
                self._open.callback(self._board.close)

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Write an event of a step. Numbers that are not finite become null, because JSON cannot represent them.

        Raises StoreError if the operating system refuses.
        """
        line = {"step": step, "kind": kind} | {name: _finite(value) for name, value in values.items()}
        with store_errors(self._path, "write the log"):
            self._file.write(json.dumps(line) + "\n")
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with store_errors(self._path, "write the log"):
                self._open.close()
        except StoreError as failure:
            # The error that ended the block is more important.
            if error is None:
                raise
            error.add_note(str(failure))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without damaged ones: the last line may be incomplete."""
    with store_errors(path, "read the log"):
        texts = path.read_text(errors="replace").splitlines() if path.exists() else []
    found = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found.append(line)
    return found


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary_writer() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "log.tensorboard needs TensorBoard, which is not installed", remedy="pip install 'tensorkeep[train]'"
        ) from error
    return SummaryWriter
