"""The generated pages of the site: one for each public name, one for each command; and the contents of the start page.

``docs/reference/api.md`` lists the public names, ``docs/reference/errors.md`` describes each error under a heading, and
``docs/index.md`` links to every page. All three are read on the repository's website as they are. The site adds links,
docstrings and the contents of its sidebar to them.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from cyclopts import App
from sphinx.application import Sphinx

import tensorkeep
from tensorkeep.cli.commands import COMMANDS, EXAMPLES
from tensorkeep.cli.help import DescribedOption, described
from tensorkeep.cli.main import build_app
from tensorkeep.cli.output import EVERYWHERE

API, COMMAND_LINE, ERRORS = "reference/api", "reference/commands", "reference/errors"
"""The hand-written pages that are completed here; the generated ones are in folders of the same name."""

TITLES = {"Parameters": "Options"}
"""Panels of the help that have another title on the site."""

_ENTRY = re.compile(r"^\* (`[\w.]+`(?:,\s+`[\w.]+`)*)$", re.MULTILINE)
_SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
_ERROR = re.compile(r"^## (\w+)\n", re.MULTILINE)


def listed_names(api: str) -> list[list[str]]:
    """Return the public names that the page lists; those of one entry share a page."""
    return [re.findall(r"`([\w.]+)`", entry) for entry in _ENTRY.findall(api)]


def listed_errors(errors: str) -> list[str]:
    """Return the errors that the page describes, each under a heading."""
    return [name for name in _ERROR.findall(errors) if hasattr(tensorkeep, name)]


def resolved(name: str) -> object:
    """Return what a dotted name stands for: a module, or what a module has under that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def members(name: str) -> list[str]:
    """Return the documented names that a name stands for: those that a module exports, or itself."""
    found = resolved(name)
    return [f"{name}.{each}" for each in found.__all__] if inspect.ismodule(found) else [name]


def write_pages(app: Sphinx) -> None:
    """Write the pages of names and commands; a page that stays the same keeps its time."""
    pages = {f"{API}/{names[0]}.rst": api_page(names) for names in listed_names(_text(app, API))}
    application = build_app()
    for command in COMMANDS:
        pages[f"{COMMAND_LINE}/{_file_name(command)}.rst"] = command_page(application, command)
    for folder in (API, COMMAND_LINE):
        Path(app.srcdir, folder).mkdir(exist_ok=True)
        for stale in Path(app.srcdir, folder).glob("*.rst"):
            if f"{folder}/{stale.name}" not in pages:
                stale.unlink()
    for name, text in pages.items():
        path = Path(app.srcdir, name)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def complete_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Add to a hand-written page what only the site has."""
    completions: dict[str, Callable[[str], str]] = {
        "index": with_contents,
        API: with_links,
        COMMAND_LINE: with_commands,
        ERRORS: with_docstrings,
    }
    if name in completions:
        source[0] = completions[name](source[0])


def with_contents(index: str) -> str:
    """Return the start page with the contents of the sidebar: a list of the pages that each section links to."""
    sections = _SECTION.split(index)[1:]
    bodies = dict(zip(sections[::2], sections[1::2], strict=True))
    linked = {title: re.findall(r"\]\(([\w/-]+)\.md\)", body) for title, body in bodies.items()}
    return index + "".join(_contents(title, pages) for title, pages in linked.items() if pages)


def with_links(api: str) -> str:
    """Return the list of names with a link and a summary for each, and with the contents of the sidebar."""

    def entry(match: re.Match[str]) -> str:
        names = re.findall(r"`([\w.]+)`", match[1])
        links = ", ".join(f"[`{name}`](api/{names[0]}.rst)" for name in names)
        return f"* {links}: {_summary(names[0])}"

    pages = [f"api/{names[0]}" for names in listed_names(api)]
    return _ENTRY.sub(entry, api) + _contents("", pages)


def with_commands(page: str) -> str:
    """Return the page of the command line with a link and a summary for each command."""
    links = [
        f"* [`tensorkeep {name}`](commands/{_file_name(name)}.rst): {command.summary}"
        for name, command in COMMANDS.items()
    ]
    text = "\n".join([page, "## Commands", "", *links, "", "## Options of every command", "", "```{eval-rst}"])
    shared = described(build_app(), next(iter(COMMANDS))).panels[EVERYWHERE.name]
    text += "\n" + "\n".join(_options(shared)) + "\n```\n"
    return text + _contents("", [f"commands/{_file_name(name)}" for name in COMMANDS])


def with_docstrings(errors: str) -> str:
    """Return the page of errors with the docstring of each below its heading."""
    directive = "## {0}\n\n```{{eval-rst}}\n.. autoexception:: tensorkeep.{0}\n   :members:\n```\n"
    return _ERROR.sub(lambda match: directive.format(match[1]) if hasattr(tensorkeep, match[1]) else match[0], errors)


def api_page(names: list[str]) -> str:
    """Return the page of public names."""
    lines = [names[0], "=" * len(names[0]), ""]
    for name in names:
        found = resolved(name)
        if inspect.ismodule(found):
            lines += [f".. automodule:: {name}", ""]
        for each in members(name):
            lines += _directive(each)
    return "\n".join(lines)


def command_page(application: App, command: str) -> str:
    """Return the page of a command: its usage, description, options and examples."""
    title, found = f"tensorkeep {command}", described(application, command)
    lines = [title, "=" * len(title), "", f".. program:: {title}", "", *_code([found.usage])]
    lines += [_escaped(found.description), ""]
    for panel, options in found.panels.items():
        if panel != EVERYWHERE.name:
            title = TITLES.get(panel, panel)
            lines += [title, "-" * len(title), "", *_options(options)]
    lines += ["Every command also takes `these options <../commands.html#options-of-every-command>`__.", ""]
    lines += ["Examples", "--------", "", *_code(f"$ {example}" for example in EXAMPLES[command])]
    return "\n".join(lines)


def _options(options: Iterable[DescribedOption]) -> list[str]:
    lines = []
    for option in options:
        lines += [f".. option:: {', '.join(option.names)}", "", f"   {_escaped(option.text)}", ""]
    return lines


def _directive(name: str) -> list[str]:
    found = resolved(name)
    if not inspect.isclass(found):
        kind = "function" if callable(found) else "data"
        return [f".. auto{kind}:: {name}", ""]
    kind = "exception" if issubclass(found, BaseException) else "class"
    return [f".. auto{kind}:: {name}", "   :members:", "   :special-members: __getitem__", ""]


def _code(lines: Iterable[str]) -> list[str]:
    return [".. code-block:: console", "", *(f"   {line}" for line in lines), ""]


def _contents(title: str, pages: Iterable[str]) -> str:
    caption = f":caption: {title}\n" if title else ""
    return "\n\n```{toctree}\n:hidden:\n" + caption + "\n" + "\n".join(pages) + "\n```\n"


def _summary(name: str) -> str:
    """Return the first sentence of a docstring as Markdown."""
    paragraph = " ".join((inspect.getdoc(resolved(name)) or "").split("\n\n")[0].split())
    return paragraph.replace("``", "`")


def _escaped(text: str) -> str:
    """Return text of the help in reStructuredText: what is in backticks as code, and no other markup."""
    parts = text.split("`")
    plain = [re.sub(r"([\\*|_<>@])", r"\\\1", part) for part in parts[::2]]
    code = [f"``{part}``" for part in parts[1::2]]
    return "".join(piece for pair in zip(plain, [*code, ""], strict=False) for piece in pair)


def _file_name(command: str) -> str:
    return command.replace(" ", "-")


def _text(app: Sphinx, page: str) -> str:
    return Path(app.srcdir, f"{page}.md").read_text()
