"""Tensorkeep's checkpoints in other frameworks: a module for transformers, Lightning, accelerate and torchtitan.

``import tensorkeep.integrations.lightning`` imports its framework, or raises `tensorkeep.MissingExtraError` with the
command that installs it. ``tensorkeep`` itself depends on none of the frameworks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tensorkeep.errors import MissingExtraError


@contextmanager
def requires(requirement: str) -> Iterator[None]:
    """Turn the ImportError of a missing or too old framework into a MissingExtraError."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(
            f"this integration needs {requirement} ({error})", remedy=f"pip install {requirement!r}"
        ) from error
