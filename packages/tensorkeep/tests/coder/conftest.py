"""Tests of the C coder: with each kind of instructions that the processor has."""

from collections.abc import Iterator
from typing import Any

import pytest

from tensorkeep.codecs import coder


@pytest.fixture
def extension() -> Any:
    """Return the extension module, with the best instructions; the test is skipped without it."""
    if coder.compiled is None:
        pytest.skip("the extension is not built, or TENSORKEEP_CODER=python is set")
    return coder.compiled


@pytest.fixture(params=["avx512", "avx2", "plain"])
def compiled(extension: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return the extension module, with one kind of instructions after the other."""
    if request.param not in extension.kinds:
        pytest.skip(f"this processor has no {request.param}")
    extension.use(request.param)
    yield extension
    extension.use(extension.kinds[-1])


@pytest.fixture
def share(compiled: Any, request: pytest.FixtureRequest) -> tuple[int, int]:
    """Return which share of its cases a test tries with the instructions in use, and of how many shares."""
    return compiled.kinds.index(request.node.callspec.params["compiled"]), len(compiled.kinds)
