"""``tensorkeep train --list-techniques``: the techniques and their support on this machine."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import msgspec

from tensorkeep.cli.output import Output
from tensorkeep.cli.text import Table, printable
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.train.config.config import TECHNIQUES
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.techniques.base import TECHNIQUE_CLASSES
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import COMBINATIONS, expanded

_INDENT = "    "


def names_in(text: str | None) -> list[str]:
    """Return the techniques that ``--technique`` names, with combinations expanded.

    Parameters
    ----------
    text : str or None
        Names separated by commas; None if the option is not given.

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


@dataclass(frozen=True, slots=True)
class Listed:
    """A technique in the list.

    Attributes
    ----------
    name, kind, summary, effect, reference : str
        The declarations of the technique.
    settings : dict of str to object
        The settings with their defaults.
    lacks : str or None
        What this machine lacks; None if the technique can run here with its defaults.
    """

    name: str
    kind: str
    summary: str
    effect: str
    reference: str
    settings: dict[str, object]
    lacks: str | None


def list_techniques(output: Output, device: str) -> int:
    """Show all registered techniques and the named combinations."""
    found = list(_listed(Machine(chosen_device(device))))
    document = {"techniques": [asdict(each) for each in found], "combinations": COMBINATIONS}
    output.show(document, lambda: _print(found))
    return 0


def _listed(machine: Machine) -> Iterator[Listed]:
    for name in TECHNIQUE_CLASSES.names():
        technique = TECHNIQUE_CLASSES.get(name)
        settings = technique.Settings()
        yield Listed(
            name=name,
            kind=technique.kind,
            summary=technique.summary,
            effect=technique.effect,
            reference=technique.reference,
            settings=msgspec.to_builtins(settings),
            lacks=technique(settings).lacks(machine),
        )


def _print(found: Sequence[Listed]) -> None:
    for title, shown in (
        ("Can run here", [each for each in found if each.lacks is None]),
        ("Cannot run here", [each for each in found if each.lacks is not None]),
    ):
        if shown:
            print(f"{title}\n")
            for each in shown:
                _print_one(each)
    combinations = [(name, ", ".join(names)) for name, names in COMBINATIONS.items()]
    Table(("combination", "is"), combinations).show()


def _print_one(each: Listed) -> None:
    """Print the name of a technique, and its description indented below."""
    print(printable(f"{each.name} ({each.kind})"))
    settings = ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in each.settings.items())
    for line in (each.lacks, each.summary, f"effect: {each.effect}", settings and f"settings: {settings}"):
        if line:
            _print_indented(line)
    print()


def _print_indented(text: str) -> None:
    """Print a text indented; in a pipe on one line."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    lines = textwrap.wrap(text, max(width - len(_INDENT), 20), break_on_hyphens=False) if width else [text]
    for line in lines:
        print(printable(f"{_INDENT}{line}"))
