"""Silences torch where it saves and loads without a process group."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    # Torch warns about the missing process group, about a checkpoint that it replaces, and that its loader executes
    # pickles.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled|Detected an existing checkpoint")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
