"""What `save` refuses, reports and guarantees."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.state.tree import flatten
from tensorkeep.testing.equality import same


def test_the_report(tmp_path: Path) -> None:
    report = tensorkeep.save({"w": torch.zeros(10_000)}, tmp_path / "deep" / "er" / "ckpt", compression="lossless")
    stored = sum(file.stat().st_size for file in (tmp_path / "deep" / "er" / "ckpt").iterdir())
    assert report.stored_bytes == stored < 40_000 == report.state_bytes
    assert report.path == str(tmp_path / "deep" / "er" / "ckpt")
    assert (report.format, report.compression, report.tensors) == ("native", "lossless", 1)
    assert 0 < report.stall_seconds <= report.durable_seconds <= report.seconds
    assert 0 < report.peak_buffer_bytes <= 256 * 1024**2
    assert report.as_dict()["tensors"] == 1


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"model": {"f": lambda x: x}}, "model.f"),
        ({"a": [1, {"b": object()}]}, "a.1.b"),
        ({"s": torch.eye(3).to_sparse()}, "s"),
        ({"m": torch.empty(3, device="meta")}, "m"),
        ({"o": np.array([object()])}, "o"),
        ({"module": torch.nn.Linear}, "module"),
    ],
    ids=["function", "object", "sparse", "meta", "object array", "class"],
)
def test_unsupported_values_are_named_before_a_byte_is_written(tmp_path: Path, state: Any, key: str) -> None:
    with pytest.raises(tensorkeep.UnsupportedLeafError) as caught:
        tensorkeep.save({"fine": torch.ones(3), **state}, tmp_path / "folder" / "ckpt")
    assert caught.value.name == key
    assert caught.value.remedy
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compression": "losless"}, "losless"),
        ({"shard_bits": 5}, "shard_bits"),
        ({"shard_bytes": 0}, "shard_bytes"),
        ({"threads": 0}, "threads"),
        ({"memory_budget": 1000}, "memory budget"),
        ({"metadata": {"x": (1, 2)}}, "metadata"),
        ({"metadata": {"x": float("nan")}}, "metadata"),
        ({"metadata": {"x": {1, 2}}}, "metadata"),
        ({"metadata": [1]}, "metadata"),
    ],
    ids=str,
)
def test_wrong_calls(tmp_path: Path, options: Any, expected: str) -> None:
    with pytest.raises(tensorkeep.UsageError, match=expected) as caught:
        tensorkeep.save({"w": torch.ones(3)}, tmp_path / "ckpt", **options)
    assert caught.value.remedy
    assert not (tmp_path / "ckpt").exists()


def test_an_unknown_format_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(tensorkeep.UnsupportedError, match="did you mean 'safetensors'"):
        tensorkeep.save({}, tmp_path / "ckpt", format="safetensor")


@pytest.mark.parametrize("compression", ["none", "lossless"])
@pytest.mark.parametrize(
    "state", [{}, {"n": 1}, [], torch.ones(3), {"e": torch.empty(0)}, [torch.zeros(2), None]], ids=str
)
def test_odd_states(tmp_path: Path, state: Any, compression: str) -> None:
    tensorkeep.save(state, tmp_path / "ckpt", compression=compression)
    assert tensorkeep.verify(tmp_path / "ckpt").ok
    assert same(tensorkeep.load(tmp_path / "ckpt"), state)


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


def test_many_small_tensors_share_pages(tmp_path: Path) -> None:
    # Odd sizes, so that nearly every page of the file is shared by several tensors and every task by two.
    generator = torch.Generator().manual_seed(0)
    state = {
        f"t{i}": torch.randint(0, 255, (i * 7 % 5000 + 1,), dtype=torch.uint8, generator=generator) for i in range(900)
    }
    state["big"] = torch.randint(0, 255, (40 * 1024**2 + 1,), dtype=torch.uint8, generator=generator)
    for compression in ("none", "lossless"):
        tensorkeep.save(state, tmp_path / compression, compression=compression)
        assert same(tensorkeep.load(tmp_path / compression), state)


def test_lossless_never_ends_larger_than_raw_and_its_headers(tmp_path: Path) -> None:
    noise = torch.randint(0, 255, (40 * 1024**2,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    report = tensorkeep.save({"w": noise}, tmp_path / "ckpt", compression="lossless")
    assert report.stored_bytes < noise.nbytes + 16 * 1024
    # What does not shrink is stored as it is, for other tools to read.
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "ckpt" / "model.tensorkeep")["w"], noise)


@pytest.mark.parametrize(
    ("name", "format"),
    [("m.safetensors", "safetensors"), ("m.pt", "torch"), ("m.PTH", "torch"), ("m", "native"), ("step-1.5", "native")],
)
def test_the_suffix_decides_the_format(tmp_path: Path, name: str, format: str) -> None:
    report = tensorkeep.save({"w": torch.ones(3)}, tmp_path / name)
    assert report.format == format
    assert (tmp_path / name).is_dir() == (format == "native")
    assert same(tensorkeep.load(tmp_path / name), {"w": torch.ones(3)})
    assert tensorkeep.save({"w": torch.ones(3)}, tmp_path / "x.pt", format="native").format == "native"


def test_the_time_counts_from_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorkeep.checkpoint.save import begin as module

    def slow(state: object, **options: Any) -> Any:
        time.sleep(0.2)
        return flatten(state, **options)

    monkeypatch.setattr(module, "flatten", slow)
    report = tensorkeep.save({"w": torch.ones(3)}, tmp_path / "c", memory_budget="64MiB")
    assert report.seconds >= report.stall_seconds >= 0.2


def test_a_schedulers_state(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict()
    assert type(state["milestones"]) is Counter
    tensorkeep.save(state, tmp_path / "c")
    assert same(tensorkeep.load(tmp_path / "c"), state)
    torch.save(state, tmp_path / "s.pt")
    assert same(tensorkeep.load(tmp_path / "s.pt"), state)
