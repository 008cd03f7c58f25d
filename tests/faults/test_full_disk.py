"""A manager on a full disk: saved steps stay intact, and pruning frees space."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.testing.disk import names_in
from tensorkeep.testing.equality import same

KIB = 1024


def state(number: int, *, kib: int = 100, frozen_kib: int = 500) -> dict[str, Any]:
    """Return a state of incompressible bytes."""
    draw = torch.Generator().manual_seed(number)
    frozen = torch.Generator().manual_seed(0)
    return {
        "frozen": torch.randint(0, 256, (frozen_kib * KIB,), dtype=torch.uint8, generator=frozen),
        "w": torch.randint(0, 256, (kib * KIB,), dtype=torch.uint8, generator=draw),
        "step": number,
    }


def step_names(numbers: range | list[int]) -> list[str]:
    return [f"step-{number:06d}" for number in numbers]


def fill_up(manager: CheckpointManager) -> int:
    """Save until the disk is full and return the number of the step that failed."""
    for number in range(1, 100):
        try:
            manager.save(number, state(number)).wait()
        except tensorkeep.StoreError as error:
            assert "No space left" in str(error)
            assert "free some space" in str(error)
            return number
    raise AssertionError("the disk is not full")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("incremental", "least"), [(False, 3), (True, 8), ("delta", 8)])
def test_steps_until_the_disk_is_full(
    small_disk: Path, incremental: Any, least: int, asynchronous: bool, record_property: Any
) -> None:
    root = small_disk / "run"
    with CheckpointManager(root, incremental=incremental, asynchronous=asynchronous, threads=2) as manager:
        failed = fill_up(manager)
        assert failed > least
        assert names_in(root) == step_names(range(1, failed))
        for number in range(1, failed):
            assert tensorkeep.verify(root / f"step-{number:06d}").ok
            assert same(manager.restore(number), state(number))
        for number in range(1, failed - 1):
            manager.delete(number)
        manager.save(failed, state(failed)).wait()
        assert same(manager.restore(), state(failed))
    assert names_in(root) == step_names([failed - 1, failed])
    record_property("cases", failed)


def test_a_step_whose_replacement_fails_is_kept(small_disk: Path, record_property: Any) -> None:
    root = small_disk / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1, frozen_kib=1200)).wait()
        with pytest.raises(tensorkeep.StoreError, match="No space left"):
            manager.save(1, state(2, frozen_kib=1200), overwrite=True).wait()
        assert names_in(root) == step_names([1])
        assert same(manager.restore(), state(1, frozen_kib=1200))
        manager.save(1, state(3, frozen_kib=200), overwrite=True).wait()
        assert same(manager.restore(), state(3, frozen_kib=200))
    record_property("cases", 2)


def test_pruning_frees_space_on_a_disk_without_a_free_byte(small_disk: Path, record_property: Any) -> None:
    root = small_disk / "run"
    with CheckpointManager(root) as manager:
        for number in (1, 2, 3):
            manager.save(number, state(number, frozen_kib=300)).wait()
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space left"):
        while True:
            filler.write(bytes(4 * KIB))
    with CheckpointManager(root, keep_last=1) as manager:
        with pytest.raises(tensorkeep.StoreError, match="No space left"):
            manager.save(4, state(4)).wait()
        # A step that no rule keeps is deleted only after its successor exists.
        assert names_in(root) == step_names([1, 2, 3])
        assert [step.number for step in manager.prune()] == [1, 2]
        assert names_in(root) == step_names([3])
        manager.save(4, state(4)).wait()
        assert same(manager.restore(), state(4))
    assert names_in(root) == step_names([4])
    record_property("cases", 3)
