"""The help of a command as data, from which the manual page and the site are written."""

import io
from dataclasses import dataclass, field
from typing import Any

from cyclopts import App
from cyclopts.help import HelpPanel
from rich.console import Console, ConsoleOptions

from tensorkeep.cli.help import describe_fully

_UNWRAPPED = 1 << 16
"""A width at which no line of help is wrapped: the reader wraps the text."""


@dataclass(frozen=True, slots=True)
class DescribedOption:
    """An option or an argument: its names with the placeholder of its value, and what it does."""

    names: tuple[str, ...]
    text: str


@dataclass(slots=True)
class DescribedCommand:
    """The help of a command: its usage, its description, and its options by the title of their panel."""

    usage: str = ""
    description: str = ""
    panels: dict[str, list[DescribedOption]] = field(default_factory=dict)


def described(app: App, command: str) -> DescribedCommand:
    """Return the help of a command of the application, whose formatter is replaced."""
    found = DescribedCommand()
    app.help_formatter = _Collector(found)
    describe_fully(app.parse_commands(command.split())[1][-1])
    app.help_print(command.split(), console=Console(file=io.StringIO(), width=_UNWRAPPED))
    return found


def _plain(console: Console, text: Any) -> str:
    """Return a text of the help, which may be any object that rich prints, as plain text."""
    with console.capture() as capture:
        console.print(text, end="")
    return " ".join(capture.get().split())


class _Collector:
    """Keeps the help of a command; cyclopts calls it with each part, as it calls a formatter."""

    def __init__(self, command: DescribedCommand) -> None:
        self._command = command

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        self._command.usage = _plain(console, usage).removeprefix("Usage: ")

    def render_description(self, console: Console, options: ConsoleOptions, description: Any) -> None:
        self._command.description = _plain(console, description)

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        shown = self._command.panels.setdefault(_plain(console, panel.title), [])
        for entry in panel.entries:
            remarks = ["Required."] if entry.required else []
            if entry.choices:
                remarks.append(f"One of {', '.join(entry.choices)}.")
            if entry.default is not None:
                remarks.append(f"Default: {entry.default}.")
            text = " ".join([_plain(console, entry.description), *remarks])
            shown.append(DescribedOption(tuple(entry.display_labels_with_metavar), text))
