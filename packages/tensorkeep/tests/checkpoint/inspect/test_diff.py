"""Comparing checkpoints."""

import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorkeep
from faults.injection import bounded_memory, flip_bit
from tensorkeep.checkpoint import diff
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.testing.cases import case
from tensorkeep.testing.equality import same


def base() -> dict[str, Any]:
    return {"model": {"w": torch.arange(100.0), "b": torch.zeros(3)}, "step": 1, "lr": 0.1}


def compare(tmp_path: Path, a: Any, b: Any, **options: Any) -> tensorkeep.DiffReport:
    tensorkeep.save(a, tmp_path / "a", overwrite=True)
    tensorkeep.save(b, tmp_path / "b", overwrite=True, compression="lossless")
    return tensorkeep.diff(tmp_path / "a", tmp_path / "b", **options)


def test_a_report_is_true_if_nothing_differs_or_no_problem_was_found(tmp_path: Path) -> None:
    assert not compare(tmp_path, base(), base() | {"step": 2})
    file = tmp_path / "a" / "model.safetensors"
    assert tensorkeep.verify(tmp_path / "a")
    os.truncate(file, file.stat().st_size - 1)
    assert not tensorkeep.verify(tmp_path / "a")
    with pytest.raises(tensorkeep.UsageError, match="tolerance"):
        tensorkeep.diff(tmp_path / "b", tmp_path / "b", atol=-1.0)


def test_equal_bits_are_not_computed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff, "_of_piece", None)
    report = compare(tmp_path, base(), base())
    assert report
    assert report.equal
    assert report.identical == 2
    torch.save(base(), tmp_path / "x.pt")
    assert tensorkeep.diff(tmp_path / "a", tmp_path / "x.pt").equal
    a = {"p": torch.nn.Parameter(torch.ones(2)), "d": OrderedDict(x=1), "s": {"b", "a", "c"}}
    assert compare(tmp_path / "values", a, {"p": torch.ones(2), "d": {"x": 1}, "s": {"c", "b", "a"}}).equal


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


NAN, INF = math.nan, math.inf
RANGE, LONG = torch.arange(100.0), torch.zeros(5 * 2**20 + 3)
OTHER = LONG.index_put((torch.tensor([0, 4 * 2**20, -1]),), torch.tensor([1.0, 3.0, -2.0]))
SPECIAL = torch.tensor([NAN, NAN, 0.0, INF, 1.0]), torch.tensor([NAN, 1.0, -0.0, INF, INF])
INTEGERS = [[torch.tensor([number, 0]), torch.tensor([number + 1, 0])] for number in (2**60, -(2**63))]
INFINITE = torch.tensor([1.0, NAN]), torch.tensor([INF, NAN])


@pytest.mark.parametrize(
    ("a", "b", "options", "different", "largest"),
    [
        (RANGE, RANGE * (1 + 1e-6), {"atol": 1e-5}, 89, pytest.approx(1e-4, rel=0.1)),
        (RANGE, RANGE * (1 + 1e-6), {"atol": 1e-3}, 0, None),
        (RANGE, RANGE * (1 + 1e-6), {"rtol": 1e-5}, 0, None),
        (*SPECIAL, {}, 3, INF),
        (*SPECIAL, {"atol": 1.0}, 2, INF),
        *((*pair, {"atol": 0.5}, 1, 1.0) for pair in INTEGERS),
        *((*pair, {"atol": 1.0}, 0, None) for pair in INTEGERS),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), {}, 1, 2.0**64),
        (*INFINITE, {"rtol": 0.1}, 1, INF),
        (INFINITE[1], INFINITE[1], {"rtol": 0.1}, 0, None),
        (LONG, OTHER, {"threads": 2}, 3, 3.0),
    ],
    ids=str,
)
def test_how_many_elements_differ(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, options: dict[str, Any], different: int, largest: Any
) -> None:
    report = compare(tmp_path, {"w": a}, {"w": b}, **options)
    assert report.equal == (different == 0)
    if different:
        (changed,) = report.changed
        assert (changed.different, changed.largest) == (different, largest)


def test_every_dtype(tmp_path: Path) -> None:
    def state(bit: int) -> dict[str, Any]:
        made = {}
        for name, dtype in BY_NAME.items():
            raw = np.zeros(64 * dtype.itemsize, np.uint8)
            raw[5 * dtype.itemsize] = bit
            made[name] = torch.from_numpy(raw).view(dtype.torch) if dtype.has_torch else raw.view(dtype.numpy)
        return made

    changed = compare(tmp_path, state(0), state(1)).changed
    assert {each.name for each in changed} == {*BY_NAME}
    for each in changed:
        with case(each.name):
            assert (each.elements, each.different) == (64, 1)
            assert each.largest > 0


def test_views_are_compared_with_tensors_of_their_own(tmp_path: Path) -> None:
    w = torch.arange(12.0).reshape(3, 4)
    assert compare(tmp_path / "1", {"w": w, "v": w.T}, {"w": w, "v": w.T.contiguous()}).equal
    (changed,) = compare(tmp_path / "2", {"w": w, "v": w[1]}, {"w": w, "v": torch.zeros(4)}).changed
    assert (changed.name, changed.different) == ("v", 4)


A, B = torch.zeros(10), torch.ones(10)


def test_only_what_is_selected_is_compared(tmp_path: Path) -> None:
    for a, b, selected, equal in (
        ({"b": A, "w": A, "step": 1}, {"b": A, "w": B, "step": 5}, "b", True),
        ({"b": A, "w": A}, {"b": A, "w": B}, "w", False),
        ({"w": A, "v": A[2:]}, {"w": B, "v": B[2:]}, "v", False),  # a view
        ({"w": A, "v": A}, {"w": B, "v": B}, "v", False),  # tied
    ):
        with case(a):
            assert compare(tmp_path, a, b, select=selected).equal == equal


def test_diff_keeps_to_its_budget(tmp_path: Path) -> None:
    """Memory grows by the budget at most, tied tensors and differences included."""
    w = torch.arange(16 * 2**20, dtype=torch.int32)
    tensorkeep.save({"w": w, "v": w}, tmp_path / "a")
    tensorkeep.save({"w": w + 1, "v": w + 2}, tmp_path / "b")
    with bounded_memory(104 * 2**20):
        report = tensorkeep.diff(tmp_path / "a", tmp_path / "b", memory_budget="64MiB")
    assert [found.different for found in report.changed] == [2**24, 2**24]


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
    tensorkeep.convert(tmp_path / "a", tmp_path / "a.pt", to="torch", drop_metadata=True)
    assert same(tensorkeep.load(tmp_path / "a.pt"), base())


def test_convert_refuses_what_it_cannot_store_or_read_and_leaves_nothing(tmp_path: Path) -> None:
    w = torch.arange(3000.0)
    tensorkeep.save({"x": w, "y": w}, tmp_path / "a", metadata={"run": 3})
    with pytest.raises(tensorkeep.UnsupportedError, match="cannot store metadata"):
        tensorkeep.convert(tmp_path / "a", tmp_path / "a.pt", to="torch")
    with pytest.raises(tensorkeep.UsageError, match="view of 'x'"):
        tensorkeep.convert(tmp_path / "a", tmp_path / "c", select="y")
    flip_bit(tmp_path / "a" / "model.safetensors", 5000)
    with pytest.raises(tensorkeep.CorruptCheckpointError, match="block 0"):
        tensorkeep.convert(tmp_path / "a", tmp_path / "b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_plain_values_differ_in_type_and_place(tmp_path: Path) -> None:
    values: list[tuple[Any, Any, list[Any]]] = [
        ({"a": {"b": 1}, "a.b": 2}, {"a": {"b": 99}, "a.b": 2}, [("a.b", 1, 99)]),
        ({"a": True}, {"a": 1}, [("a", True, 1)]),
        ({"a": 0}, {"a": False}, [("a", 0, False)]),
        ({"a": [1]}, {"a": (1,)}, [("a", "list", "tuple")]),
        ({"a": []}, {"a": ()}, [("a", "list", "tuple")]),
        ({1: 2}, {"1": 2}, [("1", 2, None), ("1", None, 2)]),
        ({"a": np.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}, [("a", "ndarray", "tensor")]),
        ({"a": {"b": 1}}, {"a": 1}, [("a", "dict", 1), ("a.b", 1, None)]),
        ({"a": 0.5, "b": 2**60}, {"a": NAN, "b": "2"}, [("a", 0.5, NAN), ("b", 2**60, "2")]),
        ({"a": b"x", "b": {1, 2}}, {"a": torch.float16, "b": 1j}, [("a", b"x", torch.float16), ("b", {1, 2}, 1j)]),
    ]
    for a, b, expected in values:
        with case(expected):
            report = compare(tmp_path, a, b)
            assert not report.equal
            assert repr([(found.name, found.a, found.b) for found in report.values]) == repr(expected)
            json.dumps(report.as_dict(), allow_nan=False)


def test_relative_l2_cosine_and_largest_difference(tmp_path: Path) -> None:
    a, b = torch.randn(7000, dtype=torch.float64), torch.randn(7000, dtype=torch.float64)
    (changed,) = compare(tmp_path, {"w": a}, {"w": b}).changed
    assert changed.relative_l2 == pytest.approx(float((a - b).norm() / a.norm()))
    assert changed.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(a, b, dim=0)))
    assert changed.largest == pytest.approx(float((a - b).abs().max()))
    assert changed.norm_b == pytest.approx(float(b.norm()))
    # Unchanged blocks count as well.
    a = torch.full((5 * 2**20,), 2.0)
    b = a.clone()
    b[-1] = 0
    (changed,) = compare(tmp_path, {"w": a, "same": torch.ones(9)}, {"w": b, "same": torch.ones(9)}).changed
    assert changed.norm_a == pytest.approx(2 * math.sqrt(len(a)))
    assert changed.relative_l2 == pytest.approx(1 / math.sqrt(len(a)))
    a, b = torch.tensor([3 + 4j, 1j]), torch.tensor([3 + 4j, -1j])
    (changed,) = compare(tmp_path / "complex", {"w": a}, {"w": b}).changed
    assert (changed.norm_difference, changed.norm_a**2, changed.dot) == (2.0, pytest.approx(26), 24.0)


def test_the_relative_difference_of_special_numbers(tmp_path: Path) -> None:
    cases: list[tuple[list[float], list[float], float, float | None]] = [
        ([0.0, 0.0], [0.0, 1.0], INF, None),
        ([1.0, NAN], [2.0, NAN], 1.0, 1.0),
        ([1.0, NAN], [1.0, 2.0], INF, 1.0),
        ([1.0, INF], [3.0, INF], 2.0, 1.0),
        ([1.0, INF], [1.0, -INF], INF, 1.0),
        ([1.0, 2.0], [-1.0, -2.0], 2.0, -1.0),
        ([0.0, 1.0], [-0.0, 1.0], 0.0, 1.0),
    ]
    first, second = ({str(each): torch.tensor(each[place]) for each in cases} for place in (0, 1))
    changed = {each.name: each for each in compare(tmp_path, first, second).changed}
    for a, b, relative, cosine in cases:
        found = changed[str((a, b, relative, cosine))]
        with case(found):
            assert found.relative_l2 == relative
            assert found.cosine == (cosine if cosine is None else pytest.approx(cosine))


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
    several = torch.zeros(9 * 2**20 + 5)  # blocks
    other = several.bfloat16()
    other[[0, 4 * 2**20, 8 * 2**20, -1]] = 1
    (found_in_all,) = compare(tmp_path / "3", {"w": several}, {"w": other}, threads=2).converted
    assert (found_in_all.different, found_in_all.norm_difference) == (4, 2.0)


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
