"""The ranks that other tests call: values, errors, processes that end or hang, and calls afterwards."""

import os
import signal
import time

import torch
from torch import distributed as dist

from ranks import outcomes, run_ranks


def sums(value: int) -> tuple[int, float]:
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fails(number: int) -> int:
    if dist.get_rank() == number:
        raise ValueError("on purpose")
    return dist.get_rank()


def killed(number: int) -> None:
    if dist.get_rank() == number:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs(number: int) -> None:
    if dist.get_rank() == number:
        time.sleep(1000)


def test_ranks_compute_together() -> None:
    assert run_ranks(3, sums, 1) == [(0, 6.0), (1, 6.0), (2, 6.0)]
    assert run_ranks(2, sums, 1) == [(0, 3.0), (1, 3.0)]


def test_the_outcome_of_each_rank_is_reported_and_the_next_call_succeeds() -> None:
    found = outcomes(2, fails, 1)
    assert (found[0].value, found[1].error, found[1].message) == (0, "ValueError", "on purpose")
    found = outcomes(2, killed, 0)
    assert found[0].exit_code == -signal.SIGKILL and found[1].error is not None
    run_ranks(2, sums, 0)  # starts a process in place of the killed one
    found = outcomes(2, hangs, 1, seconds=3)
    assert [each.hung for each in found] == [False, True]
    assert run_ranks(2, sums, 0) == [(0, 1.0), (1, 1.0)]
