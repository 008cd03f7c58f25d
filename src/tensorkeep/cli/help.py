"""The text of ``--help``: the docstring of the command, wrapped to the terminal."""

import inspect
from typing import TYPE_CHECKING

from cyclopts import App
from cyclopts.help.formatters import DefaultFormatter

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions


def describe_fully(app: App) -> None:
    """Give a command all text of its docstring before the parameters; the list of commands has its first line only."""
    if app.default_command is not None:
        text = inspect.cleandoc(app.default_command.__doc__ or "").partition("\nParameters\n")[0]
        app.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


class Formatter(DefaultFormatter):
    """Prints the panels of cyclopts, whose descriptions keep the line ends of the docstring, with these removed."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        from rich.text import Text

        for entry in panel.entries:
            text = getattr(entry.description, "primary_renderable", None)
            if isinstance(text, Text):
                text.plain = " ".join(text.plain.split())
        super().__call__(console, options, panel)
