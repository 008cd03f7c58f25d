"""What the fixtures return that call the command line in this process, and what a bench has written."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tensorkeep.cli.main import main


class Shown(NamedTuple):
    out: str
    err: str


def results(folder: Path) -> dict[str, Any]:
    """Return the results that a bench has written."""
    return json.loads((folder / "results.json").read_text())


def run_on_terminal(terminal: str, words: list[str], environment: dict[str, str]) -> None:
    """Run a command on a pseudo-terminal; the body of a process of its own."""
    os.setsid()
    # A terminal that the leader of a session opens controls the session, to which it sends SIGHUP.
    device = os.open(terminal, os.O_RDWR)
    for standard in range(3):
        os.dup2(device, standard)
    os.environ.update(environment)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.exit(main(words))


Call = Callable[..., Shown]
RunJson = Callable[..., Any]
