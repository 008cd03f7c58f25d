"""Any request of a call fails, in any way: what the store holds is whole, and the caller hears of it, in time."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from faults.stores.buckets import ACTIONS, Bucket, Call, cases_of, every_sixth, requests_of, sampled, sweep
from faults.stores.calls import READS, RUNS, SAVES
from store_servers import SECRET


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", metafunc.cls.calls)


class FailingRequests:
    """Tests of some calls. Classes run in parallel."""

    calls: ClassVar[Mapping[str, Call]]

    def test_a_request_fails(
        self, bucket: Bucket, name: str, record_property: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("DEBUG")
        cases = sampled(cases_of(requests_of(bucket, self.calls[name])), [*self.calls].index(name))
        record_property("cases", sweep(bucket, self.calls[name], cases))
        assert SECRET not in caplog.text

    @pytest.mark.slow
    @pytest.mark.parametrize("action", ACTIONS)
    def test_any_request_fails(self, bucket: Bucket, name: str, action: str, record_property: Any) -> None:
        cases = every_sixth(cases_of(requests_of(bucket, self.calls[name]), [action]), [*self.calls].index(name))
        hit = sweep(bucket, self.calls[name], cases)
        assert hit > len(cases) / 2
        record_property("cases", hit)


class TestSaves(FailingRequests):
    calls = SAVES


class TestRuns(FailingRequests):
    calls = RUNS


class TestReads(FailingRequests):
    calls = READS
