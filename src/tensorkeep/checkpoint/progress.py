"""Progress bars: what ``progress=True`` draws, and the command line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tensorkeep.errors import UsageError
from tensorkeep.storage.parallel import Progress

ProgressOption = Progress | bool | None
"""A callback, True for a progress bar, or nothing."""

_FULL_WIDTH = 72
"""From this many terminal columns, a bar also has the rate and the remaining time."""


@contextmanager
def progress_bar(doing: str, *, of_bytes: bool = True) -> Iterator[Progress]:
    """Draw a bar on stderr while the block runs; yield a callback that takes (bytes or others done, in all)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.progress import TransferSpeedColumn as Speed

    console = Console(stderr=True)
    done = DownloadColumn() if of_bytes else MofNCompleteColumn()
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), done]
    if console.width >= _FULL_WIDTH:
        columns += [*([Speed()] if of_bytes else []), TimeRemainingColumn()]
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def drawn(progress: ProgressOption, doing: str) -> Iterator[Progress | None]:
    """Yield the callback to use: the given function; for True, a bar if stderr is a terminal; else None."""
    if not isinstance(progress, bool):
        yield progress
    elif progress and sys.stderr.isatty():
        with progress_bar(doing) as callback:
            yield callback
    else:
        yield None


def callback_only(progress: ProgressOption) -> Progress | None:
    """Return the callback of a background save, which draws nothing. Raises UsageError for True."""
    if progress is True:
        raise UsageError(
            "progress=True draws a bar, which a save in the background would draw over the output of the program",
            remedy="give a function of (bytes done, bytes in all)",
        )
    return None if progress is False else progress
