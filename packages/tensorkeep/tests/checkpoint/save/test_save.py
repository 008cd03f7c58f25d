"""What `save` refuses, reports and guarantees."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import tensorkeep
from tensorkeep.state.tree import flatten
from tensorkeep.storage.commit import Commit
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same


def test_the_report(tmp_path: Path) -> None:
    report = tensorkeep.save({"w": torch.zeros(10_000)}, tmp_path / "deep" / "er" / "ckpt", compression="lossless")
    stored = sum(file.stat().st_size for file in (tmp_path / "deep" / "er" / "ckpt").iterdir())
    assert report.stored_bytes == stored < 40_000 == report.state_bytes
    assert report.path == str(tmp_path / "deep" / "er" / "ckpt")
    assert (report.format, report.compression, report.tensors) == ("native", "lossless", 1)
    assert 0 < report.peak_buffer_bytes <= 256 * 1024**2
    assert report.as_dict()["tensors"] == 1


def test_unsupported_values_and_wrong_calls_are_named_before_a_byte_is_written(tmp_path: Path) -> None:
    values: dict[str, dict[str, Any]] = {
        "model.f": {"model": {"f": lambda x: x}},
        "a.1.b": {"a": [1, {"b": object()}]},
        "sparse": {"sparse": torch.eye(3).to_sparse()},
        "meta": {"meta": torch.empty(3, device="meta")},
        "objects": {"objects": np.array([object()])},
        "class": {"class": torch.nn.Linear},
    }
    for key, state in values.items():
        with case(key):
            with pytest.raises(tensorkeep.UnsupportedLeafError) as unsupported:
                tensorkeep.save({"fine": torch.ones(3), **state}, tmp_path / "folder" / "ckpt")
            assert unsupported.value.name == key
            assert unsupported.value.remedy
    calls: list[tuple[dict[str, Any], str]] = [
        *(({"compression": "losless"}, "losless"), ({"memory_budget": 1000}, "memory budget")),
        *(({"shard_bits": 5}, "shard_bits"), ({"shard_bytes": 0}, "shard_bytes"), ({"threads": 0}, "threads")),
        *(({"metadata": wrong}, "metadata") for wrong in ({"x": (1, 2)}, {"x": float("nan")}, {"x": {1, 2}}, [1])),
    ]
    for options, expected in calls:
        with case(options):
            with pytest.raises(tensorkeep.UsageError, match=expected) as caught:
                tensorkeep.save({"w": torch.ones(3)}, tmp_path / "folder" / "ckpt", **options)
            assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("compression", ["none", "lossless"])
def test_odd_states(tmp_path: Path, compression: str) -> None:
    states = [{}, {"n": 1}, [], torch.ones(3), {"e": torch.empty(0)}, [torch.zeros(2), None], scheduler_state()]
    for state in states:
        with case(state):
            tensorkeep.save(state, tmp_path / "ckpt", compression=compression, overwrite=True)
            assert tensorkeep.verify(tmp_path / "ckpt").ok
            assert same(tensorkeep.load(tmp_path / "ckpt"), state)


def scheduler_state() -> dict[str, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict()
    assert type(state["milestones"]) is Counter
    return state


def test_parts_and_shards_become_files(tmp_path: Path) -> None:
    state = {
        "model": {"a": torch.zeros(100), "b": torch.ones(100), "c": torch.ones(10)},
        "../evil": {"x": torch.ones(1)},
        "MODEL": {"x": torch.ones(2)},
        "loose": torch.ones(3),
    }
    tensorkeep.save(state, tmp_path / "ckpt", shard_bytes="500")
    names = sorted(file.name for file in (tmp_path / "ckpt").iterdir())
    assert "%2E%2E%2Fevil.safetensors" in names
    assert len([name for name in names if name.startswith("model-") and "-of-00002" in name]) == 2
    assert same(tensorkeep.load(tmp_path / "ckpt"), state)


def test_many_small_tensors_share_pages_and_lossless_never_ends_larger_than_raw_and_its_headers(tmp_path: Path) -> None:
    # Odd sizes, so that nearly every page of the file is shared by several tensors and every task by two.
    noise = torch.randint(0, 255, (17 * 1024**2 + 1,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state = {f"t{i}": noise[i * 5000 :][: i * 7 % 5000 + 1].clone() for i in range(300)}
    state["big"] = noise
    for compression in ("none", "lossless"):
        tensorkeep.save(state, tmp_path / compression, compression=compression)
        assert same(tensorkeep.load(tmp_path / compression), state)
    report = tensorkeep.save({"w": noise}, tmp_path / "ckpt", compression="lossless")
    assert report.stored_bytes < noise.nbytes + 16 * 1024
    # What does not shrink is stored as it is, for other tools to read.
    assert torch.equal(safetensors.torch.load_file(tmp_path / "ckpt" / "model.tensorkeep")["w"], noise)


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    native, others = {"m": "native", "step-1.5": "native"}, {"m.safetensors": "safetensors", "m.pt": "torch"}
    for name, format in {**native, **others, "m.PTH": "torch"}.items():
        with case(name):
            assert tensorkeep.save(state, tmp_path / name).format == format
            assert (tmp_path / name).is_dir() == (name in native)
            assert same(tensorkeep.load(tmp_path / name), state)
    assert tensorkeep.save(state, tmp_path / "x.pt", format="native").format == "native"
    torch.save(scheduler_state(), tmp_path / "s.pt")
    assert same(tensorkeep.load(tmp_path / "s.pt"), scheduler_state())
    with pytest.raises(tensorkeep.UnsupportedError, match="did you mean 'safetensors'"):
        tensorkeep.save({}, tmp_path / "ckpt", format="safetensor")


@pytest.mark.parametrize("background", [False, True])
def test_times_begin_at_the_call(tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    """The state takes two seconds to read, and three to become visible."""
    now, real = [0.0], Commit.publish

    def read(state: object, *arguments: Any) -> Any:
        now[0] += 2
        return flatten(state, *arguments)

    def publish(commit: Commit, manifest: bytes) -> None:
        real(commit, manifest)  # waits for the gate
        now[0] += 3

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("tensorkeep.checkpoint.saving.flatten", read)
    monkeypatch.setattr(Commit, "publish", publish)
    if background:
        pending = tensorkeep.save_async({"w": torch.ones(3)}, tmp_path / "c")
        gate.set()
        report = pending.wait()
    else:
        gate.set()
        report = tensorkeep.save({"w": torch.ones(3)}, tmp_path / "c", memory_budget="64MiB")
    assert (report.stall_seconds, report.durable_seconds, report.seconds) == (2 if background else 5, 5, 5)
