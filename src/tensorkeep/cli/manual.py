"""The manual page in roff: the help of each command, formatted as a section; see man(7)."""

from collections.abc import Callable, Iterable, Sequence

from cyclopts import App

from tensorkeep.cli.described import DescribedOption, described
from tensorkeep.cli.examples import EXAMPLES
from tensorkeep.cli.output import EVERYWHERE
from tensorkeep.version import __version__


def manual_page(build_app: Callable[[], App], commands: Sequence[str], epilogue: str) -> str:
    """Return the manual page of the program."""
    app, lines = build_app(), _Lines()
    summary = str(app.help).rstrip(".")
    lines.raw(f'.TH TENSORKEEP 1 "" "tensorkeep {__version__}" "User Commands"', ".nh", ".ad l", ".SH NAME")
    lines.text(f"tensorkeep - {summary[:1].lower()}{summary[1:]}")
    lines.raw(".SH SYNOPSIS", ".B tensorkeep", r"\fICOMMAND\fR [\fIOPTIONS\fR]", ".SH COMMANDS")
    shared: list[DescribedOption] = []
    for command in commands:
        found = described(app, command)
        shared = found.panels.pop(EVERYWHERE.name)
        lines.raw(f'.SS "{command}"', ".PP", rf"\fB{escaped(found.usage)}\fR", ".PP")
        lines.text(found.description)
        for options in found.panels.values():
            _options(options, lines)
        _examples(command, lines)
    lines.raw('.SH "OPTIONS OF EVERY COMMAND"')
    _options(shared, lines)
    lines.raw('.SH "ENVIRONMENT, FILES AND EXIT STATUS"')
    for paragraph in epilogue.split("\n\n"):
        lines.text(paragraph)
        lines.raw(".PP")
    _examples("", lines)
    return lines.page()


def _options(options: Iterable[DescribedOption], lines: "_Lines") -> None:
    for option in options:
        lines.raw(".TP", rf"\fB{escaped(', '.join(option.names))}\fR")
        lines.text(option.text)


def _examples(command: str, lines: "_Lines") -> None:
    lines.raw(".PP", "Examples:" if command else ".SH EXAMPLES", ".PP", ".EX")
    for example in EXAMPLES[command]:
        lines.text(f"    {example}")
    lines.raw(".EE")


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
