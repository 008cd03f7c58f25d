"""What the ranks of `test_stores` do; each function runs on every rank of a gloo group."""

import os
from typing import Any

from checkpoint.ranks import cases


def in_store(environment: dict[str, str], name: str, *arguments: Any) -> Any:
    """Call a function of `cases` with these environment variables, which a rank does not have from the test."""
    os.environ.update(environment)
    return getattr(cases, name)(*arguments)
