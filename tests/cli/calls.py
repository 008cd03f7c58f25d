"""What the fixtures return that call the command line in this process, and what a bench has written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Shown(NamedTuple):
    out: str
    err: str


def results(folder: Path) -> dict[str, Any]:
    """Return the results that a bench has written."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


Call = Callable[..., Shown]
RunJson = Callable[..., Any]
