"""Comparing checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.state.dtypes import BY_NAME
from holdfast.testing.equality import same


def base() -> dict[str, Any]:
    return {"model": {"w": torch.arange(100.0), "b": torch.zeros(3)}, "step": 1, "lr": 0.1}


def compare(tmp_path: Path, a: Any, b: Any, **options: Any) -> holdfast.DiffReport:
    holdfast.save(a, tmp_path / "a")
    holdfast.save(b, tmp_path / "b", compression="lossless")
    return holdfast.diff(tmp_path / "a", tmp_path / "b", **options)


def test_equal(tmp_path: Path) -> None:
    report = compare(tmp_path, base(), base())
    assert report.equal
    assert report.identical == 2


def test_every_kind_of_difference(tmp_path: Path) -> None:
    b = base()
    b["model"]["w"][[3, 7]] += torch.tensor([0.5, -2.0])
    b["model"]["new"] = torch.ones(1)
    b["step"] = 2
    a = base()
    a["model"] |= {"old": torch.ones(1), "shape": torch.ones(2, 3), "type": torch.ones(2)}
    b["model"] |= {"shape": torch.ones(3, 2), "type": torch.ones(2).half()}
    report = compare(tmp_path, a, b)
    assert not report.equal
    assert (report.added, report.removed) == (["model.new"], ["model.old"])
    (changed,) = report.changed
    assert (changed.name, changed.elements, changed.different, changed.share) == ("model.w", 100, 2, 0.02)
    assert changed.largest == 2.0
    assert [(m.name, m.a, m.b) for m in report.reshaped] == [("model.shape", [2, 3], [3, 2])]
    assert [(m.name, m.a, m.b) for m in report.retyped] == [("model.type", "float32", "float16")]
    assert [(m.name, m.a, m.b) for m in report.values] == [("step", 1, 2)]
    assert report.identical == 1
    assert report.as_dict()["changed"][0]["share"] == 0.02


def test_tolerance(tmp_path: Path) -> None:
    b = base()
    b["model"]["w"] *= 1 + 1e-6
    assert not compare(tmp_path / "1", base(), b).equal
    assert compare(tmp_path / "2", base(), b, rtol=1e-5).equal
    assert compare(tmp_path / "3", base(), b, atol=1e-3).equal
    assert not compare(tmp_path / "4", base(), b, atol=1e-5).equal
    with pytest.raises(holdfast.UsageError, match="tolerance"):
        compare(tmp_path / "5", base(), b, atol=-1.0)


def test_special_numbers(tmp_path: Path) -> None:
    nan, inf = math.nan, math.inf
    a = {"w": torch.tensor([nan, nan, 0.0, inf, 1.0])}
    b = {"w": torch.tensor([nan, 1.0, -0.0, inf, inf])}
    exact = compare(tmp_path / "1", a, b)
    assert exact.changed[0].different == 3
    assert exact.changed[0].largest == inf
    assert compare(tmp_path / "2", a, b, atol=1.0).changed[0].different == 2


@pytest.mark.parametrize("name", BY_NAME)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = BY_NAME[name]
    size = dtype.itemsize
    raw = np.zeros(64 * size, np.uint8)
    raw[5 * size] = 1
    a, b = (
        torch.from_numpy(data).view(dtype.torch) if dtype.has_torch else data.view(dtype.numpy)
        for data in (np.zeros(64 * size, np.uint8), raw)
    )
    (changed,) = compare(tmp_path, {"w": a}, {"w": b}).changed
    assert (changed.elements, changed.different) == (64, 1)
    assert changed.largest > 0


def test_several_blocks(tmp_path: Path) -> None:
    a = torch.zeros(5 * 2**20 + 3)
    b = a.clone()
    b[[0, 4 * 2**20, -1]] = torch.tensor([1.0, 3.0, -2.0])
    (changed,) = compare(tmp_path, {"w": a}, {"w": b}, threads=2).changed
    assert (changed.different, changed.largest) == (3, 3.0)


def test_views_are_compared_with_tensors_of_their_own(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    assert compare(tmp_path / "1", {"w": w, "v": w.T}, {"w": w, "v": w.T.contiguous()}).equal
    (changed,) = compare(tmp_path / "2", {"w": w, "v": w[1]}, {"w": w, "v": torch.zeros(4)}).changed
    assert (changed.name, changed.different) == ("v", 4)


def test_select_compares_only_those(tmp_path: Path) -> None:
    b = base()
    b["model"]["w"][0] = 9
    b["step"] = 5
    assert compare(tmp_path / "1", base(), b, select="*.b").equal
    assert not compare(tmp_path / "2", base(), b, select="*.w").equal


def test_across_formats(tmp_path: Path) -> None:
    holdfast.save(base(), tmp_path / "native")
    torch.save(base(), tmp_path / "x.pt")
    assert holdfast.diff(tmp_path / "native", tmp_path / "x.pt").equal


@pytest.mark.parametrize("to", ["native", "safetensors", "torch"])
@pytest.mark.parametrize("source", ["native", "lossless", "safetensors", "torch"])
def test_convert_keeps_everything(tmp_path: Path, source: str, to: str) -> None:
    state = base() | {"tied": None, "nested": [torch.ones(3).bfloat16(), (1, "x")]}
    state["tied"] = state["model"]["w"]
    how = {"compression": "lossless"} if source == "lossless" else {"format": source}
    holdfast.save(state, tmp_path / "source", **how)
    report = holdfast.convert(tmp_path / "source", tmp_path / "target", to=to)
    assert report.format == to
    found = holdfast.load(tmp_path / "target")
    assert same(found, state)
    assert found["tied"].data_ptr() == found["model"]["w"].data_ptr()
    assert holdfast.diff(tmp_path / "source", tmp_path / "target").equal


def test_convert_some(tmp_path: Path) -> None:
    holdfast.save(base(), tmp_path / "a", metadata={"run": 3})
    holdfast.convert(tmp_path / "a", tmp_path / "b", select="model.w", compression="lossless")
    assert same(holdfast.load(tmp_path / "b"), {"model": {"w": torch.arange(100.0)}, "step": 1, "lr": 0.1})
    with holdfast.open(tmp_path / "b") as opened:
        assert opened.metadata == {"run": 3}
    with pytest.raises(holdfast.UnsupportedError, match="no place for metadata"):
        holdfast.convert(tmp_path / "a", tmp_path / "a.pt", to="torch")
    holdfast.convert(tmp_path / "a", tmp_path / "a.pt", to="torch", drop_metadata=True)
    assert same(holdfast.load(tmp_path / "a.pt"), base())
    w = torch.ones(3)
    holdfast.save({"x": w, "y": w}, tmp_path / "tied")
    with pytest.raises(holdfast.UsageError, match="view of 'x'"):
        holdfast.convert(tmp_path / "tied", tmp_path / "c", select="y")


def test_convert_refuses_a_damaged_source_and_leaves_nothing(tmp_path: Path) -> None:
    holdfast.save({"w": torch.arange(3000.0)}, tmp_path / "a")
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    with pytest.raises(holdfast.CorruptCheckpointError, match="block 0"):
        holdfast.convert(tmp_path / "a", tmp_path / "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
