"""Writing checkpoints that DCP reads, and the cleanup after failed saves."""

import os
import signal
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils

import tensorkeep
from formats.dcp.checkpoints import read, real_save, trained
from formats.native.steps import flip
from tensorkeep.errors import CorruptCheckpointError, OutOfMemoryError, StoreError, UsageError
from tensorkeep.formats.base import WriteSettings
from tensorkeep.formats.dcp import FORMAT, writer
from tensorkeep.state.tree import flatten
from tensorkeep.storage.parallel import Cancellation
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import difference
from tensorkeep.testing.format_suite import names_in, noise


def test_dcp_loads_our_checkpoint_into_a_nested_state(tmp_path: Path) -> None:
    state = trained()
    tensorkeep.save(state, tmp_path / "c", format="dcp", thread_count=2)
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None
    target: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(7, 5)}}, "param_groups": [{"lr": 0.0, "betas": None}]},
        "step": 0,
    }
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert difference(dict(state["model"]), target["model"]) is None
    assert torch.equal(target["optimizer"]["state"][0]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"])
    assert target["optimizer"]["param_groups"] == [{"lr": 0.001, "betas": (0.9, 0.999)}]
    assert target["step"] == 5


def test_torch_converts_our_checkpoint_as_it_does_dcps(tmp_path: Path) -> None:
    state = {**trained(), "list": [torch.ones(2), {"x": torch.zeros(1)}], "text": "ü", "empty": {}}
    real_save(state, tmp_path / "theirs")
    tensorkeep.save(state, tmp_path / "ours", format="dcp")
    found = []
    for name in ("theirs", "ours"):
        format_utils.dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        found.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert difference(*found) is None


def test_tied_weights_are_stored_under_both_names(tmp_path: Path) -> None:
    weight = noise("float32", 6, 4)
    state = {"embed": weight, "head": weight, "turned": weight.t(), "rows": weight[2:4], "huge": weight[0].expand(9, 4)}
    tensorkeep.save(state, tmp_path / "c", format="dcp")
    target = {name: torch.zeros(tensor.shape) for name, tensor in state.items() if name != "huge"}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    for name, tensor in target.items():
        assert torch.equal(tensor, state[name]), name
    found = tensorkeep.load(tmp_path / "c")
    assert found["embed"] is found["head"]
    assert difference(state, found) is None


def test_dtypes_that_torch_lacks_and_odd_names_round_trip(tmp_path: Path) -> None:
    import ml_dtypes

    array = np.arange(12).astype(ml_dtypes.float8_e3m4).reshape(3, 4)
    state = OrderedDict({"": array, "of": array[1:], "a.b": {"c": torch.ones(1)}, "a": {"b.c": torch.zeros(1)}, 3: {4}})
    tensorkeep.save(state, tmp_path / "c", format="dcp")
    assert difference(state, tensorkeep.load(tmp_path / "c")) is None


def test_conversion_holds_one_tensor_for_each_thread_and_reports_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    state = {f"t{number}": torch.full((300_000,), float(number)) for number in range(12)}
    tensorkeep.save(state, tmp_path / "native")
    with tensorkeep.open(tmp_path / "native") as source:
        settings = WriteSettings(threads=2, progress=lambda *counts: seen.append(counts))
        written = FORMAT.write(source._reader.flat, tmp_path / "c", settings)
    assert max(done for done, _ in seen) == 14_400_000 and {total for _, total in seen} == {14_400_000}
    assert 1_200_000 <= written.peak_buffer_bytes <= 2 * 1_200_000
    assert difference(state, read(tmp_path / "c")) is None
    # A damaged source fails it.
    flip(tmp_path / "native" / "model.safetensors", -20)
    with pytest.raises(CorruptCheckpointError):
        tensorkeep.convert(tmp_path / "native", tmp_path / "d", to="dcp")
    assert names_in(tmp_path) == ["c", "native"]


def test_thread_counts_are_from_1_to_256(tmp_path: Path) -> None:
    for count in (0, -1, 257, "2", True):
        with case(repr(count)), pytest.raises(UsageError, match="thread_count"):
            tensorkeep.save({"a": torch.ones(1)}, tmp_path / "c", format="dcp", thread_count=count)
    FORMAT.write(flatten({f"v{n}": n for n in range(300)}), tmp_path / "c", WriteSettings(threads=1024))
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 256


def test_error_in_any_thread_is_raised_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, failed = os.pwrite, threading.Event()

    def failing(fd: int, data: Any, offset: int) -> int:
        # Only the first write of any thread.
        if failed.is_set():
            return real_write(fd, data, offset)
        failed.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(StoreError, match="Input/output error"):
        tensorkeep.save({f"t{n}": torch.ones(9) for n in range(9)}, tmp_path / "c", format="dcp", thread_count=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", [{f"t{n}": torch.ones(9) for n in range(8)}, {f"v{n}": n for n in range(8)}])
def test_out_of_memory_keeps_the_old_checkpoint(state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorkeep.save({"old": torch.zeros(2)}, tmp_path / "c", format="dcp")
    real_torch_save, failed = torch.save, threading.Event()

    def failing(*args: Any, **options: Any) -> None:
        if threading.current_thread().name.endswith("-1"):
            failed.set()
            raise MemoryError
        assert failed.wait(60)
        real_torch_save(*args, **options)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        tensorkeep.save(state, tmp_path / "c", format="dcp", thread_count=2, overwrite=True)
    assert failed.is_set()
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]
    assert difference({"old": torch.zeros(2)}, tensorkeep.load(tmp_path / "c")) is None


def test_interrupt_ends_the_save_in_the_middle_of_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_cancel, cancelled = os.pwrite, Cancellation.cancel, threading.Event()
    writes: list[int] = []

    def interrupted(fd: int, data: Any, offset: int) -> int:
        writes.append(offset)
        if len(writes) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert cancelled.wait(60)
        return real_write(fd, data, offset)

    monkeypatch.setattr("tensorkeep.formats.torch_file.writer._PIECE_BYTES", 4096)
    monkeypatch.setattr(os, "pwrite", interrupted)
    monkeypatch.setattr(Cancellation, "cancel", lambda self: (real_cancel(self), cancelled.set()))
    with pytest.raises(KeyboardInterrupt):
        tensorkeep.save({"t": torch.ones(100_000)}, tmp_path / "c", format="dcp", thread_count=1)
    assert len(writes) <= 2  # of a hundred
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("function", "most"), [("open", 0), ("pwrite", 1)])
def test_no_tensor_is_read_in_vain(function: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    real_check, real_function = writer.fills_its_storage, getattr(os, function)

    def check(leaf: Any) -> bool:
        fetched.append(leaf.name)
        return real_check(leaf)

    def failing(first: Any, *rest: Any, **options: Any) -> Any:
        if function == "open" and not str(first).endswith(".distcp"):
            return real_function(first, *rest, **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "fills_its_storage", check)
    monkeypatch.setattr(os, function, failing)
    with pytest.raises(StoreError, match="No space left"):
        tensorkeep.save({f"t{n}": torch.ones(500_000) for n in range(5)}, tmp_path / "c", format="dcp", thread_count=1)
    assert len(fetched) <= most
