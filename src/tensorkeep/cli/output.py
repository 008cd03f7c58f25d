"""The options that every command takes, and what they decide: JSON or text, progress or silence."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from tensorkeep.cli.text import printable

EVERYWHERE = Group("Everywhere", sort_key=100)


@Parameter(name="*", group=EVERYWHERE, negative="", show_default=False)
@dataclass(frozen=True)
class Output:
    """How a command talks.

    Attributes
    ----------
    json : bool
        Print one JSON document to stdout, and nothing else.
    quiet : bool
        Say nothing but what went wrong.
    verbose : bool
        Show the traceback of an error.
    progress : bool
        Show a progress bar on stderr, if that is a terminal.
    config : str or None
        A TOML file of options, one table per command.
    """

    json: bool = False
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False
    verbose: Annotated[bool, Parameter(name=["--verbose", "-v"])] = False
    progress: Annotated[bool, Parameter(negative="--no-progress")] = True
    config: Annotated[str | None, Parameter(name=["--config", "-C"])] = None

    def show(self, document: Mapping[str, Any], text: Callable[[], None]) -> None:
        """Print the document if JSON was asked for; else let ``text`` print, unless silence was asked for."""
        if self.json:
            print(json.dumps(_strict(document), indent=2, allow_nan=False, default=str))
        elif not self.quiet:
            text()

    def note(self, text: str) -> None:
        """Tell a person, on stderr, what they should know before something goes on."""
        if not self.quiet:
            print(printable(text), file=sys.stderr)

    @contextmanager
    def meter(self, doing: str) -> Iterator[Callable[[int, int], None] | None]:
        """Lend a callback that takes (bytes done, bytes in all) and draws them; None where nobody looks."""
        if not self.progress or self.quiet or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), Speed())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(printable(doing), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


DEFAULT = Output()


def _strict(value: Any) -> Any:
    """Return plain values as JSON allows them: it has no infinity and no NaN, which become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
