"""Concurrent saves: queued, replaced, refused, interrupted, failed, forked; none hangs, and no error is lost."""

import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tensorkeep
from faults import injection as faults
from interrupts import interrupted_at
from tensorkeep import CheckpointManager, KeepBest
from tensorkeep.checkpoint import auto_compression
from tensorkeep.checkpoint.background import SaveMemory, SaveQueue
from tensorkeep.state.leaf import Leaf
from tensorkeep.testing.equality import same
from tiers import exhaustive

MIB = 1024**2
AT_ONCE = {"asynchronous": False}


def zeros(megabytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((megabytes * MIB,), value, dtype=torch.uint8)


def many(megabytes: int, count: int, value: int = 0) -> dict[str, torch.Tensor]:
    return {f"w{number}": zeros(megabytes, value) for number in range(count)}


def gathered(value: int = 0) -> dict[str, torch.Tensor]:
    """Return a state whose last tensor has to be gathered, which a test can make fail."""
    return {"w": zeros(25, value), "z": torch.full((1000, 1000), value, dtype=torch.uint8).t()}


@pytest.fixture
def gathering(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """Return a list of functions that are called, once each, when a tensor is gathered."""
    actions: list[Callable[[], None]] = []
    real = Leaf.read

    def read(leaf: Leaf, start: int, stop: int, out: Any) -> None:
        if actions:
            actions.pop()()
        real(leaf, start, stop, out)

    monkeypatch.setattr(Leaf, "read", read)
    yield actions


@pytest.fixture
def interrupt() -> Iterator[Callable[[], None]]:
    """Return a function that presses Ctrl-C, and returns once the main thread has noticed it."""
    noticed = threading.Event()

    def notice(number: int, frame: Any) -> None:
        noticed.set()
        signal.default_int_handler(number, frame)

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        noticed.wait()

    before = signal.signal(signal.SIGINT, notice)
    yield press
    signal.signal(signal.SIGINT, before)


def numbers(manager: CheckpointManager) -> list[int]:
    return [step.number for step in manager.steps()]


@pytest.mark.parametrize("name", [*exhaustive("x.safetensors"), "x.pt"])
def test_buffers_of_another_layout_do_not_use_up_the_budget(tmp_path: Path, name: str) -> None:
    tensorkeep.save({"w": zeros(72)}, tmp_path / "first")
    tensorkeep.load(tmp_path / "first")  # leaves large buffers behind for the next call
    state = many(9, 8)
    tensorkeep.save_async(state, tmp_path / name).wait()
    assert same(tensorkeep.load(tmp_path / name), state)


def test_a_kept_pool_holds_a_state_of_another_layout(tmp_path: Path, gate: threading.Event) -> None:
    large, small = {"w": zeros(80)}, many(9, 9)
    with CheckpointManager(tmp_path, when_busy="replace", keep_last=1) as manager:
        for saves in ({1: large}, {2: small, 3: large}, {4: small, 5: small, 6: small}):
            gate.clear()
            for number, state in saves.items():
                manager.save(number, state)
            gate.set()
            manager.wait()
        assert numbers(manager) == [6]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_queued_save_that_cannot_be_copied_does_not_block_the_next(
    tmp_path: Path,
    gate: threading.Event,
    gathering: list[Callable[[], None]],
    interrupt: Callable[[], None],
    error: type[BaseException],
) -> None:
    manager = CheckpointManager(tmp_path, when_busy="replace")
    manager.save(1, gathered())
    gathering.append(interrupt if error is KeyboardInterrupt else mock.Mock(side_effect=error("illegal memory access")))
    with pytest.raises(error):
        manager.save(2, gathered())
    manager.save(3, gathered(3))
    gate.set()
    manager.close()
    assert numbers(manager) == [1, 3]
    assert same(manager.restore(3), gathered(3))


def test_a_save_that_is_refused_replaces_nothing_and_a_queued_one_needs_no_new_thread(
    tmp_path: Path, gate: threading.Event
) -> None:
    manager = CheckpointManager(tmp_path, when_busy="replace")
    manager.save(1, {"w": zeros(1)})
    queued = manager.save(2, {"w": zeros(1)})
    assert [thread.name for thread in threading.enumerate()].count("tensorkeep-save") == 1
    with pytest.raises(tensorkeep.UnsupportedLeafError):
        manager.save(3, {"w": object()})
    gate.set()
    manager.close()
    assert queued.wait().state_bytes == MIB
    assert numbers(manager) == [1, 2]


def test_a_thread_that_cannot_start_is_an_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = mock.Mock(side_effect=RuntimeError("can't start new thread"))
    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            with pytest.raises(tensorkeep.OutOfMemoryError, match="no more threads"):
                manager.save(1, {"w": zeros(1)})
        manager.save(2, {"w": zeros(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_threads_share_a_manager(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)

    def work(first: int) -> None:
        for number in range(first, first + 5):
            manager.save(number, {"w": zeros(2, number)})

    with pytest.warns(UserWarning, match="there are later ones"), ThreadPoolExecutor(3) as threads:
        assert [*threads.map(work, (30, 20, 10))] == [None] * 3
    manager.close()
    assert len(manager.steps()) == 15
    assert all(same(manager.restore(step), {"w": zeros(2, step.number)}) for step in manager.steps())


def test_a_save_within_a_save_is_refused(tmp_path: Path, gathering: list[Callable[[], None]]) -> None:
    class Reenters:
        def state_dict(self) -> dict[str, Any]:
            manager.save(2, {"w": zeros(1)})
            return {}

        def load_state_dict(self, state: object) -> None: ...

    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(tensorkeep.UsageError, match="while this thread is in save"):
            manager.save(1, {"again": Reenters()})
        manager.save(3, {"w": zeros(1)})


def test_only_the_thread_that_saves_is_refused() -> None:
    queue = SaveQueue("wait", None)
    with ThreadPoolExecutor(1) as other:
        other.submit(queue._adding.acquire).result()
        queue.one_at_a_time()
        other.submit(queue._adding.release).result()
    with queue.one_at_a_time(), pytest.raises(tensorkeep.UsageError, match="while this thread is in save"):
        queue.one_at_a_time()  # even the first of its instructions can be a handler's


@pytest.mark.integration
def test_a_child_restores_beside_its_parents_save_and_may_not_write(tmp_path: Path, gate: threading.Event) -> None:
    state = {"w": torch.full((1000,), 5.0)}  # made here: a forked child must not start torch's threads
    gate.set()
    manager = CheckpointManager(tmp_path)
    manager.save(1, state).wait()
    gate.clear()
    manager.save(2, state)

    def work() -> None:
        assert same(manager.restore(1), state)
        with pytest.raises(tensorkeep.BusyError):
            manager.save(3, state)

    assert faults.in_child(work) == 0
    gate.set()
    manager.save(3, state).wait()
    assert faults.in_child(work) == 0
    manager.close()
    assert faults.in_child(lambda: manager.save(4, state).wait()) == 0
    assert numbers(manager) == [1, 2, 3, 4]


def test_ctrl_c_in_close_keeps_others_out_until_the_save_is_over(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {"w": zeros(1)})
    real = SaveQueue.drain

    def drain(queue: SaveQueue) -> None:
        # While it waits for the save, which does not end.
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        real(queue)

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(SaveQueue, "drain", drain)
        manager.close()
    with pytest.raises(tensorkeep.BusyError):
        CheckpointManager(tmp_path).save(2, {"w": zeros(1)})
    gate.set()
    manager.close()
    with CheckpointManager(tmp_path) as other:
        other.save(2, {"w": zeros(1)})


def test_an_interrupted_close_unlocks_the_folder_unless_a_save_runs(tmp_path: Path) -> None:
    locked = []
    for place in itertools.count(0):
        manager = CheckpointManager(tmp_path, **AT_ONCE)  # alive, as in the traceback of the interrupt
        manager.claim()
        came = interrupted_at(place, manager.close, KeyboardInterrupt())
        try:
            CheckpointManager(tmp_path).claim()
        except tensorkeep.BusyError:
            locked.append(place)
            manager.close()
        if not came:
            break
    assert place > 20 >= 20 * len(locked)  # before its first instruction nothing can be done


def test_a_step_saved_after_going_back_is_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for number in (500, 900, 1000):
            manager.save(number, {"step": number}).wait()
        assert numbers(manager) == [900, 1000]
        with pytest.warns(UserWarning, match="up to step 1000: latest"):
            report = manager.save(600, {"step": 600}).wait()
        assert Path(report.path).exists()
        assert manager.restore(600) == {"step": 600}


def test_steps_that_cannot_be_deleted_cause_a_warning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tensorkeep.runs.backends.remove_checkpoint

    def remove_checkpoint(path: Path) -> None:
        if path.name == "step-000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path)

    monkeypatch.setattr("tensorkeep.runs.backends.remove_checkpoint", remove_checkpoint)
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {"w": zeros(1)}).wait()
    assert manager.save(2, {"w": zeros(1)}).wait().state_bytes == MIB
    for call in (lambda: manager.save(3, {"w": zeros(1)}), manager.close):
        with pytest.warns(UserWarning, match=r"not deleted.*step-000001"):
            call()
    assert 3 in numbers(manager)


def test_an_ambiguous_metric_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    metrics = {"loss": 1.0, "accuracy": 0.5}
    refused = pytest.raises(tensorkeep.UsageError, match="accuracy, loss")
    with CheckpointManager(tmp_path, keep_best=1) as manager, refused:
        manager.save(1, {"w": zeros(1)}, metrics=metrics)
    with CheckpointManager(tmp_path, keep_best=KeepBest(1, "loss")) as clear:
        clear.save(2, {"w": zeros(1)}, metrics=metrics)
    assert numbers(clear) == [2]


@pytest.mark.parametrize(
    ("options", "least", "size"),
    [
        ({}, 128, 72),  # more than the copy may take at once
        ({"incremental": "delta", "when_busy": "replace"}, 272, 20),
        ({**AT_ONCE, "incremental": "delta"}, 108, 20),
        *exhaustive(({"when_busy": "replace"}, 256, 20), ({"incremental": "delta"}, 136, 20), (AT_ONCE, 64, 72)),
    ],
)
def test_the_smallest_budget_is_named_at_once_and_suffices(
    tmp_path: Path, options: dict[str, Any], least: int, size: int
) -> None:
    with pytest.raises(tensorkeep.UsageError, match=r"memory budget .* is too small") as refused:
        CheckpointManager(tmp_path, memory_budget=least * MIB - 1, **options)
    assert f"give at least {least}MiB" in str(refused.value)
    state = {"w": torch.arange(size * MIB // 4, dtype=torch.int32)}
    with CheckpointManager(tmp_path, memory_budget=least * MIB, **options) as manager:
        for number in (1, 2):
            state["w"] += 1
            report = manager.save(number, state).wait()
            assert report.peak_buffer_bytes <= least * MIB
        assert same(manager.restore(), state)


def test_deciding_for_a_compression_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_compression, "SMALLEST", 1)
    budget = 128 * MIB
    with CheckpointManager(tmp_path, memory_budget=budget, compression="auto") as manager:
        report = manager.save(1, {"w": zeros(80), "v": zeros(60)}).wait()
    assert report.auto is not None
    assert report.auto["rates"] is not None
    assert report.peak_buffer_bytes <= budget


def test_an_error_in_close_does_not_hide_that_of_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError) as raised, CheckpointManager(tmp_path):
        monkeypatch.setattr(SaveQueue, "drain", mock.Mock(side_effect=MemoryError("none left")))
        _ = 1 / 0
    assert "none left" in raised.value.__notes__[0]


def test_steps_are_not_listed_if_all_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": zeros(1)}).wait()
    monkeypatch.setattr("tensorkeep.runs.backends.LocalBackend.summaries", lambda place: pytest.fail("looked"))
    manager.save(2, {"w": zeros(1)}).wait()
    manager.close()


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("stride", [401, *exhaustive(7)])
def test_ctrl_c_at_any_place_of_a_save_hangs_nothing(
    tmp_path: Path, gate: threading.Event, queued: bool, stride: int, record_property: Any
) -> None:
    state, other = many(1, 2), many(1, 2, 3)
    gate.set()
    for count in itertools.count(0, stride):
        when_busy = "replace" if queued else "wait"
        with CheckpointManager(tmp_path / str(count), when_busy=when_busy, keep_last=1) as manager:
            if queued:
                gate.clear()
                manager.save(1, state)
                manager.save(2, state)
            came = interrupted_at(count, partial(manager.save, 3, state), KeyboardInterrupt())
            gate.set()
            if count % 2:
                manager.wait()  # so that the thread looks for a queued save before the next one comes
            manager.save(4, other).wait()
            manager.save(5, other).wait()
            assert same(manager.restore(5), other)
        if not came:
            break
    assert count > 20
    record_property("cases", count // stride)


def test_a_state_larger_than_half_of_the_memory_keeps_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SaveMemory()
    pools = []

    def available() -> int:
        return 600 * MIB - sum(pool.allocated_bytes for pool in pools)

    monkeypatch.setattr("tensorkeep.checkpoint.background.available_bytes", available)
    for _ in range(4):
        memory.working(1, delta=False)
        pool = memory.staging(500 * MIB, from_cuda=False)
        pools[:] = [pool]
        loans = [pool.acquire(96 * MIB) for _ in range(3)]
        for loan in loans:
            loan.release()
        assert pool.budget == 300 * MIB
    memory.close()


class _InterruptingLock:
    """The lock of a queue. After a save was queued under it, the thread takes that save, and only then comes Ctrl-C."""

    def __init__(self, queue: SaveQueue, gate: threading.Event) -> None:
        self._queue, self._gate, self._lock, self._caller = queue, gate, queue._lock, threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        queued = self._queue._queued
        self._lock.release()
        if queued is None or threading.get_ident() != self._caller or self._gate.is_set():
            return
        self._gate.set()
        while self._queue._running is not queued and not queued.finished.is_set():
            time.sleep(0.001)
        raise KeyboardInterrupt


def test_ctrl_c_does_not_take_the_copies_of_a_save_that_the_thread_has_begun(
    tmp_path: Path, gate: threading.Event
) -> None:
    state = many(25, 2)
    with CheckpointManager(tmp_path, when_busy="replace") as manager:
        manager.save(1, state)
        saves = manager._queue
        saves._lock = _InterruptingLock(saves, gate)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            manager.save(2, state)
        manager.save(3, state).wait()
        assert same(manager.restore(2), state)
