"""Tests of the C coder: with the best instructions of the processor, and with those that every processor has."""

from collections.abc import Iterator
from typing import Any

import pytest

from tensorkeep.codecs import coder


@pytest.fixture(params=["best", "plain"])
def compiled(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the extension module; the test is skipped without it."""
    if coder.compiled is None:
        pytest.skip("the extension is not built, or TENSORKEEP_CODER=python is set")
    coder.compiled.use_plain(request.param == "plain")
    yield coder.compiled
    coder.compiled.use_plain(False)
