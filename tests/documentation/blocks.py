"""The blocks of a page of the documentation, and the commands in them."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "packages"
SITE_ONLY = {"docs/reference/api", "docs/reference/commands"}
"""Folders of the pages that ``make docs`` writes."""
COMMANDS = {"console", "sh", "bash"}
PYTHON = {"python", "py"}
"""A page of `python` runs as it is; blocks of `py` are parts of a program of the reader."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"# not run by the tests: (\S.*)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int
    reason_not_to_run: str | None
    """Why the tests do not run it: a comment in its first line, which readers see as well."""


@dataclass
class Command:
    """A command of a block, and the lines that its reader types while it runs."""

    text: str
    typed: list[str] = field(default_factory=list)


def pages() -> list[Path]:
    """Return the pages that are written by hand, or generated and committed."""
    found = [ROOT / "README.md", *PACKAGES.glob("*/README.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(page for page in found if str(page.parent.relative_to(ROOT)) not in SITE_ONLY)


def extras_of(package: str) -> set[str]:
    """Return the extras of a package in ``packages/``."""
    project = tomllib.loads((PACKAGES / package / "pyproject.toml").read_text())["project"]
    return set(project.get("optional-dependencies", ()))


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page that do not lie within a list."""
    text = page.read_text()
    made = []
    for found in _FENCE.finditer(text):
        reason = _NOT_RUN.fullmatch(found[2].partition("\n")[0])
        line = text.count("\n", 0, found.start()) + 2
        made.append(Block(found[1], found[2], line, reason and reason[1]))
    return made


def commands(block: Block) -> list[Command]:
    """Return the commands of a block: in a ``console`` the lines after ``$``, with what is typed after ``>``."""
    if block.language != "console":
        return [Command(line) for line in block.text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: list[Command] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:]))
        elif line.startswith("> "):
            found[-1].typed.append(line[2:])
    return found


def runnable(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that are run: Python and commands, without those that say why they are not."""
    for block in blocks(page):
        if block.language in PYTHON | COMMANDS and not block.reason_not_to_run:
            yield block
