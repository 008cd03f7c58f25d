"""``compression="auto"``: the decision from injected rates, its cost, and failing disks."""

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint import auto_compression
from tensorkeep.checkpoint.auto_compression import Rates
from tensorkeep.errors import StoreError
from tensorkeep.formats.base import BLOCK_BYTES, WriteSettings
from tensorkeep.formats.blockfile.plan import BlockFileOptions, plan_files, tasks_of
from tensorkeep.state.tree import flatten
from tensorkeep.storage.buffers import BufferPool
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same
from tensorkeep.testing.format_suite import FailingDisk, names_in

GB = 1e9
SLOW_DISK = Rates(gather=8 * GB, code=1.4 * GB, compressed_fraction=0.66, disk=0.2 * GB)
FAST_DISK = Rates(gather=8 * GB, code=1.4 * GB, compressed_fraction=0.66, disk=4 * GB)
INCOMPRESSIBLE = Rates(gather=8 * GB, code=3 * GB, compressed_fraction=1.0, disk=0.2 * GB)
ZEROS = Rates(gather=8 * GB, code=6 * GB, compressed_fraction=0.001, disk=4 * GB)
TIE = Rates(gather=1.0, code=1.0, compressed_fraction=1.0, disk=1.0)


@pytest.fixture(autouse=True)
def _nothing_is_known() -> Iterator[None]:
    auto_compression._known.clear()
    yield
    auto_compression._known.clear()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure states of any size."""
    monkeypatch.setattr(auto_compression, "SMALLEST", 1)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured(*rates: Rates | Exception) -> mock.Mock:
    """Return a stand-in for the trial that returns these rates in turn."""
    return mock.Mock(side_effect=rates)


def decide(state: Any, path: Path, measure: mock.Mock, clock: Clock, **settings: Any) -> auto_compression.Decision:
    with BufferPool() as pool:
        return auto_compression.decide(
            flatten(state), path, WriteSettings(pool=pool, **settings), measure=measure, clock=clock
        )


@pytest.mark.parametrize(
    ("rates", "taken"),
    [(SLOW_DISK, "lossless"), (FAST_DISK, "none"), (INCOMPRESSIBLE, "none"), (ZEROS, "lossless"), (TIE, "none")],
    ids=["slow disk", "fast disk", "incompressible", "zeros", "tie"],
)
def test_the_faster_of_the_two_is_taken(tmp_path: Path, tiny: None, rates: Rates, taken: str) -> None:
    decision = decide({"w": torch.zeros(1000)}, tmp_path / "ckpt", measured(rates), Clock())
    assert (decision.compression, decision.seconds) == (taken, rates.seconds(4000))
    assert decision.seconds[taken] == min(decision.seconds.values())
    assert decision.reason.startswith(f"{taken} is predicted to take")


def test_a_prediction_counts_computing_and_writing() -> None:
    seconds = Rates(gather=3.0, code=1.0, compressed_fraction=0.5, disk=4.0).seconds(12)
    assert seconds["none"] == pytest.approx(5.0)
    assert seconds["lossless"] == pytest.approx((12**2 + 1.5**2) ** 0.5)


def test_small_states_are_not_measured(tmp_path: Path) -> None:
    measure = measured(SLOW_DISK)
    decision = decide({"w": torch.zeros(1000)}, tmp_path / "ckpt", measure, Clock())
    assert (decision.compression, measure.call_count, decision.rates) == ("none", 0, None)
    assert "nothing is measured below" in decision.reason


def test_rates_are_reused_for_a_while_and_for_the_same_kind_of_save(tmp_path: Path, tiny: None) -> None:
    measure, clock = measured(SLOW_DISK, *5 * [FAST_DISK]), Clock()
    state = {"w": torch.zeros(1000)}
    assert not decide(state, tmp_path / "a", measure, clock, threads=2).again
    clock.now += auto_compression.RATES_VALID_SECONDS - 1
    second = decide({"w": torch.ones(1000)}, tmp_path / "b", measure, clock, threads=2)
    assert (second.again, second.compression, measure.call_count) == (True, "lossless", 1)
    clock.now += 2
    third = decide(state, tmp_path / "c", measure, clock, threads=2)
    assert (third.again, third.compression, measure.call_count) == (False, "none", 2)
    others: dict[str, tuple[Any, dict[str, Any]]] = {
        "dtype": ({"w": torch.zeros(1000, dtype=torch.bfloat16)}, {}),
        "size": ({"w": torch.zeros(1001)}, {}),
        "threads": (state, {"threads": 1}),
        "page cache": (state, {"options": BlockFileOptions(direct_io=False)}),
    }
    for calls, (name, (other, settings)) in enumerate(others.items(), start=3):
        with case(name):
            decide(other, tmp_path / "c", measure, clock, **{"threads": 2, **settings})
            assert measure.call_count == calls


def test_a_disk_that_refuses_is_reported_by_the_save(tmp_path: Path, tiny: None) -> None:
    measure = measured(StoreError("cannot write: No space left on device"), SLOW_DISK)
    decision = decide({"w": torch.zeros(1000)}, tmp_path / "ckpt", measure, Clock())
    assert decision.compression == "none"
    assert "No space left on device" in decision.reason
    # The failed measurement is not kept, so the next save measures again.
    assert decide({"w": torch.zeros(1000)}, tmp_path / "ckpt", measure, Clock()).compression == "lossless"


@pytest.mark.parametrize("operation", ["mkdir", "open", "posix_fallocate", "pwrite", "ftruncate", "fsync"])
def test_a_failure_while_measuring_does_not_stop_the_save(
    tmp_path: Path, tiny: None, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failed = getattr(os, operation), []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        ours = isinstance(args[0], int) or str(args[0]).startswith(str(tmp_path))
        reads = operation == "open" and not args[1] & os.O_CREAT
        if failed or reads or not ours:
            return real(*args, **kwargs)
        failed.append(args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, operation, fail_once)
    state = {"w": torch.arange(100_000)}
    report = tensorkeep.save(state, tmp_path / "ckpt", compression="auto")
    assert failed
    assert (report.compression, report.auto["rates"]) == ("none", None)
    assert "No space left on device" in report.auto["reason"]
    assert same(tensorkeep.load(tmp_path / "ckpt"), state)
    assert names_in(tmp_path) == ["ckpt"]


def test_a_full_disk_is_the_saves_own_error(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(os.posix_fallocate)
    disk.fail_at(1)
    monkeypatch.setattr(os, "posix_fallocate", disk)
    with pytest.raises(tensorkeep.StoreError, match="reserve 8,096 bytes: No space left"):
        tensorkeep.save({"w": torch.arange(500)}, tmp_path / "ckpt", compression="auto")
    assert disk.calls == 2
    assert names_in(tmp_path) == []


def test_a_refusal_comes_before_measuring(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ckpt").mkdir()
    monkeypatch.setattr(auto_compression, "_disk_rate", None)
    with pytest.raises(tensorkeep.DestinationExistsError):
        tensorkeep.save({"w": torch.zeros(10)}, tmp_path / "ckpt", compression="auto")
    with pytest.raises(tensorkeep.UnsupportedError, match="auto"):
        tensorkeep.save({"w": torch.zeros(10)}, tmp_path / "ckpt.pt", compression="auto")


@pytest.mark.parametrize("direct", [True, False])
def test_a_trial_measures_this_state_and_leaves_nothing(tmp_path: Path, direct: bool) -> None:
    state = {"zeros": torch.zeros(6 * 1024**2), "strided": torch.zeros(2, 3 * 1024**2).t()}
    with BufferPool() as pool:
        settings = WriteSettings(pool=pool, options=BlockFileOptions(direct_io=direct))
        rates = auto_compression.measure(flatten(state), tmp_path / "new" / "ckpt", settings)
    assert min(rates.gather, rates.code, rates.disk) > 0
    assert rates.compressed_fraction < 0.01
    assert names_in(tmp_path / "new") == []


def test_a_trial_ends_when_the_time_is_up() -> None:
    state = {f"t{i}": torch.zeros(10) for i in range(50)}
    (task,) = [task for plan in plan_files(flatten(state)) for task in tasks_of(plan)]
    clock = Clock()

    def work(block: Any) -> tuple[int, int]:
        clock.now += auto_compression.MEASURING_SECONDS / 4.5
        return block.nbytes, 10

    done = auto_compression._run_trial([[partial(work, block) for block in task]], 1, clock)
    assert done.rate == pytest.approx(5 * 40 / (5 * auto_compression.MEASURING_SECONDS / 4.5))
    assert (done.nbytes, done.stored_bytes) == (200, 50)


def test_a_slow_disk_is_not_written_to_for_long() -> None:
    clock = Clock()

    class SlowFile:
        direct = True
        written: ClassVar[list[int]] = []

        def preallocate(self, size: int) -> None: ...

        def finish(self, size: int) -> None:
            clock.now += 100

        def write(self, offset: int, data: Any) -> None:
            clock.now += auto_compression.MEASURING_SECONDS / 2.5
            self.written.append(len(data))

    file: Any = SlowFile()
    contents = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8).numpy()]
    rate = auto_compression._write_rate(file, contents, clock)
    assert len(file.written) == 3
    assert rate == pytest.approx(sum(file.written) / (3 * auto_compression.MEASURING_SECONDS / 2.5))
    # Through the page cache, nothing is written before the flush.
    file.direct = False
    assert auto_compression._write_rate(file, contents, clock) < rate / 100


def test_the_report_has_the_choice_and_the_reason(tmp_path: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_compression, "measure", mock.Mock(return_value=SLOW_DISK))
    report = tensorkeep.save({"w": torch.zeros(1000)}, tmp_path / "ckpt", compression="auto")
    assert report.compression == "lossless"
    assert report.auto["rates"] == {"gather": 8 * GB, "code": 1.4 * GB, "compressed_fraction": 0.66, "disk": 0.2 * GB}
    assert report.as_dict()["auto"]["seconds"] == report.auto["seconds"] == SLOW_DISK.seconds(4000)
    assert tensorkeep.info(tmp_path / "ckpt").details["compression"] == "lossless"
    again = tensorkeep.convert(tmp_path / "ckpt", tmp_path / "c.tensorkeep", to="safetensors", compression="auto")
    assert (again.compression, again.format) == ("lossless", "safetensors")
    assert tensorkeep.save({}, tmp_path / "raw").auto is None


@pytest.mark.parametrize("options", [{}, {"format": "safetensors", "force": True}], ids=["native", "safetensors"])
@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_direct_io_can_be_forbidden(tmp_path: Path, options: dict[str, Any], compression: str) -> None:
    state = {"w": torch.arange(100_000)}
    given = {"compression": compression, **options}
    if not tensorkeep.save(state, tmp_path / "direct", **given).direct_io:
        pytest.skip("this file system refuses direct I/O")
    report = tensorkeep.save(state, tmp_path / "buffered", direct_io=False, **given)
    assert not report.direct_io
    assert same(tensorkeep.load(tmp_path / "buffered"), state)
    with pytest.raises(tensorkeep.UsageError, match="direct_io is 'no'"):
        tensorkeep.save(state, tmp_path / "other", direct_io="no", **given)
    assert names_in(tmp_path) == ["buffered", "direct"]
