"""A manager on a full disk: saved steps stay intact, and pruning frees space."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from fault_cases import fill
from tensorkeep import CheckpointManager
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in
from tiers import exhaustive

pytestmark = pytest.mark.integration

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


@pytest.mark.parametrize(
    ("incremental", "asynchronous", "least"),
    [
        *[(True, False, 8), ("delta", True, 8)],
        *exhaustive((False, True, 3), (False, False, 3), (True, True, 8), ("delta", False, 8)),
    ],
)
def test_a_full_disk(small_disk: Path, incremental: Any, asynchronous: bool, least: int, record_property: Any) -> None:
    root = small_disk / "run"
    with CheckpointManager(root, incremental=incremental, asynchronous=asynchronous, threads=2) as manager:
        failed = 1
        with pytest.raises(tensorkeep.StoreError, match=r"No space left.*\n.*free some space"):
            for failed in range(1, 100):
                manager.save(failed, state(failed)).wait()
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


def test_a_failed_replacement_keeps_the_step_and_pruning_frees_a_disk(small_disk: Path, record_property: Any) -> None:
    root = small_disk / "run"
    with CheckpointManager(root) as manager:
        manager.save(1, state(1, frozen_kib=1200)).wait()
        with pytest.raises(tensorkeep.StoreError, match="No space left"):
            manager.save(1, state(2, frozen_kib=1200), overwrite=True).wait()
        assert names_in(root) == step_names([1])
        assert same(manager.restore(), state(1, frozen_kib=1200))
        for number in (1, 2, 3):
            manager.save(number, state(number, frozen_kib=300), overwrite=True).wait()
        assert same(manager.restore(1), state(1, frozen_kib=300))
    fill(small_disk)
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
    record_property("cases", 5)
