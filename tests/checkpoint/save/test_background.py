"""Saving in the background."""

import errno
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from faults import injection as faults
from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.formats.write import BLOCK_BYTES
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_states import training_state

FORMATS = {"native": {}, "lossless": {"compression": "lossless"}, "safetensors": {"format": "safetensors"}}


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(megabytes)
    return {
        f"w{number}": torch.randn(1024, 128, generator=generator).bfloat16().repeat(4, 1) for number in range(megabytes)
    }


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_the_state_at_the_call_is_saved(tmp_path: Path, options: dict[str, Any]) -> None:
    state = state_of(20)
    before = {name: tensor.clone() for name, tensor in state.items()}
    pending = tensorkeep.save_async(state, tmp_path / "c", **options)
    for tensor in state.values():
        tensor.zero_()
    report = pending.wait()
    assert pending.done()
    assert pending.report is report
    assert same(tensorkeep.load(tmp_path / "c"), before)
    assert report.stall_seconds <= report.durable_seconds
    assert report.state_bytes == sum(tensor.nbytes for tensor in before.values())


def test_a_nested_state_comes_back(tmp_path: Path) -> None:
    state = training_state()
    tensorkeep.save_async(state, tmp_path / "c").wait()
    assert same(tensorkeep.load(tmp_path / "c"), state)


def test_an_empty_state_is_saved(tmp_path: Path) -> None:
    tensorkeep.save_async({"a": 1, "b": torch.empty(0)}, tmp_path / "c").wait()
    assert same(tensorkeep.load(tmp_path / "c"), {"a": 1, "b": torch.empty(0)})


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_a_state_larger_than_the_budget_streams_through(tmp_path: Path, compression: str) -> None:
    state = {"large": torch.arange(10 * BLOCK_BYTES // 4, dtype=torch.int32), **state_of(3)}
    report = tensorkeep.save_async(state, tmp_path / "c", memory_budget="128MiB", compression=compression).wait()
    assert report.peak_buffer_bytes <= 128 * 1024**2
    assert same(tensorkeep.load(tmp_path / "c"), state)


def test_other_formats_refuse_a_state_larger_than_the_budget(tmp_path: Path) -> None:
    state = {"large": torch.zeros(200 * 1024**2, dtype=torch.uint8)}
    with pytest.raises(tensorkeep.UsageError, match="copies the whole state"):
        tensorkeep.save_async(state, tmp_path / "c.pt", memory_budget="128MiB")
    assert list(tmp_path.iterdir()) == []


def test_a_budget_below_the_least_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UsageError, match="at least 128MiB"):
        tensorkeep.save_async({"a": torch.ones(1)}, tmp_path / "c", memory_budget="64MiB")


def test_an_upload_of_differences_needs_a_larger_budget() -> None:
    with pytest.raises(tensorkeep.UsageError, match="into a store\ngive at least 144MiB"):
        SaveMemory(136 * 1024**2).working(4, delta=True, in_store=True)
    with closing(SaveMemory(144 * 1024**2)) as memory:
        memory.working(4, delta=True, in_store=True)
        memory.staging(1000, from_cuda=False)


def test_invalid_calls_raise_at_once(tmp_path: Path) -> None:
    tensorkeep.save({"a": 1}, tmp_path / "c")
    with pytest.raises(tensorkeep.DestinationExistsError):
        tensorkeep.save_async({"a": 2}, tmp_path / "c")
    with pytest.raises(tensorkeep.UnsupportedLeafError):
        tensorkeep.save_async({"a": object()}, tmp_path / "d")
    assert tensorkeep.load(tmp_path / "c") == {"a": 1}


def test_wait_raises_an_error_of_the_background(tmp_path: Path) -> None:
    with faults.broken(fail_at=3, action=faults.raise_error(errno.ENOSPC)):
        pending = tensorkeep.save_async(state_of(4), tmp_path / "c")
        with pytest.raises(tensorkeep.StoreError, match="No space left"):
            pending.wait()
    assert pending.report is None
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_frees_a_caller_that_waits_for_buffers(tmp_path: Path) -> None:
    state = {"large": torch.zeros(200 * 1024**2, dtype=torch.uint8)}

    def full(name: str, real: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with faults.broken(fail_at=8, action=full):
        pending = tensorkeep.save_async(state, tmp_path / "c", memory_budget="128MiB")
        with pytest.raises(tensorkeep.StoreError):
            pending.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_read_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": torch.ones(1000, 1000).t()}

    def broken(self: object, start: int, stop: int, out: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("tensorkeep.state.leaf.Leaf.read", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        tensorkeep.save_async(state, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_wait_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    real = tensorkeep.io.commit.Commit.publish

    def slow(self: Any) -> None:
        hold.wait(10)
        real(self)

    monkeypatch.setattr("tensorkeep.io.commit.Commit.publish", slow)
    pending = tensorkeep.save_async({"a": torch.ones(3)}, tmp_path / "c")
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(timeout=0.05)
    hold.set()
    pending.wait()


@pytest.fixture(scope="module")
def exited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the stderr of an interpreter that exited without waiting for two saves."""
    folder = tmp_path_factory.mktemp("exited")
    (folder / "file").touch()
    code = (
        "import tensorkeep, torch\n"
        "tensorkeep.save_async({'a': torch.ones(3)}, 'file/c')\n"
        "tensorkeep.save_async({'a': torch.arange(5_000_000)}, 'c')\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return folder, done.stderr


def test_an_interpreter_that_exits_finishes_the_save(exited: tuple[Path, str]) -> None:
    folder, _ = exited
    assert same(tensorkeep.load(folder / "c"), {"a": torch.arange(5_000_000)})
    assert sorted(entry.name for entry in folder.iterdir()) == ["c", "file"]


def test_an_interpreter_that_exits_logs_a_failed_save(exited: tuple[Path, str]) -> None:
    _, stderr = exited
    assert "NOT SAVED: file/c" in stderr
    assert "Not a directory" in stderr


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


def test_a_child_cannot_wait_for_its_parents_save(tmp_path: Path) -> None:
    pending = tensorkeep.save_async({"a": torch.ones(3)}, tmp_path / "c")

    def work() -> None:
        with pytest.raises(tensorkeep.UsageError, match="another process"):
            pending.wait()

    assert faults.in_child(work) == 0
    pending.wait()


def test_two_saves_at_once(tmp_path: Path) -> None:
    states = [state_of(megabytes) for megabytes in (8, 9)]
    pending = [tensorkeep.save_async(state, tmp_path / str(number)) for number, state in enumerate(states)]
    for each in pending:
        each.wait()
    for number, state in enumerate(states):
        assert same(tensorkeep.load(tmp_path / str(number)), state)


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


def test_progress_is_reported(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tensorkeep.save_async(state_of(4), tmp_path / "c", progress=lambda done, total: seen.append((done, total))).wait()
    assert seen[-1][0] == seen[-1][1] == 4 * 1024**2


def test_metadata_at_the_call_is_saved(tmp_path: Path) -> None:
    about = {"step": 1, "tags": ["first"]}
    pending = tensorkeep.save_async({"w": torch.ones(3)}, tmp_path / "x", metadata=about)
    about["step"] = 2
    about["tags"].append("second")  # type: ignore[attr-defined]
    pending.wait()
    with tensorkeep.open(tmp_path / "x") as checkpoint:
        assert checkpoint.metadata == {"step": 1, "tags": ["first"]}
