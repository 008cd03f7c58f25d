"""Comparing checkpoints."""

import math
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from tensorkeep.checkpoint.inspect import distances
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.equality import same


def base() -> dict[str, Any]:
    return {"model": {"w": torch.arange(100.0), "b": torch.zeros(3)}, "step": 1, "lr": 0.1}


def compare(tmp_path: Path, a: Any, b: Any, **options: Any) -> tensorkeep.DiffReport:
    tensorkeep.save(a, tmp_path / "a")
    tensorkeep.save(b, tmp_path / "b", compression="lossless")
    return tensorkeep.diff(tmp_path / "a", tmp_path / "b", **options)


def test_equal(tmp_path: Path) -> None:
    report = compare(tmp_path, base(), base())
    assert report
    assert report.equal
    assert report.identical == 2


def test_a_report_is_true_if_nothing_differs_or_no_problem_was_found(tmp_path: Path) -> None:
    assert not compare(tmp_path, base(), base() | {"step": 2})
    file = tmp_path / "a" / "model.safetensors"
    assert tensorkeep.verify(tmp_path / "a")
    os.truncate(file, file.stat().st_size - 1)
    assert not tensorkeep.verify(tmp_path / "a")


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
    with pytest.raises(tensorkeep.UsageError, match="tolerance"):
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
    tensorkeep.save(base(), tmp_path / "native")
    torch.save(base(), tmp_path / "x.pt")
    assert tensorkeep.diff(tmp_path / "native", tmp_path / "x.pt").equal


@pytest.mark.parametrize("to", ["native", "safetensors", "torch"])
@pytest.mark.parametrize("source", ["native", "lossless", "safetensors", "torch"])
def test_convert_keeps_everything(tmp_path: Path, source: str, to: str) -> None:
    state = base() | {"tied": None, "nested": [torch.ones(3).bfloat16(), (1, "x")]}
    state["tied"] = state["model"]["w"]
    how = {"compression": "lossless"} if source == "lossless" else {"format": source}
    tensorkeep.save(state, tmp_path / "source", **how)
    report = tensorkeep.convert(tmp_path / "source", tmp_path / "target", to=to)
    assert report.format == to
    found = tensorkeep.load(tmp_path / "target")
    assert same(found, state)
    assert found["tied"].data_ptr() == found["model"]["w"].data_ptr()
    assert tensorkeep.diff(tmp_path / "source", tmp_path / "target").equal


def test_convert_some(tmp_path: Path) -> None:
    tensorkeep.save(base(), tmp_path / "a", metadata={"run": 3})
    tensorkeep.convert(tmp_path / "a", tmp_path / "b", select="model.w", compression="lossless")
    assert same(tensorkeep.load(tmp_path / "b"), {"model": {"w": torch.arange(100.0)}, "step": 1, "lr": 0.1})
    with tensorkeep.open(tmp_path / "b") as opened:
        assert opened.metadata == {"run": 3}
    with pytest.raises(tensorkeep.UnsupportedError, match="cannot store metadata"):
        tensorkeep.convert(tmp_path / "a", tmp_path / "a.pt", to="torch")
    tensorkeep.convert(tmp_path / "a", tmp_path / "a.pt", to="torch", drop_metadata=True)
    assert same(tensorkeep.load(tmp_path / "a.pt"), base())
    w = torch.ones(3)
    tensorkeep.save({"x": w, "y": w}, tmp_path / "tied")
    with pytest.raises(tensorkeep.UsageError, match="view of 'x'"):
        tensorkeep.convert(tmp_path / "tied", tmp_path / "c", select="y")


def test_convert_refuses_a_damaged_source_and_leaves_nothing(tmp_path: Path) -> None:
    tensorkeep.save({"w": torch.arange(3000.0)}, tmp_path / "a")
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="block 0"):
        tensorkeep.convert(tmp_path / "a", tmp_path / "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"a": {"b": 1}, "a.b": 2}, {"a": {"b": 99}, "a.b": 2}, [("a.b", 1, 99)]),
        ({"a": True}, {"a": 1}, [("a", True, 1)]),
        ({"a": 0}, {"a": False}, [("a", 0, False)]),
        ({"a": [1]}, {"a": (1,)}, [("a", "list", "tuple")]),
        ({"a": []}, {"a": ()}, [("a", "list", "tuple")]),
        ({1: 2}, {"1": 2}, [("1", 2, None), ("1", None, 2)]),
        ({"a": np.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}, [("a", "ndarray", "tensor")]),
        ({"a": {"b": 1}}, {"a": 1}, [("a", "dict", 1), ("a.b", 1, None)]),
    ],
    ids=str,
)
def test_plain_values_differ_in_type_and_place(tmp_path: Path, a: Any, b: Any, expected: list[Any]) -> None:
    report = compare(tmp_path, a, b)
    assert not report.equal
    found = [(m.name, m.a, m.b) for m in report.values]
    assert [tuple(map(repr, one)) for one in found] == [tuple(map(repr, one)) for one in expected]


def test_which_values_are_equal(tmp_path: Path) -> None:
    a = {"p": torch.nn.Parameter(torch.ones(2)), "d": OrderedDict(x=1), "s": {"b", "a", "c"}}
    b = {"p": torch.ones(2), "d": {"x": 1}, "s": {"c", "b", "a"}}
    assert compare(tmp_path, a, b).equal


@pytest.mark.parametrize(("dtype", "a", "b"), [("int64", 2**60, 2**60 + 1), ("int64", -(2**63), -(2**63) + 1)])
def test_long_integers_are_subtracted_as_integers(tmp_path: Path, dtype: str, a: int, b: int) -> None:
    states = [{"w": torch.tensor([value, 0], dtype=getattr(torch, dtype))} for value in (a, b)]
    report = compare(tmp_path / "1", *states, atol=0.5)
    assert not report.equal
    assert report.changed[0].largest == 1.0
    assert compare(tmp_path / "2", *states, atol=1.0).equal


def test_the_widest_distance_of_long_integers(tmp_path: Path) -> None:
    a, b = ({"w": torch.tensor([value])} for value in (-(2**63), 2**63 - 1))
    assert compare(tmp_path, a, b).changed[0].largest == 2.0**64


def test_a_selected_view_is_compared(tmp_path: Path) -> None:
    a, b = torch.zeros(10), torch.ones(10)
    assert not compare(tmp_path / "1", {"w": a, "v": a[2:]}, {"w": b, "v": b[2:]}, select="v").equal
    assert not compare(tmp_path / "2", {"w": a, "v": a}, {"w": b, "v": b}, select="v").equal


def test_diff_keeps_to_its_budget(tmp_path: Path) -> None:
    """The memory of a new process grows by the budget at most, tied tensors and differences included."""
    w = torch.arange(16 * 2**20, dtype=torch.int32)
    tensorkeep.save({"w": w, "v": w}, tmp_path / "a")
    tensorkeep.save({"w": w + 1, "v": w + 2}, tmp_path / "b")
    code = """
import pathlib, re, sys, tensorkeep, torch
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak()
report = tensorkeep.diff(sys.argv[1], sys.argv[2], memory_budget="64MiB")
assert [found.different for found in report.changed] == [2**24, 2**24], report
print(peak() - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) * 1024 < 64 * 2**20 + 40 * 2**20


def test_relative_l2_cosine_and_largest_difference(tmp_path: Path) -> None:
    a, b = torch.randn(7000, dtype=torch.float64), torch.randn(7000, dtype=torch.float64)
    (changed,) = compare(tmp_path, {"w": a}, {"w": b}).changed
    assert changed.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()))
    assert changed.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b, dim=0)))
    assert changed.largest == pytest.approx(float((a - b).abs().max()))
    assert changed.norm_b == pytest.approx(float(b.norm()))


def test_the_norm_of_a_changed_tensor_includes_its_unchanged_blocks(tmp_path: Path) -> None:
    a = torch.full((5 * 2**20,), 2.0)
    b = a.clone()
    b[-1] = 0
    (changed,) = compare(tmp_path, {"w": a, "same": torch.ones(9)}, {"w": b, "same": torch.ones(9)}).changed
    assert changed.norm_a == pytest.approx(2 * math.sqrt(len(a)))
    assert changed.relative_l2 == pytest.approx(1 / math.sqrt(len(a)))


def test_tensors_with_equal_bits_are_not_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "_of_piece", None)
    assert compare(tmp_path, base(), base()).equal


def test_complex_numbers_have_norms_and_a_cosine(tmp_path: Path) -> None:
    a, b = torch.tensor([3 + 4j, 1j]), torch.tensor([3 + 4j, -1j])
    (changed,) = compare(tmp_path, {"w": a}, {"w": b}).changed
    assert (changed.norm_difference, changed.norm_a**2, changed.dot) == (2.0, pytest.approx(26), 24.0)


@pytest.mark.parametrize(
    ("a", "b", "relative", "cosine"),
    [
        ([0.0, 0.0], [0.0, 1.0], math.inf, None),
        ([1.0, math.nan], [2.0, math.nan], 1.0, 1.0),
        ([1.0, math.nan], [1.0, 2.0], math.inf, 1.0),
        ([1.0, math.inf], [3.0, math.inf], 2.0, 1.0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf, 1.0),
        ([1.0, 2.0], [-1.0, -2.0], 2.0, -1.0),
        ([0.0, 1.0], [-0.0, 1.0], 0.0, 1.0),
    ],
)
def test_the_relative_difference_of_special_numbers(
    tmp_path: Path, a: list[float], b: list[float], relative: float, cosine: float | None
) -> None:
    (changed,) = compare(tmp_path, {"w": torch.tensor(a)}, {"w": torch.tensor(b)}).changed
    assert (changed.relative_l2, changed.cosine) == (relative, cosine if cosine is None else pytest.approx(cosine))


def test_an_infinity_is_within_no_tolerance_of_a_number(tmp_path: Path) -> None:
    a, b = {"w": torch.tensor([1.0, math.nan])}, {"w": torch.tensor([math.inf, math.nan])}
    assert compare(tmp_path / "1", a, b, rtol=0.1).changed[0].different == 1
    assert compare(tmp_path / "2", b, b, rtol=0.1).equal


def test_other_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    a = {"exact": torch.ones(5), "rounded": torch.full((4,), 1.001), "ints": torch.arange(3)}
    b = {"exact": torch.ones(5).bfloat16(), "rounded": a["rounded"].bfloat16(), "ints": torch.arange(3.0)}
    report = compare(tmp_path / "1", a, b)
    assert not report.equal
    assert {each.name for each in report.retyped} == set(a)
    found = {each.name: each for each in report.converted}
    assert {name: each.different for name, each in found.items()} == {"exact": 0, "ints": 0, "rounded": 4}
    assert found["rounded"].relative_l2 == pytest.approx(0.001 / 1.001, rel=1e-3)
    assert report.converted[0].name == "rounded"
    tolerant = compare(tmp_path / "2", a, b, rtol=0.01)
    assert [each.different for each in tolerant.converted] == [0, 0, 0]
    assert not tolerant.equal


def test_other_dtypes_of_several_blocks(tmp_path: Path) -> None:
    a = torch.zeros(9 * 2**20 + 5)
    b = a.bfloat16()
    b[[0, 4 * 2**20, 8 * 2**20, -1]] = 1
    (found,) = compare(tmp_path, {"w": a}, {"w": b}, threads=2).converted
    assert (found.different, found.norm_difference) == (4, 2.0)


def test_the_most_changed_tensor_comes_first_and_layers_sum_up(tmp_path: Path) -> None:
    def state(*steps: float) -> dict[str, Any]:
        first, second, head = (torch.tensor([3.0, 4.0 + step]) for step in steps)
        return {"model": {"blocks": [{"w": first, "b": torch.ones(2)}, {"w": second}], "head": {"w": head}}}

    report = compare(tmp_path, state(0, 0, 0), state(1, 5, 0.5))
    assert [each.name for each in report.changed] == ["model.blocks.1.w", "model.blocks.0.w", "model.head.w"]
    layers = report.by_layer()
    assert [(each.name, each.relative_l2) for each in layers] == [
        ("model.blocks.1", 1.0),
        ("model.blocks.0", 0.2),
        ("model.head", 0.1),
    ]
    assert [each.name for each in report.by_layer(2)] == ["model.blocks", "model.head"]
    (total,) = report.by_layer(1)
    assert total.norm_difference == report.total.norm_difference == pytest.approx(math.sqrt(1 + 25 + 0.25))
    assert (total.elements, total.different, total.largest) == (6, 3, 5.0)
    document = report.as_dict(depth=1)
    assert [each["name"] for each in document["layers"]] == ["model"]
    assert document["changed"][0]["relative_l2"] == 1.0


def test_integers_do_not_drown_the_distances_of_floating_point_tensors(tmp_path: Path) -> None:
    def state(step: float, byte: int) -> dict[str, Any]:
        random = torch.full((9,), byte, dtype=torch.uint8)
        return {"model": {"w": torch.tensor([3.0, 4.0 + step]), "ids": random}, "rng": {"cpu": random.clone()}}

    report = compare(tmp_path, state(0, 0), state(0.5, 255))
    total = report.total
    assert (total.elements, total.different) == (20, 19)
    assert (total.floating, total.largest, total.norm_difference) == (True, 0.5, 0.5)
    assert total.relative_l2 == 0.1
    assert [each.name for each in report.changed] == ["model.w", "model.ids", "rng.cpu"]
    model, rng = report.by_layer()
    assert (model.name, model.largest, model.different) == ("model", 0.5, 10)
    assert (rng.name, rng.floating, rng.largest, rng.different) == ("rng", False, 255, 9)
