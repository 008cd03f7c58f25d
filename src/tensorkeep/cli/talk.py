"""Saying what happens, stage by stage: how the demos talk."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tensorkeep.cli.output import Output
from tensorkeep.cli.text import printable


class Talk:
    """Says what happens: text as it comes, unless JSON or silence was asked for; the present stage on stderr."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def say(self, text: Callable[[], None]) -> None:
        if not (self._output.json or self._output.quiet):
            text()
            sys.stdout.flush()

    @contextmanager
    def busy(self, stage: str) -> Iterator[Callable[[str], None]]:
        if not self._output.progress or self._output.quiet or not sys.stderr.isatty():
            yield lambda text: None
            return
        from rich.console import Console

        with Console(stderr=True, markup=False).status(stage) as status:
            yield status.update


def say(text: str) -> None:
    """Print a sentence or two so that a terminal of 80 columns breaks no word; names and paths stay whole."""
    print(textwrap.fill(printable(text), 79, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False))
