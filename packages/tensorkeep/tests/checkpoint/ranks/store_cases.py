"""What ranks do in object stores; the function runs on every rank of a gloo group."""

import os
from typing import Any

from checkpoint.ranks import cases
from store_servers import JumpingClock
from tensorkeep.storage.clock import use_clock


def in_store(environment: dict[str, str], name: str, *arguments: Any) -> Any:
    """Call a function of `cases` with these environment variables and a quick clock, which no rank has from a test."""
    os.environ.update(environment)
    with use_clock(JumpingClock()):
        return getattr(cases, name)(*arguments)
