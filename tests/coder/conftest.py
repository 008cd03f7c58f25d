"""Tests of the C coder: with each kind of instructions that the processor has."""

from collections.abc import Iterator
from typing import Any

import pytest

from tensorkeep.codecs import coder


@pytest.fixture(params=["avx512", "avx2", "plain"])
def compiled(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the extension module; the test is skipped without it."""
    if coder.compiled is None:
        pytest.skip("the extension is not built, or TENSORKEEP_CODER=python is set")
    if request.param not in coder.compiled.kinds:
        pytest.skip(f"this processor has no {request.param}")
    coder.compiled.use(request.param)
    yield coder.compiled
    coder.compiled.use(coder.compiled.kinds[-1])
