"""The ranks that other tests call: values, errors, processes that end or hang, and calls afterwards."""

import os
import signal
import time

import pytest
import torch
from torch import distributed as dist

from ranks import outcomes, run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


def sums(value: int) -> tuple[int, float]:
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def disturbed(how: str) -> int:
    if dist.get_rank() == 1:
        if how == "fails":
            raise ValueError("on purpose")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    if how == "is killed":
        dist.barrier()
    return dist.get_rank()


def test_the_outcome_of_each_rank_is_reported_and_the_next_call_succeeds() -> None:
    assert run_ranks(3, sums, 1) == [(0, 6.0), (1, 6.0), (2, 6.0)]
    found = outcomes(2, disturbed, "fails")
    assert (found[0].value, found[1].error, found[1].message) == (0, "ValueError", "on purpose")
    found = outcomes(2, disturbed, "is killed")
    assert found[0].error is not None and found[1].exit_code == -signal.SIGKILL
    assert run_ranks(2, sums, 0) == [(0, 1.0), (1, 1.0)]  # by another process in place of the killed one


@pytest.mark.exhaustive
def test_a_rank_that_hangs_is_killed_and_the_next_call_succeeds() -> None:
    run_ranks(2, sums, 0)  # the processes have started then
    found = outcomes(2, disturbed, "hangs", seconds=30)
    assert [each.hung for each in found] == [False, True]
    assert run_ranks(2, sums, 0) == [(0, 1.0), (1, 1.0)]
