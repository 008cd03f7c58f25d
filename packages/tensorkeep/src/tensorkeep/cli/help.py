"""The text of ``--help``; the same text as data, for the site; and the manual page in roff (see man(7))."""

import inspect
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cyclopts import App
from cyclopts.help.formatters import DefaultFormatter

from tensorkeep.cli.commands import EXAMPLES
from tensorkeep.cli.output import EVERYWHERE
from tensorkeep.version import __version__

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

# A width of the console at which no line is wrapped: man and the browser wrap the text.
_UNWRAPPED = 1 << 16


def show_whole_docstring(app: App) -> None:
    """Show the docstring of a command above its options, not only its first line."""
    # The summary of a lazily imported command is all that cyclopts knows of its docstring.
    if app.default_command is not None:
        # The parameters of the docstring are cyclopts' part.
        text = inspect.cleandoc(app.default_command.__doc__ or "").partition("\nParameters\n")[0]
        app.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


class Formatter(DefaultFormatter):
    """Prints cyclopts' panels without the line ends of docstrings, so that the terminal's width decides."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        from rich.text import Text

        for entry in panel.entries:
            # cyclopts wraps the text of a description together with remarks such as [default: 10].
            text = getattr(entry.description, "primary_renderable", None)
            if isinstance(text, Text):
                text.plain = " ".join(text.plain.split())
        super().__call__(console, options, panel)


class DescribedOption(NamedTuple):
    """An option or an argument; ``names`` include the placeholder of its value."""

    names: tuple[str, ...]
    text: str


class DescribedCommand:
    """A help formatter that keeps the help of a command; ``panels`` has the options by the title of a panel."""

    def __init__(self) -> None:
        self.usage = self.description = ""
        self.panels: dict[str, list[DescribedOption]] = {}

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: Any) -> None:
        self.usage = _plain(console, usage).removeprefix("Usage: ")

    def render_description(self, console: "Console", options: "ConsoleOptions", description: Any) -> None:
        self.description = _plain(console, description)

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        for entry in panel.entries:
            remarks = ["Required."] if entry.required else []
            if entry.choices:
                remarks.append(f"One of {', '.join(entry.choices)}.")
            if entry.default is not None:
                remarks.append(f"Default: {entry.default}.")
            text = " ".join([_plain(console, entry.description), *remarks])
            shown = self.panels.setdefault(_plain(console, panel.title), [])
            shown.append(DescribedOption(tuple(entry.display_labels_with_metavar), text))


def _plain(console: "Console", text: Any) -> str:
    with console.capture() as capture:
        console.print(text, end="")
    return " ".join(capture.get().split())


def described(app: App, command: str) -> DescribedCommand:
    """Return the help of a command as data. The formatter of the application is replaced."""
    from rich.console import Console

    app.help_formatter = found = DescribedCommand()
    show_whole_docstring(app.parse_commands(command.split())[1][-1])
    # cyclopts calls the formatter; nothing is printed.
    app.help_print(command.split(), console=Console(file=io.StringIO(), width=_UNWRAPPED))
    return found


def manual_page(app: App, commands: Sequence[str], epilogue: str) -> str:
    summary = str(app.help).rstrip(".")
    lines = [
        f'.TH TENSORKEEP 1 "" "tensorkeep {__version__}" "User Commands"',
        # Neither hyphenation nor justification: both would change commands and paths.
        *(".nh", ".ad l", ".SH NAME"),
        escaped(f"tensorkeep - {summary[:1].lower()}{summary[1:]}"),
        *(".SH SYNOPSIS", ".B tensorkeep", r"\fICOMMAND\fR [\fIOPTIONS\fR]", ".SH COMMANDS"),
    ]
    shared: list[DescribedOption] = []
    for command in commands:
        found = described(app, command)
        # The same for every command: shown once, at the end.
        shared = found.panels.pop(EVERYWHERE.name)
        lines += [f'.SS "{command}"', ".PP", rf"\fB{escaped(found.usage)}\fR", ".PP", escaped(found.description)]
        lines += [line for options in found.panels.values() for line in _options(options)]
        lines += _examples(command, "Examples:")
    lines += ['.SH "OPTIONS OF EVERY COMMAND"', *_options(shared), '.SH "ENVIRONMENT, FILES AND EXIT STATUS"']
    lines += [line for paragraph in epilogue.split("\n\n") for line in (escaped(paragraph), ".PP")]
    return "\n".join([*lines, *_examples("", ".SH EXAMPLES"), ""])


def _options(options: Iterable[DescribedOption]) -> list[str]:
    texts = [(".TP", rf"\fB{escaped(', '.join(names))}\fR", escaped(text)) for names, text in options]
    return [line for text in texts for line in text]


def _examples(command: str, heading: str) -> list[str]:
    examples = [escaped(f"    {example}") for example in EXAMPLES.get(command, ())]
    return [".PP", heading, ".PP", ".EX", *examples, ".EE"]


_ESCAPES = str.maketrans({"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"})


def escaped(text: str) -> str:
    """Return text that roff prints as it is, with hyphens that can be copied."""
    text = text.translate(_ESCAPES)
    # A leading dot or quote would make the line a request.
    return rf"\&{text}" if text.startswith((".", r"\(aq")) else text
