"""Any request of a call fails, in any way: what the store holds is whole, and the caller hears of it, in time."""

import logging
from typing import Any
from unittest import TestCase

import pytest

from faults.stores.buckets import Bucket, cases_of, every_sixth, requests_of, sampled, sweep
from faults.stores.calls import CALLS
from store_servers import ACTIONS, SECRET

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("name", CALLS)]


def test_a_request_fails(bucket: Bucket, name: str, record_property: Any) -> None:
    cases = sampled(cases_of(requests_of(bucket, CALLS[name])), [*CALLS].index(name))
    with TestCase().assertLogs(level="DEBUG") as logged:
        logging.debug("one message there has to be")
        record_property("cases", sweep(bucket, CALLS[name], cases))
    assert SECRET not in str(logged.output)


@pytest.mark.exhaustive
@pytest.mark.parametrize("action", ACTIONS)
def test_any_request_fails(bucket: Bucket, name: str, action: str, record_property: Any) -> None:
    cases = every_sixth(cases_of(requests_of(bucket, CALLS[name]), [action]), [*CALLS].index(name))
    hit = sweep(bucket, CALLS[name], cases)
    assert hit > len(cases) / 2
    record_property("cases", hit)
