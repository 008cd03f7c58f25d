"""Concurrent saves: queued, replaced, refused, interrupted, failed, forked; none hangs, and no error is lost."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from linecache import getline
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorkeep
from tensorkeep import CheckpointManager, KeepBest
from tensorkeep.checkpoint.save import job, queue
from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.checkpoint.save.queue import SaveQueue
from tensorkeep.state.leaf import Leaf
from tensorkeep.testing.equality import same

MIB = 1024**2

# Whatever is wrong here shows as a hang.
pytestmark = pytest.mark.timeout(60)


def zeros(megabytes: int, value: int = 0) -> torch.Tensor:
    return torch.full((megabytes * MIB,), value, dtype=torch.uint8)


def many(megabytes: int, count: int, value: int = 0) -> dict[str, torch.Tensor]:
    return {f"w{number}": zeros(megabytes, value) for number in range(count)}


def gathered(value: int = 0) -> dict[str, torch.Tensor]:
    """Return a state whose last tensor has to be gathered, which a test can make fail."""
    return {"w": zeros(25, value), "z": torch.full((1000, 1000), value, dtype=torch.uint8).t()}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Delay every save before it becomes visible, until the event is set."""
    event = threading.Event()
    real = tensorkeep.io.commit.Commit.publish

    def publish(commit: Any) -> None:
        event.wait(30)
        real(commit)

    monkeypatch.setattr("tensorkeep.io.commit.Commit.publish", publish)
    yield event
    event.set()


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


def fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_buffers_of_another_layout_do_not_use_up_the_budget(tmp_path: Path, name: str) -> None:
    tensorkeep.save({"w": zeros(120)}, tmp_path / "first")
    tensorkeep.load(tmp_path / "first")  # leaves large buffers behind for the next call
    state = many(9, 12)
    tensorkeep.save_async(state, tmp_path / name).wait()
    assert same(tensorkeep.load(tmp_path / name), state)


def test_a_kept_pool_holds_a_state_of_another_layout(tmp_path: Path, gate: threading.Event) -> None:
    large, small = {"w": zeros(160)}, many(9, 16)
    gate.set()
    with CheckpointManager(tmp_path, when_busy="replace", keep_last=1) as manager:
        manager.save(1, large)
        manager.wait()
        gate.clear()
        for number, state in enumerate([small, large], start=2):
            manager.save(number, state)
        gate.set()
        manager.wait()
        gate.clear()
        for number in (4, 5, 6):
            manager.save(number, small)
        gate.set()
        manager.wait()
        assert [step.number for step in manager.steps()] == [6]


def test_a_queued_save_that_cannot_be_copied_does_not_block_the_next(
    tmp_path: Path, gate: threading.Event, gathering: list[Callable[[], None]]
) -> None:
    manager = CheckpointManager(tmp_path, when_busy="replace")
    manager.save(1, gathered())
    gathering.append(fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        manager.save(2, gathered())
    manager.save(3, gathered(3))
    gate.set()
    manager.close()
    assert [step.number for step in manager.steps()] == [1, 3]
    assert same(manager.restore(3), gathered(3))


def test_ctrl_c_while_a_queued_save_is_copied_does_not_block_the_next(
    tmp_path: Path, gate: threading.Event, gathering: list[Callable[[], None]]
) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

    manager = CheckpointManager(tmp_path, when_busy="replace")
    manager.save(1, gathered())
    gathering.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, gathered())
    manager.save(3, gathered())
    gate.set()
    manager.close()
    assert [step.number for step in manager.steps()] == [1, 3]


def test_a_save_that_is_refused_replaces_nothing(tmp_path: Path, gate: threading.Event) -> None:
    manager = CheckpointManager(tmp_path, when_busy="replace")
    manager.save(1, {"w": zeros(1)})
    queued = manager.save(2, {"w": zeros(1)})
    with pytest.raises(tensorkeep.UnsupportedLeafError):
        manager.save(3, {"w": object()})
    gate.set()
    manager.close()
    assert queued.wait().state_bytes == MIB
    assert [step.number for step in manager.steps()] == [1, 2]


INTERRUPTED_START = """
import sys, threading, torch, tensorkeep
real = threading.Thread.start
def start(thread):
    real(thread)
    if thread.name == "tensorkeep-save":
        raise KeyboardInterrupt
threading.Thread.start = start
try:
    tensorkeep.save_async({"w": torch.zeros(5_000_000)}, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_while_the_thread_starts_does_not_hang_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_START, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_a_thread_that_cannot_start_is_an_error_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("tensorkeep.checkpoint.save.queue.THREAD_START_SECONDS", 0.1)
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            manager.save(1, {"w": zeros(1)})
    manager.save(2, {"w": zeros(1)})
    manager.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_a_queued_save_needs_no_new_thread(tmp_path: Path, gate: threading.Event) -> None:
    manager = CheckpointManager(tmp_path, when_busy="replace")
    manager.save(1, {"w": zeros(1)})
    manager.save(2, {"w": zeros(1)})
    before = {thread.ident for thread in threading.enumerate() if thread.name == "tensorkeep-save"}
    assert len(before) == 1
    gate.set()
    manager.close()
    assert [step.number for step in manager.steps()] == [1, 2]


def test_threads_share_a_manager(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for number in range(first, first + 5):
                manager.save(number, {"w": zeros(2, number)})
        except BaseException as error:
            errors.append(error)

    with pytest.warns(UserWarning, match="there are later ones"):
        threads = [threading.Thread(target=work, args=(first,)) for first in (30, 20, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    manager.close()
    assert not errors
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


def in_child(work: Callable[[], None]) -> int:
    """Return the exit status of a forked child that does the work, at most 10 seconds of it."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            work()
            os._exit(0)
        except tensorkeep.BusyError:
            os._exit(33)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_restores_beside_its_parents_save(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": zeros(1, 5)}).wait()
    gate.clear()
    manager.save(2, {"w": zeros(1)})

    def work() -> None:
        assert int(manager.restore()["w"][0]) == 5

    assert in_child(work) == 0
    gate.set()
    manager.close()


def test_a_child_may_not_write_beside_its_parent(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1000)}  # made here: a forked child must not start torch's threads
    manager = CheckpointManager(tmp_path)
    manager.save(1, state).wait()
    assert in_child(lambda: manager.save(2, state).wait() and None) == 33
    manager.save(3, state).wait()
    manager.close()
    assert in_child(lambda: manager.save(4, state).wait() and None) == 0
    assert [step.number for step in manager.steps()] == [1, 3, 4]


def test_ctrl_c_in_close_keeps_others_out_until_the_save_is_over(tmp_path: Path, gate: threading.Event) -> None:
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {"w": zeros(1)})
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    with pytest.raises(tensorkeep.BusyError):
        CheckpointManager(tmp_path).save(2, {"w": zeros(1)})
    gate.set()
    manager.close()
    with CheckpointManager(tmp_path) as other:
        other.save(2, {"w": zeros(1)})


def test_a_step_saved_after_going_back_is_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=2) as manager:
        for number in (500, 900, 1000):
            manager.save(number, {"step": number}).wait()
        assert [step.number for step in manager.steps()] == [900, 1000]
        with pytest.warns(UserWarning, match="up to step 1000, from which latest"):
            report = manager.save(600, {"step": 600}).wait()
        assert Path(report.path).exists()
        assert manager.restore(600) == {"step": 600}


def test_steps_that_cannot_be_deleted_cause_a_warning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tensorkeep.checkpoint.manager.place.remove_checkpoint

    def remove_checkpoint(path: Path) -> None:
        if path.name == "step-000001":
            raise PermissionError(13, "Permission denied")
        real(path)

    monkeypatch.setattr("tensorkeep.checkpoint.manager.place.remove_checkpoint", remove_checkpoint)
    manager = CheckpointManager(tmp_path, keep_last=1)
    manager.save(1, {"w": zeros(1)}).wait()
    assert manager.save(2, {"w": zeros(1)}).wait().state_bytes == MIB
    with pytest.warns(UserWarning, match=r"not deleted.*step-000001"):
        manager.save(3, {"w": zeros(1)})
    with pytest.warns(UserWarning, match=r"not deleted.*step-000001"):
        manager.close()
    assert 3 in [step.number for step in manager.steps()]


def test_an_ambiguous_metric_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_best=1)
    with pytest.raises(tensorkeep.UsageError, match="accuracy, loss"):
        manager.save(1, {"w": zeros(1)}, metrics={"loss": 1.0, "accuracy": 0.5})
    manager.close()
    with CheckpointManager(tmp_path, keep_best=KeepBest(1, "loss")) as clear:
        clear.save(1, {"w": zeros(1)}, metrics={"loss": 1.0, "accuracy": 0.5})
    assert [step.number for step in clear.steps()] == [1]


@pytest.mark.parametrize("metrics", [{"loss": 10**400}, {"\ud800": 1.0}, {"loss": "many"}])
def test_invalid_metrics_are_refused(tmp_path: Path, metrics: dict[str, Any]) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(tensorkeep.UsageError, match="the metric"):
        manager.save(1, {"w": zeros(1)}, metrics=metrics)


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({}, 128),
        ({"when_busy": "replace"}, 256),
        ({"incremental": "delta"}, 136),
        ({"incremental": "delta", "when_busy": "replace"}, 272),
        ({"asynchronous": False}, 64),
        ({"asynchronous": False, "incremental": "delta"}, 108),
    ],
)
def test_the_smallest_budget_is_named_at_once_and_suffices(tmp_path: Path, options: dict[str, Any], least: int) -> None:
    with pytest.raises(tensorkeep.UsageError, match=r"memory budget .* is too small") as refused:
        CheckpointManager(tmp_path, memory_budget=least * MIB - 1, **options)
    assert f"give at least {least}MiB" in str(refused.value)
    state = {"w": torch.arange(60 * MIB // 4, dtype=torch.int32)}
    with CheckpointManager(tmp_path, memory_budget=least * MIB, **options) as manager:
        for number in (1, 2):
            state["w"] += 1
            report = manager.save(number, state).wait()
            assert report.peak_buffer_bytes <= least * MIB
        assert same(manager.restore(), state)


def test_deciding_for_a_compression_stays_within_the_budget(tmp_path: Path) -> None:
    budget = 160 * MIB
    state = {"w": torch.randn(80 * MIB).bfloat16(), "v": torch.randn(60 * MIB).bfloat16()}
    with CheckpointManager(tmp_path, memory_budget=budget, compression="auto") as manager:
        report = manager.save(1, state).wait()
    assert report.auto is not None
    assert report.auto["rates"] is not None
    assert report.peak_buffer_bytes <= budget


def test_an_error_in_close_does_not_hide_that_of_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(queue: SaveQueue) -> None:
        raise MemoryError("none left")

    with pytest.raises(ZeroDivisionError) as raised, CheckpointManager(tmp_path):
        monkeypatch.setattr(SaveQueue, "drain", drain)
        _ = 1 / 0
    assert "none left" in raised.value.__notes__[0]


def test_steps_are_not_listed_if_all_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": zeros(1)}).wait()
    monkeypatch.setattr("tensorkeep.checkpoint.manager.place.DiskPlace.summaries", lambda place: pytest.fail("looked"))
    manager.save(2, {"w": zeros(1)}).wait()
    manager.close()


def interrupted_at(count: int, call: Callable[[], object]) -> bool:
    """Call; raise KeyboardInterrupt before the given line of the save; return whether it was reached."""
    files = {job.__file__, queue.__file__}
    left = count

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        # A lock is left in its own line, where no Ctrl-C comes before it is.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_before_any_line_of_a_save_hangs_nothing(
    tmp_path: Path, gate: threading.Event, queued: bool, stride: int, record_property: Any
) -> None:
    state, other = many(1, 2), many(1, 2, 3)
    gate.set()
    for count in itertools.count(0, stride):
        with CheckpointManager(
            tmp_path / str(count), when_busy="replace" if queued else "wait", keep_last=1
        ) as manager:
            if queued:
                gate.clear()
                manager.save(1, state)
                manager.save(2, state)
            came = interrupted_at(count, lambda manager=manager: manager.save(3, state))  # type: ignore[misc]
            gate.set()
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

    monkeypatch.setattr("tensorkeep.checkpoint.save.memory.available_bytes", available)
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
