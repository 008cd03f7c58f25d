"""Saving in the background."""

import errno
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import tensorkeep
from faults import injection as faults
from tensorkeep.checkpoint.background import SaveMemory
from tensorkeep.formats.base import BLOCK_BYTES
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import names_in, training_state

FORMATS = {"native": {}, "lossless": {"compression": "lossless"}, "safetensors": {"format": "safetensors"}}


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(megabytes)
    return {
        f"w{number}": torch.randn(1024, 128, generator=generator).bfloat16().repeat(4, 1) for number in range(megabytes)
    }


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_the_state_at_the_call_is_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    state = state_of(8)
    before = {name: tensor.clone() for name, tensor in state.items()}
    pending = tensorkeep.save_async(state, tmp_path / "c", **options)
    for tensor in state.values():
        tensor.zero_()
    report = pending.wait()
    assert pending.done()
    assert pending.report is report
    assert same(tensorkeep.load(tmp_path / "c"), before)
    assert report.state_bytes == sum(tensor.nbytes for tensor in before.values())


def test_any_states_come_back_saved_at_once(tmp_path: Path) -> None:
    states = [training_state(), {"a": 1, "b": torch.empty(0)}, state_of(8), state_of(9)]
    pending = [tensorkeep.save_async(state, tmp_path / str(number)) for number, state in enumerate(states)]
    for number, (state, each) in enumerate(zip(states, pending, strict=True)):
        with case(number):
            each.wait()
            assert same(tensorkeep.load(tmp_path / str(number)), state)


# The copy may take 96 MiB of it.
BUDGET = 128 * 1024**2


@pytest.mark.exhaustive
@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_state_larger_than_the_budget_streams_through(tmp_path: Path, compression: str) -> None:
    state = {"large": torch.arange(8 * BLOCK_BYTES // 4, dtype=torch.int32), **state_of(3)}
    report = tensorkeep.save_async(state, tmp_path / "c", memory_budget=BUDGET, compression=compression).wait()
    assert report.peak_buffer_bytes <= BUDGET < report.state_bytes
    assert same(tensorkeep.load(tmp_path / "c"), state)


def test_invalid_calls_raise_at_once(tmp_path: Path) -> None:
    tensorkeep.save({"a": 1}, tmp_path / "c")
    large, small, refused = {"large": torch.empty(BUDGET, dtype=torch.uint8)}, {"a": torch.ones(1)}, {"a": object()}
    cases: list[tuple[type[Exception], str, Any, str, dict[str, Any]]] = [
        (tensorkeep.UsageError, "copies the whole state", large, "c.pt", {"memory_budget": BUDGET}),
        (tensorkeep.UsageError, "at least 128MiB", small, "d", {"memory_budget": "64MiB"}),
        (tensorkeep.DestinationExistsError, "exists already", small, "c", {}),
        (tensorkeep.UnsupportedLeafError, "'a'", refused, "d", {}),
    ]
    for error, message, state, name, given in cases:
        with case(message), pytest.raises(error, match=message):
            tensorkeep.save_async(state, tmp_path / name, **given)
    assert tensorkeep.load(tmp_path / "c") == {"a": 1}
    assert names_in(tmp_path) == ["c"]


def test_an_upload_of_differences_needs_a_larger_budget() -> None:
    with pytest.raises(tensorkeep.UsageError, match="into a store\ngive at least 144MiB"):
        SaveMemory(136 * 1024**2).working(4, delta=True, in_store=True)
    with closing(SaveMemory(144 * 1024**2)) as memory:
        memory.working(4, delta=True, in_store=True)
        memory.staging(1000, from_cuda=False)


def test_wait_raises_an_error_of_the_background(tmp_path: Path) -> None:
    # The full disk also frees a caller that waits for buffers.
    waits: dict[str, Any] = {"memory_budget": BUDGET}
    for state, fail_at, given in (
        (state_of(4), 3, {}),
        ({"large": torch.zeros(BUDGET, dtype=torch.uint8)}, 8, waits),
    ):
        with case(fail_at):
            with faults.broken(fail_at=fail_at, action=faults.raise_error(errno.ENOSPC)):
                pending = tensorkeep.save_async(state, tmp_path / "c", **given)
                with pytest.raises(tensorkeep.StoreError, match="No space left"):
                    pending.wait()
            assert pending.report is None
            assert names_in(tmp_path) == []


def test_a_state_that_cannot_be_read_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mock.Mock(side_effect=RuntimeError("the device is gone"))
    monkeypatch.setattr("tensorkeep.state.leaf.Leaf.read", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tensorkeep.save_async({"a": torch.ones(1000, 1000).t()}, tmp_path / "c")
    assert names_in(tmp_path) == []


@pytest.mark.integration
def test_wait_times_out_and_is_refused_in_a_child(tmp_path: Path, gate: threading.Event) -> None:
    pending = tensorkeep.save_async({"a": torch.ones(3)}, tmp_path / "c")
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(timeout=0.05)

    def work() -> None:
        with pytest.raises(tensorkeep.UsageError, match="another process"):
            pending.wait()

    assert faults.in_child(work) == 0
    gate.set()
    pending.wait()


@pytest.mark.integration
def test_a_killed_process_leaves_no_partial_checkpoint(tmp_path: Path) -> None:
    state = {"a": torch.zeros(10_000_000)}  # made here: a forked child must not start torch's threads

    def work() -> None:
        tensorkeep.save_async(state, tmp_path / "c")
        os.kill(os.getpid(), signal.SIGKILL)

    assert faults.in_child(work) == signal.SIGKILL
    if (tmp_path / "c").exists():
        assert tensorkeep.verify(tmp_path / "c").ok
    tensorkeep.save({"a": torch.ones(3)}, tmp_path / "c", overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_arrays_and_strided_tensors_are_copied(tmp_path: Path) -> None:
    base = torch.arange(2_000_000.0).reshape(1000, 2000)
    array = np.arange(1_000_000).reshape(1000, 1000)
    state = {"t": base.t(), "slice": base[::2, 3:], "array": array.T}
    expected = {"t": base.t().clone(), "slice": base[::2, 3:].clone(), "array": array.T.copy()}
    pending = tensorkeep.save_async(state, tmp_path / "c")
    base.zero_()
    array[:] = 0
    pending.wait()
    loaded = tensorkeep.load(tmp_path / "c")
    assert all(np.array_equal(loaded[name], expected[name]) for name in state)


def test_progress_is_reported_and_the_metadata_at_the_call_are_saved(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    about: dict[str, Any] = {"step": 1, "tags": ["first"]}
    pending = tensorkeep.save_async(state_of(4), tmp_path / "x", metadata=about, progress=lambda *now: seen.append(now))
    about["step"] = 2
    about["tags"].append("second")
    pending.wait()
    assert seen[-1][0] == seen[-1][1] == 4 * 1024**2
    with tensorkeep.open(tmp_path / "x") as checkpoint:
        assert checkpoint.metadata == {"step": 1, "tags": ["first"]}
