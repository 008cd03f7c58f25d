"""The manual page in roff: the help of each command, formatted as a section; see man(7)."""

import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cyclopts import App
from cyclopts.help import HelpPanel
from rich.console import Console, ConsoleOptions

from tensorkeep.cli.examples import EXAMPLES
from tensorkeep.cli.help import describe_fully
from tensorkeep.cli.output import EVERYWHERE
from tensorkeep.version import __version__

_UNWRAPPED = 1 << 16
"""A width at which no line of help is wrapped: man wraps the text."""


def manual_page(build_app: Callable[[], App], commands: Sequence[str], groups: Collection[str], epilogue: str) -> str:
    """Return the manual page of the program."""
    app, lines = build_app(), _Lines()
    app.help_formatter = _Formatter(lines)
    summary = str(app.help).rstrip(".")
    lines.raw(f'.TH TENSORKEEP 1 "" "tensorkeep {__version__}" "User Commands"', ".nh", ".ad l", ".SH NAME")
    lines.text(f"tensorkeep - {summary[:1].lower()}{summary[1:]}")
    lines.raw(".SH SYNOPSIS", ".B tensorkeep", r"\fICOMMAND\fR [\fIOPTIONS\fR]", ".SH COMMANDS")
    for command in commands:
        _help_of(app, command, lines)
    lines.raw('.SH "OPTIONS OF EVERY COMMAND"')
    app.help_formatter = _Formatter(lines, shared=True)
    app.help_print(commands[0].split(), console=_nowhere())
    lines.raw('.SH "ENVIRONMENT, FILES AND EXIT STATUS"')
    for paragraph in epilogue.split("\n\n"):
        lines.text(paragraph)
        lines.raw(".PP")
    _examples("", lines)
    return lines.page()


def _help_of(app: App, command: str, lines: "_Lines") -> None:
    lines.raw(f'.SS "{command}"')
    describe_fully(app.parse_commands(command.split())[1][-1])
    app.help_print(command.split(), console=_nowhere())
    _examples(command, lines)


def _examples(command: str, lines: "_Lines") -> None:
    lines.raw(".PP", "Examples:" if command else ".SH EXAMPLES", ".PP", ".EX")
    for example in EXAMPLES[command]:
        lines.text(f"    {example}")
    lines.raw(".EE")


def _nowhere() -> Console:
    return Console(file=io.StringIO(), width=_UNWRAPPED)


def _plain(console: Console, text: Any) -> str:
    """Return a text of the help, which may be any object that rich prints, as plain text."""
    with console.capture() as capture:
        console.print(text, end="")
    return " ".join(capture.get().split())


class _Lines:
    """The lines of a page: roff as it is, and text with its special characters escaped."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def raw(self, *lines: str) -> None:
        self._lines += lines

    def text(self, text: str) -> None:
        self._lines.append(escaped(text))

    def page(self) -> str:
        return "\n".join(self._lines) + "\n"


def escaped(text: str) -> str:
    """Return text that roff prints as it is: hyphens that can be copied, no escapes, no requests."""
    text = (
        text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("`", r"\(ga").replace("^", r"\(ha")
    )
    text = text.replace("~", r"\(ti")
    return rf"\&{text}" if text.startswith((".", r"\(aq")) else text


class _Formatter:
    """Writes the help of a command as roff; cyclopts calls it with each part."""

    def __init__(self, lines: _Lines, *, shared: bool = False) -> None:
        self._lines = lines
        self._shared = shared

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        if not self._shared:
            self._lines.raw(".PP", rf"\fB{escaped(_plain(console, usage).removeprefix('Usage: '))}\fR")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        if not self._shared:
            self._lines.raw(".PP")
            self._lines.text(_plain(console, description))

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if (_plain(console, panel.title) == EVERYWHERE.name) != self._shared:
            return
        for entry in panel.entries:
            remarks = ["Required."] if entry.required else []
            if entry.choices:
                remarks.append(f"One of {', '.join(entry.choices)}.")
            if entry.default is not None:
                remarks.append(f"Default: {entry.default}.")
            self._lines.raw(".TP", rf"\fB{escaped(', '.join(entry.display_labels_with_metavar))}\fR")
            self._lines.text(" ".join([_plain(console, entry.description), *remarks]))
