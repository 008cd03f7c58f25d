"""Exchanges of ranks: their order, ranks that do different things, values of all lengths, and connections.

The functions before each test run on every rank of a gloo group.
"""

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

import tensorkeep
from checkpoint.ranks import cases
from ranks import outcomes, run_ranks
from tensorkeep.ranks import group, merge
from tensorkeep.ranks.group import SaveTicket, ranks_of

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("processes")]


def several_in_flight(folder: str) -> list[str]:
    """Begin saves while the first one is being written; return those that this rank stages, in order."""
    stage = merge.GroupSaveCoordinator._stage
    staged: list[str] = []
    others_begin = threading.Event()

    def slow(self: merge.GroupSaveCoordinator) -> tuple[str, str]:
        if self._destination.name == "first":
            others_begin.wait()
        staged.append(self._destination.name)
        return stage(self)

    def state(number: int) -> dict[str, Any]:
        return cases.divided({"model": {"w": torch.full((50, 4), float(number))}}, "rows")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(merge.GroupSaveCoordinator, "_stage", slow)
        group = dist.group.WORLD
        first = tensorkeep.save_async(state(1), f"{folder}/first", group=group, timeout=100)
        manager = tensorkeep.CheckpointManager(f"{folder}/run", group=group, timeout=100)
        second = manager.save(2, state(2))
        others_begin.set()
        tensorkeep.save(state(3), f"{folder}/third", group=group, timeout=100)
        first.wait()
        second.wait()
        manager.close()
    return staged


def test_saves_of_a_group_are_written_in_the_order_in_which_they_begin(tmp_path: Path) -> None:
    assert run_ranks(2, several_in_flight, str(tmp_path)) == [["first", "step-000002", "third"], []]
    for number, path in enumerate(("first", "run@2", "third"), 1):
        assert tensorkeep.load(tmp_path / path)["model"]["w"].unique().tolist() == [number]


def boxes_remembered(path: str) -> int:
    """Save; return how many boxes this rank remembers for the next save."""
    cases.save(path, "rows", {})
    return len(ranks_of(dist.group.WORLD, 100).remembered["merged"].boxes)


def test_the_boxes_of_other_ranks_are_not_kept_between_saves(tmp_path: Path) -> None:
    assert run_ranks(2, boxes_remembered, str(tmp_path / "c")) == [0, 0]


def differently(path: str, what: str) -> None:
    """Load on rank 1, while rank 0 saves, or loads in another way; no error of a rank is waited for."""
    own, group = torch.zeros(4), dist.group.WORLD
    if what == "other saves":
        mine: Any = merge.GroupSaveCoordinator
        shared = SimpleNamespace(ranks=ranks_of(group, 100))
        stage = mine(shared, Path(path + str(dist.get_rank())), None)
        stage._stage = lambda: (path, "")
        stage.begin()
    elif dist.get_rank() == 1:
        tensorkeep.load(path, into={"w": own}, group=group, timeout=100)
    elif what == "save":
        tensorkeep.save({"w": own}, path, overwrite=True, group=group, timeout=100)
    else:
        tensorkeep.load(path, group=group, timeout=100)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("save", "rank 0 is preparing to save, and rank 1 is loading"),
        ("load", "rank 0 is loading, and rank 1 is comparing its state"),
        ("other saves", r"rank 0 is beginning to save .*/c0, and rank 1 is beginning to save .*/c1"),
    ],
)
def test_ranks_in_different_operations_all_raise_at_once(tmp_path: Path, what: str, words: str) -> None:
    tensorkeep.save({"w": torch.ones(4)}, tmp_path / "c")
    found = outcomes(2, differently, str(tmp_path / "c"), what)
    assert [each.error for each in found] == ["RanksDisagreeError"] * 2, found
    assert all(re.search(words, each.message) for each in found), found[0].message


def exchange_long_and_short(length: int) -> list[list[int]]:
    """Exchange values of other lengths; return the lengths that arrive, at all ranks and at the coordinator."""
    ranks = ranks_of(dist.group.WORLD, 100)
    own = b"x" * (length if dist.get_rank() == 1 else 3)
    found = [ranks.writer.gather(own, "testing", to_main=only) for only in (False, True)]
    return [[len(each) for each in received] for received in found]


@pytest.mark.parametrize("length", [5, 300_000])
def test_values_of_different_lengths_arrive(length: int) -> None:
    sizes = [3, length, 3]
    assert run_ranks(3, exchange_long_and_short, length) == [[sizes, sizes], [sizes, []], [sizes, []]]


def connect_out_of_step(path: str) -> list[str]:
    """Save again and again, each time with more patience; rank 1 comes when rank 0 has given up several connections."""
    errors, given_up = [], Path(f"{path}-given-up")
    for attempt in range(11):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(group, "_GRACE", 0.1)
            try:
                options = {"group": dist.group.WORLD, "timeout": 0.5 * 2 ** max(0, attempt - 3)}
                tensorkeep.save({"w": torch.zeros(4)}, path, overwrite=True, **options)
                errors.append("")
            except tensorkeep.RanksDisagreeError as error:
                errors.append(error.message)
        if dist.get_rank() == 0 and attempt == 2:
            given_up.touch()
        while dist.get_rank() == 1 and not given_up.exists():
            time.sleep(0.01)
        if attempt and not errors[-1]:
            break
    return errors


@pytest.mark.exhaustive
def test_ranks_meet_again_that_gave_up_different_numbers_of_connections(tmp_path: Path) -> None:
    errors = run_ranks(2, connect_out_of_step, str(tmp_path / "c"))
    assert any(errors[0]), "rank 1 was not late"
    assert [each[-1] for each in errors] == ["", ""]


def connect_beside_a_slow_rank() -> float:
    """Connect; return when this rank may continue, and on rank 0, whose gloo is slow, when it has connected."""
    real, times = distributed_c10d.ProcessGroupGloo, list[float]()

    def slow(*arguments: Any) -> Any:
        made = real(*arguments)
        time.sleep(0.2)
        times.append(time.monotonic())
        return made

    with pytest.MonkeyPatch.context() as patches:
        if dist.get_rank() == 0:
            patches.setattr(distributed_c10d, "ProcessGroupGloo", slow)
        ranks_of(dist.group.WORLD, 100)
    return times[-1] if times else time.monotonic()


def test_no_rank_goes_on_before_all_have_connected() -> None:
    connected, *others = run_ranks(3, connect_beside_a_slow_rank)
    assert min(others) > connected


def timeouts_of_operations(path: str) -> list[set[float]]:
    """Save and load, each rank and each operation with a timeout of its own; return those of the exchanges of each."""
    rank, world = dist.get_rank(), dist.group.WORLD
    real, found = group.GlooConnection._all_gather, []

    def noted(self: group.GlooConnection, received: Any, own: Any, timeout: float) -> None:
        found[-1].add(timeout)
        real(self, received, own, timeout)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(group.GlooConnection, "_all_gather", noted)
        for seconds in (20, 30):
            found.append(set[float]())
            tensorkeep.save({"w": torch.zeros(4)}, path, overwrite=True, group=world, timeout=seconds + rank)
        found.append(set[float]())
        tensorkeep.load(path, group=world, timeout=40 + rank)
    return found


def test_each_operation_has_its_timeout(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, timeouts_of_operations, str(tmp_path / "c"))):
        assert found == [{20 + rank}, {30 + rank}, {40 + rank}]


def save_slowly(path: str, seconds: float, timeout: float) -> None:
    """Save ones, while rank 0 needs some time to begin."""
    stage = merge.GroupSaveCoordinator._stage
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(merge.GroupSaveCoordinator, "_stage", lambda self: (time.sleep(seconds), stage(self))[1])
        tensorkeep.save({"w": torch.ones(4)}, path, overwrite=True, group=dist.group.WORLD, timeout=timeout)


def operations_with_other_timeouts(path: str) -> tuple[list[float], str]:
    """Save and load with other timeouts; return what was loaded, and the error of a save that lasts too long.

    The second save lasts longer than the timeout of the operation that connected the ranks.
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    tensorkeep.save({"w": torch.zeros(4)}, path, group=group, timeout=10 + rank)
    save_slowly(path, 13, timeout=100 + rank)
    kept = tensorkeep.load(path, group=group)["w"].tolist()
    with pytest.raises(tensorkeep.RanksDisagreeError) as caught:
        save_slowly(path, 2, timeout=0.5)
    return kept, caught.value.message


@pytest.mark.exhaustive
def test_an_operation_may_last_longer_than_the_timeout_of_an_earlier_one(tmp_path: Path) -> None:
    for kept, error in run_ranks(2, operations_with_other_timeouts, str(tmp_path / "c")):
        assert kept == [1.0] * 4
        assert "did not answer within 0.5 s" in error


def test_a_save_waits_for_all_earlier_ones_also_if_one_between_was_dropped() -> None:
    queue: list[threading.Event] = []
    tickets = [SaveTicket(queue) for _ in range(3)]
    for ticket in tickets:
        ticket.enqueue()
    last = tickets.pop()
    waiting = threading.Thread(target=last.wait)
    waiting.start()
    del ticket, tickets[1]  # never written
    waiting.join(0.05)
    assert waiting.is_alive()
    tickets[0].release()
    waiting.join(10)
    assert not waiting.is_alive()
