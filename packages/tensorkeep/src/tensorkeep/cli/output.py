"""The options of every command, and printing by them: JSON or text, notes, progress and log messages."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tensorkeep.cli.text import columns, elided, print_lines, printable, wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

EVERYWHERE = Group("Everywhere", sort_key=100)

# Columns of a terminal: the least for the label of a progress bar, and the columns for the bar itself.
_LEAST_LABEL, _BAR_COLUMNS = 16, 28


@Parameter(name="*", group=EVERYWHERE, negative="", show_default=False)
@dataclass(frozen=True)
class Output:
    """How a command prints."""

    json: Annotated[bool, Parameter(help="Print one JSON document to stdout, and nothing else.")] = False
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], help="Print errors only.")] = False
    verbose: Annotated[
        bool,
        Parameter(name=["--verbose", "-v"], help="Print tracebacks, and what the library logs at the level INFO."),
    ] = False
    progress: Annotated[
        bool, Parameter(negative="--no-progress", help="Draw progress bars on stderr if that is a terminal.")
    ] = True
    config: Annotated[
        str | None, Parameter(name=["--config", "-C"], help="A TOML file of options, one table per command.")
    ] = None

    def show(self, document: Mapping[str, Any], text: Callable[[], None]) -> None:
        """Print the document with ``--json``; else call ``text``, which prints, unless ``--quiet`` is set."""
        if self.json:
            print_json(document)
        elif not self.quiet:
            text()

    @property
    def shows_text(self) -> bool:
        """Whether stdout has text: neither --json nor --quiet."""
        return not (self.json or self.quiet)

    def print_lines(self, *lines: str) -> None:
        if self.shows_text:
            print_lines(*lines)
            # In a pipe, lines would otherwise appear only after a long stage.
            sys.stdout.flush()

    def paragraph(self, *sentences: str) -> None:
        """Print an empty line and sentences, wrapped at 79 columns or less."""
        width = min(79, columns())
        self.print_lines("", *(line for text in sentences for line in wrapped(printable(text), width, "   ")))

    def note(self, text: str) -> None:
        if not self.quiet:
            print(printable(text), file=sys.stderr)

    @property
    def draws_progress(self) -> bool:
        """Whether progress is drawn on stderr."""
        return self.progress and not self.quiet and sys.stderr.isatty()

    @contextmanager
    def status(self, stage: str) -> Iterator[Callable[[str], None]]:
        """Show the text of a stage on stderr while the block runs; yield a function that replaces the text."""
        if not self.draws_progress:
            yield lambda text: None
            return
        from rich.console import Console

        # Names of files in the text may have brackets, which would be markup.
        with Console(stderr=True, markup=False).status(stage) as status:
            yield lambda text: status.update(printable(text))

    @contextmanager
    def meter(self, doing: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None] | None]:
        """Yield a callback for (amount done, total amount) that draws a bar; None if no bar is drawn."""
        if not self.draws_progress:
            yield None
            return
        # Only here, because the storage imports numpy.
        from tensorkeep.checkpoint.options import progress_bar

        # The bar would vanish behind a long name.
        label = elided(printable(doing), max(_LEAST_LABEL, columns() - _BAR_COLUMNS))
        with progress_bar(label, of_bytes=of_bytes) as callback:
            yield callback

    @contextmanager
    def counter(self) -> Iterator["Counter"]:
        """Yield a bar that counts steps; it draws nothing where `draws_progress` is false."""
        from rich.console import Console

        # Without a thread that refreshes: it would take time from what is measured.
        with counter(Console(stderr=True, quiet=not self.draws_progress), auto_refresh=False) as shown:
            yield shown


DEFAULT = Output()


class Counter:
    """A bar on a terminal that counts steps; lines are printed above it."""

    def __init__(self, bar: "Bar", task: "TaskID", *, refresh: bool) -> None:
        self._bar, self._task, self._refresh = bar, task, refresh

    def update(self, text: str, *, completed: int | None = None, total: int | None = None) -> None:
        """Show a text and counts; None leaves a count as it is."""
        text = printable(text)
        self._bar.update(self._task, description=text, completed=completed, total=total, refresh=self._refresh)

    def print(self, line: str) -> None:
        # Without markup and highlighting: samples of text and error messages may contain brackets.
        self._bar.console.print(line, markup=False, highlight=False)


@contextmanager
def counter(
    console: "Console", *, total: int | None = None, done: int = 0, auto_refresh: bool = True
) -> Iterator[Counter]:
    """Draw a bar on a console while the block runs, and remove it at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    text = TextColumn("{task.description}", markup=False)
    # The text last, because its length changes.
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text
    with Bar(*columns, console=console, transient=True, auto_refresh=auto_refresh) as bar:
        yield Counter(bar, bar.add_task("", total=total, completed=done), refresh=not auto_refresh)


def print_json(document: Mapping[str, Any]) -> None:
    import json  # only here, because `tensorkeep --help` does without it

    # `default=str` is for paths and dtypes.
    print(json.dumps(_strict(document), indent=2, allow_nan=False, default=str))


def _strict(value: Any) -> Any:
    # JSON has neither NaN nor infinity, and strict parsers refuse what Python writes for them.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


# Each package logs under its own name.
LOGGERS = ("tensorkeep", "tensorkeep_formats", "chatgot", "tensorkeep_bench")


@contextmanager
def logging_to_stderr(output: Output) -> Iterator[None]:
    """Print log records of our packages: warnings; with ``-v`` the level INFO as well; with ``-q`` errors only."""
    import logging

    class LogLine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # One line: a message may contain a name with a line end.
            print(printable(f"{record.levelname.lower()}: {record.getMessage()}"), file=sys.stderr)

    # Only while the command runs: tests and programs call `main` several times in a process.
    logs, handler = [logging.getLogger(name) for name in LOGGERS], LogLine()
    # A program that calls `main` may have set its own levels.
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.INFO if output.verbose else logging.ERROR if output.quiet else logging.WARNING)
        log.addHandler(handler)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.removeHandler(handler)
            log.setLevel(level)
