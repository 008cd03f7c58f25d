"""Fixtures of the tests of all techniques."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatgot.testing import prepared_text
from techniques.several_processes import ProcessPool


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a text, once for all tests."""
    return prepared_text(tmp_path_factory.getbasetemp() / "technique-suite")


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Start two processes, once for all tests."""
    with ProcessPool(2, tmp_path_factory.mktemp("two-processes")) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Start four processes, once for all tests."""
    with ProcessPool(4, tmp_path_factory.mktemp("four-processes")) as pool:
        yield pool
