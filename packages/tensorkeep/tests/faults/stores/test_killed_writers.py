"""A process that writes to a store is killed at any request: what is there is whole, and the next attempt succeeds."""

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fault_cases import Choose
from faults.stores.buckets import Bucket, requests_of
from faults.stores.calls import WRITES, run_in_process
from forked import ended, start
from store_servers import FaultAt
from tiers import exhaustive

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]

SAMPLED = [("replacement", "kill after"), ("incremental", "kill")]
OTHERS = {*product(WRITES, ("kill", "kill after"))} - {*SAMPLED}


@pytest.mark.parametrize(("name", "action"), [*SAMPLED, *exhaustive(*sorted(OTHERS))])
def test_killed_at_any_request(
    tmp_path: Path, bucket: Bucket, name: str, action: str, choose: Choose, record_property: Any
) -> None:
    call = WRITES[name]
    found = []
    for number in choose(len(requests_of(bucket, call))):
        url = f"{bucket.url}/{number}/ckpt"
        call.prepare(url)
        bucket.proxy.start_again(FaultAt(action, number, 1))
        environment = bucket.environment(disturbed=True)
        process = start(run_in_process, name, url, environment, output=tmp_path / "output")
        bucket.proxy.client.put(process.pid)
        if ended(process) == 0:
            continue  # this time it had fewer requests
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "output").read_text()
        found.append(call.check(url, returned=False))
        call.run(url)
        assert call.check(url, returned=True) == "new"
        bucket.clear()
    # The last request may follow the commit, or be the commit.
    assert found[0] == "old" or found[0] == "nothing"
    assert found[-1] == "new" or action == "kill"
    record_property("cases", len(found))
