"""An upload whose requests fail ends in time, and leaves the whole checkpoint in the store, or none."""

import math
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from checkpoint.local_tier.copies import copy
from store_servers import FaultAt, Proxy
from tensorkeep.checkpoint.local_tier.transfer import find_copy
from tensorkeep.paths import StorePath
from tensorkeep.testing.equality import same

pytest.importorskip("obstore")

BUCKET = "s3://failing"


def state(value: float) -> dict[str, Any]:
    return {"model": {"frozen": torch.arange(50_000.0), "w": torch.full((3000,), value)}, "step": int(value)}


@pytest.mark.parametrize("action", ["500", "reset", "lost", "truncated", "lost for ever", "503 for ever"])
def test_every_request_of_an_upload_fails(
    tmp_path: Path, bucket: Proxy, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    kind, _, for_ever = action.partition(" ")
    monkeypatch.setenv("TENSORKEEP_STORE_TIMEOUT", "0.5" if for_ever else "20")
    run = StorePath(f"{BUCKET}/{tmp_path.name}")
    first, second = tmp_path / "step-000001", tmp_path / "step-000002"
    tensorkeep.save(state(1), first, incremental=True)
    tensorkeep.save(state(2), second, base=first)
    one, _ = copy(first, run / first.name)
    for number in count():
        destination = run / f"step-{number + 2:06d}"
        bucket.start_again(FaultAt(kind, number, math.inf if for_ever else 1))
        uploaded = False
        with suppress(tensorkeep.StoreError):
            copy(second, destination, one)
            uploaded = True
        failed = len(bucket.requests) > number
        bucket.start_again(None)
        assert uploaded or failed, number
        # The answer to the last request may have been lost.
        with suppress(tensorkeep.DestinationExistsError):
            copy(second, destination, one)
        assert find_copy(second, destination) is not None
        assert same(tensorkeep.load(str(destination)), state(2)), number
        if not failed:
            break
    assert number > 5
