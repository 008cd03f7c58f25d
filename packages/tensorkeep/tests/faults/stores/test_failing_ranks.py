"""Any request of a save by two ranks fails, in any way: both hear of it, and the old or the new checkpoint is whole."""

import os
from typing import Any

import pytest
import torch

import tensorkeep
from checkpoint.ranks import cases, store_cases
from faults.stores.buckets import Bucket, Case, cases_of, every_sixth, requests_of, sweep
from ranks import outcomes
from store_servers import ACTIONS, environment_of
from tiers import exhaustive

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


class RanksSave:
    """A save by two ranks in place of another checkpoint."""

    def prepare(self, url: str) -> None:
        tensorkeep.save({"old": torch.ones(3)}, url)

    def run(self, url: str) -> None:
        environment = {name: os.environ[name] for name in environment_of("")}
        found = outcomes(2, store_cases.in_store, environment, "save", url, "rows", {"overwrite": True})
        assert not any(each.hung or each.exit_code is not None for each in found), found
        failed = [each for each in found if not each.returned]
        if failed:
            assert len(failed) == len(found), "a rank does not hear that the save has failed"
            assert any(each.error == "StoreError" for each in failed)
            assert any(url in each.message for each in failed)
            raise tensorkeep.StoreError(failed[0].trace, path=url, remedy="see the ranks")

    def check(self, url: str, *, returned: bool) -> str:
        found = tensorkeep.load(url)
        if "old" in found:
            assert not returned
            assert found["old"].tolist() == [1, 1, 1]
            return "old"
        assert cases.equal(found, cases.full_state())
        return "new"


@pytest.mark.parametrize("action", [None, *exhaustive(*ACTIONS)])
def test_any_request_fails(bucket: Bucket, action: str | None, record_property: Any) -> None:
    call = RanksSave()
    requests = requests_of(bucket, call)
    if action is None:
        chosen = [Case("503", often, len(requests) // 2) for often in ("once", "for ever")]
    else:
        chosen = every_sixth(cases_of(requests, [action]), ACTIONS.index(action))
    record_property("cases", sweep(bucket, call, chosen))
