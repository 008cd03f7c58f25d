"""The options that every command takes; JSON, text, progress and log messages follow them."""

import io
import json
import logging
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from tensorkeep.checkpoint.progress import progress_bar
from tensorkeep.cli.text import columns, elided, print_lines, printable

EVERYWHERE = Group("Everywhere", sort_key=100)

_LEAST_LABEL, _BAR_COLUMNS = 16, 28
"""Columns of a terminal that the name of a progress bar always has, and those that it leaves to the bar."""


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
        """Print the document as JSON with ``--json``; else call ``text``, which prints, unless ``--quiet`` is set."""
        if self.json:
            print(json.dumps(_strict(document), indent=2, allow_nan=False, default=str))
        elif not self.quiet:
            text()

    @property
    def shows_text(self) -> bool:
        """Whether text is printed on stdout: neither --json nor --quiet is given."""
        return not (self.json or self.quiet)

    def print_lines(self, *lines: str) -> None:
        """Print lines at once, so that they appear before a long stage begins."""
        if self.shows_text:
            print_lines(*lines)
            sys.stdout.flush()

    def paragraph(self, *sentences: str) -> None:
        """Print an empty line and some texts, wrapped at 79 columns or less; names and paths are never broken."""
        wrapper = textwrap.TextWrapper(
            min(79, columns()), subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
        )
        self.print_lines("", *(line for text in sentences for line in wrapper.wrap(printable(text))))

    def note(self, text: str) -> None:
        """Print a note on stderr."""
        if not self.quiet:
            print(printable(text), file=sys.stderr)

    @property
    def draws_progress(self) -> bool:
        """Whether progress is drawn: stderr is a terminal, and neither --no-progress nor --quiet is given."""
        return self.progress and not self.quiet and sys.stderr.isatty()

    @contextmanager
    def status(self, stage: str) -> Iterator[Callable[[str], None]]:
        """Show a stage on stderr while the block runs; yield a callback that takes the text of the next stage."""
        if not self.draws_progress:
            yield lambda text: None
            return
        from rich.console import Console

        with Console(stderr=True, markup=False).status(stage) as status:
            yield lambda text: status.update(printable(text))

    @contextmanager
    def meter(self, doing: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None] | None]:
        """Yield a callback that takes (bytes or others done, in all) and draws a bar, or None for no bar."""
        if not self.draws_progress:
            yield None
            return
        label = elided(printable(doing), max(_LEAST_LABEL, columns() - _BAR_COLUMNS))
        with progress_bar(label, of_bytes=of_bytes) as callback:
            yield callback


DEFAULT = Output()


def _strict(value: Any) -> Any:
    """Return plain values with NaN and infinity, which JSON does not have, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value


class _LogLine(logging.Handler):
    """Prints log records on stderr, a line each, without anything that could control the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        print(printable(f"{record.levelname.lower()}: {record.getMessage()}"), file=sys.stderr)


@contextmanager
def logging_to_stderr(output: Output) -> Iterator[None]:
    """Print the log records of the library: warnings, with ``-v`` also INFO, with ``-q`` errors only."""
    log, handler = logging.getLogger("tensorkeep"), _LogLine()
    level = log.level
    log.setLevel(logging.INFO if output.verbose else logging.ERROR if output.quiet else logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def make_streams_safe() -> None:
    """Make printing possible when streams are closed, and escape characters outside of their encoding."""
    for name in ("stdin", "stdout", "stderr"):
        # A stream that the caller closed: its file descriptor would go to the next file that is opened.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def finish_stdout() -> OSError | None:
    """Flush stdout and return the error if that fails.

    After an error stdout is redirected to nowhere: the interpreter flushes it again at exit and would print the error.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return error
    return None
