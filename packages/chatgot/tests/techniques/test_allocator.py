"""Settings of the CUDA allocator: the environment that is needed, and the snapshot that proves it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chatgot.step.state import StepState
from chatgot.techniques.allocator import Allocator, AllocatorSettings
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import Stack
from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.testing.cases import case

DEVICE = torch.device("cuda", 0)
GPU = type("Hopper", (Machine,), {"capability": (9, 0)})(DEVICE)
OPERATIONS = SimpleNamespace(loss=None, plain_loss=None)
RUN = cast(StepState, SimpleNamespace(device=DEVICE, checks_later=False, operations=OPERATIONS))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_suggested_environment_keeps_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    lack = str(Allocator(AllocatorSettings()).missing(GPU))
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True in" in lack
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native, expandable_segments:False")
    lack = str(Allocator(AllocatorSettings(max_split_size_mb=128)).missing(GPU))
    assert "PYTORCH_ALLOC_CONF=backend:native,expandable_segments:True,max_split_size_mb:128 in" in lack


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_correct_environment_is_accepted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "expandable_segments:True,garbage_collection_threshold:0.8")
    assert Allocator(AllocatorSettings(garbage_collection_threshold=0.8)).missing(GPU) is None


def snapshot(monkeypatch: pytest.MonkeyPatch, *, growing: list[bool], **settings: Any) -> None:
    """Make torch report a snapshot of the allocator."""
    defaults = {"expandable_segments": True, "max_split_size": 2**64 - 1, "garbage_collection_threshold": 0.0}
    segments = [{"device": 0, "is_expandable": each} for each in growing] + [{"device": 1, "is_expandable": False}]
    found = {"allocator_settings": {**defaults, **settings}, "segments": segments}
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: found)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**20)


def test_snapshot_is_the_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot(monkeypatch, growing=[True, True], max_split_size=128 * 2**20)
    stack = Stack([Allocator(AllocatorSettings(max_split_size_mb=128))])
    with stack.verified(RUN):
        pass
    proof = stack.proofs["allocator"]
    assert proof.summary == "2 of 2 segments are expandable; 2 MiB are reserved beyond the 3 MiB of tensors"
    assert proof.figures["reserved_bytes"] - proof.figures["allocated_bytes"] == 2 * 2**20


def test_snapshot_of_other_settings_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        # The environment was set too late.
        ({}, {"growing": [False], "expandable_segments": False}, "expandable_segments=False instead of True"),
        ({}, {"growing": [True, False, False]}, "2 of 3 segments are not expandable"),
        ({"max_split_size_mb": 64}, {"growing": [True]}, "max_split_size="),
    ]
    for settings, found, message in cases:
        technique = Allocator(AllocatorSettings(**settings))
        assert technique.missing(GPU) is None
        snapshot(monkeypatch, **found)
        with case(message), pytest.raises(TechniqueNotActiveError, match=message), Stack([technique]).verified(RUN):
            pass
