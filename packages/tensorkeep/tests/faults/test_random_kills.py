"""Two hundred kills at random times in one folder: overwriting, incremental, with retention."""

import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager
from tensorkeep.testing.equality import same

ROUNDS = 200


def state(number: int) -> dict[str, Any]:
    # Made by numpy: torch's threads do not live on in a forked child.
    arrays = {
        "frozen": np.arange(200_000, dtype=np.float32),
        "slow": np.arange(100_000, dtype=np.float32) * np.float32(1 + number * 2.0**-18),
        "w": np.full(50_000, number, np.float32),
    }
    return {**{name: torch.from_numpy(array) for name, array in arrays.items()}, "step": number}


def work(root: Path, first: int) -> None:
    """Save until killed; every third save replaces the previous step."""
    with CheckpointManager(root, incremental="delta", keep_last=3, threads=2) as manager:
        for number in range(first, first + 1000):
            place = number - 1 if number % 3 == 0 else number
            manager.save(place, state(number), overwrite=True)


@pytest.mark.exhaustive
def test_killed_two_hundred_times(tmp_path: Path, record_property: Any) -> None:
    root = tmp_path / "run"
    draw = random.Random(200)
    first, saved = 1, 0
    for _ in range(ROUNDS):
        child = os.fork()
        if child == 0:
            try:
                work(root, first)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.0, 0.25))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        manager = CheckpointManager(root)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            latest = manager.latest()
        assert not manager.listing().broken
        for step in manager.steps():
            assert tensorkeep.verify(step.path).ok
            found = tensorkeep.load(step.path)
            assert same(found, state(found["step"]))
        if latest is not None:
            reached = tensorkeep.load(latest.path)["step"]
            assert reached >= first - 1, "a step that was durable is gone"
            saved += reached >= first
            first = reached + 1
    with CheckpointManager(root, keep_last=1) as manager:
        manager.save(first + 10, state(first + 10)).wait()
    assert [path.name for path in root.iterdir()] == [f"step-{first + 10:06d}"]
    assert saved > ROUNDS / 4
    record_property("cases", ROUNDS)
