"""Operations of several ranks that meet in unusual ways; each function runs on every rank of a gloo group."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

import tensorkeep
from checkpoint.ranks import cases
from tensorkeep.checkpoint.ranks import collective, connection
from tensorkeep.checkpoint.ranks.group import ranks_of


def several_in_flight(folder: str) -> list[str]:
    """Begin saves while the first one is being written; return those that this rank stages, in order."""
    stage = collective.Coordination._stage
    staged: list[str] = []

    def slow(self: collective.Coordination) -> tuple[str, str]:
        if self._destination.name == "first":
            time.sleep(0.2)
        staged.append(self._destination.name)
        return stage(self)

    def state(number: int) -> dict[str, Any]:
        return cases.divided({"model": {"w": torch.full((50, 4), float(number))}}, "rows")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(collective.Coordination, "_stage", slow)
        group = dist.group.WORLD
        first = tensorkeep.save_async(state(1), f"{folder}/first", group=group, timeout=10)
        manager = tensorkeep.CheckpointManager(f"{folder}/run", group=group, timeout=10)
        second = manager.save(2, state(2))
        tensorkeep.save(state(3), f"{folder}/third", group=group, timeout=10)
        first.wait()
        second.wait()
        manager.close()
    return staged


def boxes_remembered(path: str) -> int:
    """Save; return how many boxes this rank remembers for the next save."""
    cases.save(path, "rows", {})
    ranks = ranks_of(dist.group.WORLD, 20)
    assert ranks is not None
    return len(ranks.remembered["merged"].boxes)


def differently(path: str, what: str) -> None:
    """Load on rank 1, while rank 0 saves, or loads in another way; no error of a rank is waited for."""
    own, group = torch.zeros(4), dist.group.WORLD
    if what == "other saves":
        mine: Any = collective.Coordination
        stage = mine(ranks_of(group, 20), None, Path(path + str(dist.get_rank())), None)
        stage._stage = lambda: (path, "")
        stage.begin()
    elif dist.get_rank() == 1:
        tensorkeep.load(path, into={"w": own}, group=group, timeout=20)
    elif what == "save":
        tensorkeep.save({"w": own}, path, overwrite=True, group=group, timeout=20)
    else:
        tensorkeep.load(path, group=group, timeout=20)


def exchange_long_and_short(length: int) -> list[list[int]]:
    """Exchange values of other lengths; return the lengths that arrive, at all ranks and at the coordinator."""
    ranks = ranks_of(dist.group.WORLD, 20)
    assert ranks is not None
    own = b"x" * (length if dist.get_rank() == 1 else 3)
    found = [ranks.caller.exchange(own, "testing", to_coordinator=only) for only in (False, True)]
    return [[len(each) for each in received] for received in found]


def connect_out_of_step(path: str) -> list[str]:
    """Save again and again, while rank 1 comes when rank 0 has given up several connections."""
    errors = []
    for attempt in range(8):
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(connection, "_GRACE", 0.1)
            try:
                tensorkeep.save({"w": torch.zeros(4)}, path, overwrite=True, group=dist.group.WORLD, timeout=0.5)
                errors.append("")
            except tensorkeep.RanksDisagreeError as error:
                errors.append(error.message)
        if dist.get_rank() == 1 and attempt == 0:
            time.sleep(2)
        if attempt and not errors[-1]:
            break
    return errors


def operations_with_other_timeouts(path: str) -> list[Any]:
    """Save and load, each rank and each operation with a timeout of its own; return what was found.

    The second save lasts longer than the timeout of the operation that connected the ranks.
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    tensorkeep.save({"w": torch.zeros(4)}, path, group=group, timeout=2 + rank)
    with pytest.MonkeyPatch.context() as patches:
        stage = collective.Coordination._stage
        patches.setattr(collective.Coordination, "_stage", lambda self: (time.sleep(3), stage(self))[1])
        tensorkeep.save({"w": torch.ones(4)}, path, overwrite=True, group=group, timeout=10 + rank)
    kept = tensorkeep.load(path, group=group)["w"].tolist()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(collective.Coordination, "_stage", lambda self: (time.sleep(2), stage(self))[1])
        try:
            tensorkeep.save({"w": torch.ones(4)}, path, overwrite=True, group=group, timeout=0.5)
        except tensorkeep.RanksDisagreeError as error:
            return [kept, error.message]
    return [kept, ""]


def connect_beside_a_slow_rank() -> float:
    """Connect; return when this rank may continue, and on rank 0, whose gloo is slow, when it has connected."""
    real, times = distributed_c10d.ProcessGroupGloo, list[float]()

    def slow(*arguments: Any) -> Any:
        made = real(*arguments)
        time.sleep(0.5)
        times.append(time.monotonic())
        return made

    with pytest.MonkeyPatch.context() as patches:
        if dist.get_rank() == 0:
            patches.setattr(distributed_c10d, "ProcessGroupGloo", slow)
        ranks_of(dist.group.WORLD, 20)
    return times[-1] if times else time.monotonic()
