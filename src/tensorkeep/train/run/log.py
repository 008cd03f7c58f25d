"""The log of a run: one JSON object per line, in which a run that was killed and goes on leaves no trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tensorkeep.errors import MissingExtraError, StoreError
from tensorkeep.io.commit import Commit
from tensorkeep.io.files import store_error, write_small


class RunLog:
    """Writes ``log.jsonl``, and TensorBoard's files if asked to; a context manager. Nothing is written before `begin`.

    Parameters
    ----------
    path : Path
        The file.
    tensorboard : bool

    Raises
    ------
    MissingExtraError
        If TensorBoard is asked for and not installed.
    """

    def __init__(self, path: Path, *, tensorboard: bool = False) -> None:
        self._path = path
        self._open_board = _tensorboard() if tensorboard else None
        self._board: Any = None
        self._open = ExitStack()

    def begin(self, last_step: int) -> None:
        """Open the file; what it holds of later steps is dropped: a run that goes on does them again.

        Parameters
        ----------
        last_step : int
            The step that the run goes on after; 0 for a new one.

        Raises
        ------
        StoreError
            If the operating system refuses.
        """
        kept = [line for line in _lines(self._path) if line["step"] <= last_step]
        content = "".join(f"{json.dumps(line)}\n" for line in kept).encode()
        # The lines that are kept are never at risk.
        with Commit(self._path, directory=False, overwrite=True, replaceable=lambda path: True) as commit:
            write_small(commit.path, content)
            commit.publish()
        with _refusals(self._path):
            # Line by line, so that whoever follows the file, or finds it after a crash, sees all of them.
            self._file = self._open.enter_context(self._path.open("a", buffering=1))
            if self._open_board is not None:
                # TensorBoard hides what its earlier files say of these steps.
                self._board = self._open_board(str(self._path.parent / "tensorboard"), purge_step=last_step + 1)
                self._open.callback(self._board.close)

    def write(self, step: int, kind: str, **values: Any) -> None:
        """Write what happened at a step: numbers that are not finite become null, as JSON has none of them.

        Raises
        ------
        StoreError
            If the operating system refuses.
        """
        line = {"step": step, "kind": kind} | {name: _strict(value) for name, value in values.items()}
        with _refusals(self._path):
            self._file.write(json.dumps(line) + "\n")
            if self._board is not None:
                for name, value in values.items():
                    if isinstance(value, int | float):
                        self._board.add_scalar(f"{kind}/{name}", value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            with _refusals(self._path):
                self._open.close()
        except StoreError as failure:
            # What ended the block matters more.
            if error is None:
                raise
            error.add_note(str(failure))


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Raise what the operating system refuses as StoreError."""
    try:
        yield
    except OSError as error:
        raise store_error(error, path, "write the log") from error


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, but for a last one that was cut off."""
    try:
        texts = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error(error, path, "read the log") from error
    found = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            found.append(line)
    return found


def _strict(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _tensorboard() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError(
            "log.tensorboard needs TensorBoard, which is not installed", remedy="pip install 'tensorkeep[train]'"
        ) from error
    return SummaryWriter
