"""What the ranks of `test_loading` do; each function runs on every rank of a gloo group."""

import warnings
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorkeep
from tensorkeep.checkpoint.load import ranges
from tensorkeep.distributed import PerRank


def sharded(value: torch.Tensor) -> Any:
    return distribute_tensor(value, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def save(state: Any, path: str) -> None:
    tensorkeep.save(state, path, group=dist.group.WORLD, timeout=10)


def load(path: str, **options: Any) -> Any:
    return tensorkeep.load(path, group=dist.group.WORLD, timeout=10, **options)


def plain_values_of_ranks(path: str) -> list[Any]:
    rank = dist.get_rank()
    save({"seed": PerRank(100 + rank), "more": PerRank({"k": rank + 5, "x": torch.full((2,), rank)})}, path)
    x = torch.zeros(2, dtype=torch.int64)
    loaded = load(path, into={"seed": PerRank(0), "more": PerRank({"k": 0, "x": x})})
    assert loaded["more"].value["x"] is x
    return [loaded["seed"].value, loaded["more"].value["k"], x.tolist()]


def plain_values_of_more_ranks(path: str) -> tuple[Any, list[str]]:
    given = {"seed": PerRank(-1), "more": PerRank({"k": -1, "x": torch.zeros(2).long()})}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(path, into=given)
    return loaded["seed"].value, [str(each.message) for each in caught]


def untied_into_tied(path: str) -> list[float]:
    save({"a": sharded(torch.ones(4, 2)), "b": sharded(torch.zeros(4, 2))}, path)
    tensor = sharded(torch.full((4, 2), 7.0))
    try:
        load(path, into={"a": tensor, "b": tensor})
    finally:
        assert (tensor.to_local() == 7).all()
    raise AssertionError("loaded")


def tied_into_untied(path: str) -> None:
    tied = sharded(torch.arange(24.0).reshape(8, 3))
    save({"a": tied, "b": tied}, path)
    first, second = sharded(torch.zeros(8, 3)), sharded(torch.zeros(8, 3))
    with mock.patch.object(ranges, "allocate", side_effect=AssertionError("the full tensor is allocated")):
        load(path, into={"a": first, "b": second})
    assert torch.equal(first.to_local(), tied.to_local())
    assert torch.equal(second.to_local(), tied.to_local())
