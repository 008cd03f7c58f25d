"""Training runs of tests begin quickly, and their tensors are counted quickly."""

import gc
from collections.abc import Iterator
from functools import cache

import pytest

from tensorkeep import machine


@pytest.fixture(autouse=True, scope="module")
def quick_record() -> Iterator[None]:
    """Let a run that begins start no git, and read the versions of packages once."""
    # A cell counts tensors among all objects. Frozen ones, of which other tests have left many, are not looked at.
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("chatgot.run.folder._git", lambda: None)
        patches.setattr(machine, "versions", cache(machine.versions))
        yield
