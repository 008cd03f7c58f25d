"""The process that ranks are forks of, which all these tests share."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from faults.ranks.forks import ForkedRanks


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkedRanks]:
    with closing(ForkedRanks()) as started:
        yield started
