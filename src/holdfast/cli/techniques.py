"""``holdfast train --list-techniques``: what can be turned on, and whether this machine has what it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import msgspec

from holdfast import plugins
from holdfast.cli.output import Output
from holdfast.cli.text import Table
from holdfast.train.device import chosen_device
from holdfast.train.techniques.base import Technique
from holdfast.train.techniques.combinations import COMBINATIONS
from holdfast.train.techniques.machine import Machine


@dataclass(frozen=True, slots=True)
class Listed:
    """A technique as it is shown.

    Attributes
    ----------
    name, kind, summary, effect, reference : str
        As the technique declares them.
    settings : dict of str to object
        Their defaults.
    lacks : str or None
        What this machine does not have; None if it can run here with its defaults.
    """

    name: str
    kind: str
    summary: str
    effect: str
    reference: str
    settings: dict[str, object]
    lacks: str | None


def list_techniques(output: Output, device: str) -> int:
    """Show every technique that is registered, and the named combinations."""
    found = list(_listed(Machine(chosen_device(device))))
    document = {"techniques": [asdict(each) for each in found], "combinations": COMBINATIONS}
    output.show(document, lambda: _print(found))
    return 0


def _listed(machine: Machine) -> Iterator[Listed]:
    for name in plugins.names("techniques"):
        technique: type[Technique] = plugins.get("techniques", name)
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


def _print(found: list[Listed]) -> None:
    rows = [(each.name, each.summary, each.effect, each.lacks or "yes") for each in found]
    Table(("technique", "what it does", "what to expect", "runs here"), rows).show()
    combinations = [(name, ", ".join(names)) for name, names in COMBINATIONS.items()]
    Table(("combination", "is"), combinations).show()
