"""``tensorkeep train --list-techniques``: the techniques and their support on this machine."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tensorkeep.cli.output import Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.train.config.config import TECHNIQUES
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES, Machine
from tensorkeep.train.techniques.stack import COMBINATIONS, expanded

_INDENT = "    "


def names_in(text: str | None) -> list[str]:
    """Return the techniques in the comma-separated names of ``--technique``, with combinations expanded.

    Raises UsageError if it contains no name; UnsupportedError if a name is neither a technique nor a combination.
    """
    if text is None:
        return []
    found = expanded(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise UsageError(f"--technique {text!r} names no technique", remedy="omit it, or give a name")
    check_names(found)
    return found


def check_names(names: Iterable[str]) -> None:
    """Raise UnsupportedError if a name is not that of a technique, even if the technique is turned off."""
    for name in names:
        if name.upper() in COMBINATIONS:
            remedy = f"did you mean the combination? --technique {name.upper()}"
            raise UnsupportedError(f"there is no technique named {name!r}", remedy=remedy)
        TECHNIQUE_CLASSES.get(name)


def names_among(settings: Iterable[str]) -> Iterator[str]:
    """Yield the names of techniques in the names of settings, such as ``techniques.compile.mode``."""
    for setting in settings:
        if setting.startswith(TECHNIQUES):
            yield setting.removeprefix(TECHNIQUES).partition(".")[0]


def list_techniques(output: Output, device: str) -> None:
    """Show all registered techniques and the named combinations."""
    found = list(_described(Machine(chosen_device(device))))
    output.show({"techniques": found, "combinations": COMBINATIONS}, lambda: _print(found))


def _described(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield what is declared of each technique, and what the machine lacks, or None if it can run there by default."""
    for name in TECHNIQUE_CLASSES.names():
        technique = TECHNIQUE_CLASSES.get(name)
        settings = technique.Settings()
        yield {
            "name": name,
            "kind": technique.kind,
            "summary": technique.summary,
            "effect": technique.effect,
            "reference": technique.reference,
            "settings": msgspec.to_builtins(settings),
            "lacks": technique(settings).missing(machine),
        }


def _print(found: Sequence[dict[str, Any]]) -> None:
    for title, shown in (
        ("Can run here", [each for each in found if each["lacks"] is None]),
        ("Cannot run here", [each for each in found if each["lacks"] is not None]),
    ):
        if shown:
            print(f"{title}\n")
            for each in shown:
                _print_one(each)
    combinations = [(name, ", ".join(names)) for name, names in COMBINATIONS.items()]
    Table(("combination", "is"), combinations).show()


def _print_one(each: dict[str, Any]) -> None:
    """Print the name of a technique, and its description indented below; in a pipe each text is one line."""
    print_lines(f"{each['name']} ({each['kind']})")
    settings = ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in each["settings"].items())
    width = max(shutil.get_terminal_size().columns - len(_INDENT), 20)
    for text in (each["lacks"], each["summary"], f"effect: {each['effect']}", settings and f"settings: {settings}"):
        if text:
            lines = textwrap.wrap(text, width, break_on_hyphens=False) if sys.stdout.isatty() else [text]
            print_lines(*(_INDENT + line for line in lines))
    print()
