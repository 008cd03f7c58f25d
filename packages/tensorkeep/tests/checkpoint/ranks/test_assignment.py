"""Who writes what: everything once, by the ranks that have it, in about equal parts, in the same way every time."""

from collections import Counter
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch

from tensorkeep.errors import RanksDisagreeError
from tensorkeep.ranks.merge import (
    SPLIT_BYTES,
    RankOutline,
    TensorOutline,
    Tensors,
    WriteAssignment,
    assign,
    merge_skeletons,
    merge_tensors,
    own_pieces,
)
from tensorkeep.state.skeleton import SkeletonWriter
from tensorkeep.state.tree import flatten
from tensorkeep.testing.cases import case

Boxes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def outline(*tensors: tuple[str, tuple[int, ...], Boxes]) -> RankOutline:
    found = [TensorOutline(name, "model", name, "float32", shape, "") for name, shape, _ in tensors]
    return RankOutline(
        Tensors(found, {}), [[(*offsets, *sizes) for offsets, sizes in boxes] for _, _, boxes in tensors]
    )


def whole(shape: tuple[int, ...]) -> Boxes:
    return (((0,) * len(shape), shape),)


def shares_of(outlines: list[RankOutline]) -> list[list[WriteAssignment]]:
    merged = merge_tensors(outlines)
    return [assign(merged, len(outlines), rank) for rank in range(len(outlines))]


def written(outlines: list[RankOutline]) -> list[int]:
    return [
        sum(prod(s.box[len(s.box) // 2 + 1 :]) * (s.stop - s.start) * 4 for s in own) for own in shares_of(outlines)
    ]


def test_replicas_are_written_once_and_in_equal_parts() -> None:
    def half(number: int) -> RankOutline:
        return outline(*((f"w{n}", (64, 8 + n), (((32 * number, 0), (32, 8 + n)),)) for n in range(30)))

    shapes = {f"w{number}": (64 + number, 128) for number in range(40)}
    replicated = [outline(*((name, shape, whole(shape)) for name, shape in shapes.items()))] * 4
    assert Counter(share.name for own in shares_of(replicated) for share in own) == Counter(list(shapes))
    sharded = [half(0), half(1)] * 2  # HSDP on 2 x 2 ranks: each half of every tensor is on two ranks
    for outlines, elements in (
        (replicated, sum(map(prod, shapes.values()))),
        (sharded, sum(64 * (8 + n) for n in range(30))),
    ):
        loads = written(outlines)
        assert sum(loads) == 4 * elements
        assert max(loads) <= 1.05 * elements


def test_a_large_replicated_tensor_is_written_in_runs_by_several_ranks() -> None:
    rows = 5 * SPLIT_BYTES // 4
    state = outline(("w", (rows,), whole((rows,))), ("small", (3,), whole((3,))))
    shares = shares_of([state] * 4)
    runs = sorted((s.start, s.stop) for own in shares for s in own if s.name == "w")
    assert (runs[0][0], runs[-1][1]) == (0, rows)
    assert all(first[1] == second[0] for first, second in pairwise(runs))
    assert len(runs) == 4
    assert min(stop - start for start, stop in runs) * 4 >= SPLIT_BYTES


def test_the_assignment_is_the_same_in_every_save() -> None:
    state = outline(*((f"w{n}", (8, 8), whole((8, 8))) for n in range(9)), ("scalar", (), whole(())))
    assert shares_of([state] * 3) == shares_of([state] * 3)


def test_own_pieces_are_views_of_the_memory_of_the_state() -> None:
    weight = torch.arange(12.0).reshape(6, 2)
    flat = flatten({"w": weight, "step": torch.tensor(3)}, SkeletonWriter(sharded=True))
    shares = shares_of([RankOutline.of_state(flat)])[0]
    pieces = own_pieces(shares, flat.leaves)
    assert [(p.name, p.offsets, p.shape, p.whole) for p in pieces] == [
        ("w", (0, 0), (6, 2), (6, 2)),
        ("step", (), (), ()),
    ]
    assert pieces[0].array.data_ptr() == weight.data_ptr()
    part = pieces[0].rows(2, 5)
    assert part.offsets == (2, 0)
    assert torch.equal(part.array, weight[2:5])


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    tied, *separate = (torch.zeros(2) for _ in range(3))
    states: list[tuple[dict[str, torch.Tensor], ...]] = [
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2).bfloat16()}),
        ({"a": tied, "w": tied}, dict(zip("aw", separate, strict=True))),
    ]
    outlines = [
        [outline(("w", (4, 2), whole((4, 2)))), outline(("w", (4, 3), whole((4, 3))))],
        [outline(("w", (4,), (((0,), (2,)),)))] * 2,
        *([RankOutline.of_state(flatten(state)) for state in each] for each in states),
    ]
    messages = (
        r"shape is \[4, 2\] on rank 0, and \[4, 3\]",
        "have 2 of its 4 elements",
        "dtype is float32 on rank 0, and bfloat16 on rank 1",
        "shares the memory of 'a' on rank 0, and not on rank 1",
    )
    for each, message in zip(outlines, messages, strict=True):
        with case(message), pytest.raises(RanksDisagreeError, match=message) as refused:
            merge_tensors(each)
        assert refused.value.name == "w"


def test_states_with_other_keys_are_merged() -> None:
    states = [
        {"model": {"stage0": torch.zeros(2)}, "step": 7, "names": ["a", "b"], "random": {"0": {"seed": 1}}},
        {"model": {"stage1": torch.ones(3)}, "step": 7, "names": ["a", "b"], "random": {"1": {"seed": 2}}},
    ]
    stages = {"dict": {"stage0": {"tensor": "model.stage0"}, "stage1": {"tensor": "model.stage1"}}}
    merged = {"model": stages, "step": 7, "names": ["a", "b"]}
    merged["random"] = {"dict": {"0": {"dict": {"seed": 1}}, "1": {"dict": {"seed": 2}}}}
    assert merge_skeletons([flatten(state).skeleton for state in states]) == {"dict": merged}


def test_plain_values_that_differ_are_refused_by_name() -> None:
    values: list[tuple[Any, Any, str]] = [
        ({"a": {"lr": 0.1}}, {"a": {"lr": 0.2}}, "'a.lr' differs between ranks 0 and 1: '0.1' and '0.2'"),
        ({"step": 7}, {"step": 8}, "'step' differs between ranks 0 and 1: 7 and 8"),
        ({"x": b"row 5"}, {"x": b"row 6"}, "'x' differs between ranks 0 and 1: b'row 5' and b'row 6'"),
        ({"x": [1, 2]}, {"x": [1]}, "'x' differs between ranks 0 and 1: a list of 2 and a list of 1"),
        ({"x": 1}, {"x": True}, "'x' differs between ranks 0 and 1: 1 and True"),
        ({"x": {"y": 1}}, {"x": 3}, "'x' differs between ranks 0 and 1: a dict of 1 and 3"),
        ({"x": torch.zeros(1)}, {"x": None}, "'x' differs between ranks 0 and 1: the tensor 'x' and None"),
    ]
    for first, second, message in values:
        with case(message), pytest.raises(RanksDisagreeError, match=message) as refused:
            merge_skeletons([flatten(first).skeleton, flatten(second).skeleton])
        assert "PerRank" in (refused.value.remedy or "")
