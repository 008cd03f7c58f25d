"""The sizes of a mesh of processes."""

from collections.abc import Mapping
from typing import Any

import pytest

from chatgot.techniques.distributed import mesh_sizes
from tensorkeep.errors import UsageError


@pytest.mark.parametrize(
    ("techniques", "size", "machines", "expected"),
    [
        ({"fsdp": {}}, 1, 1, {"shard": 1}),
        ({"fsdp": {}}, 6, 3, {"shard": 6}),
        ({"hsdp": {}}, 8, 1, {"replicate": 2, "shard": 4}),
        ({"hsdp": {}}, 8, 4, {"replicate": 4, "shard": 2}),
        ({"hsdp": {"replicas": 4}}, 8, 2, {"replicate": 4, "shard": 2}),
        ({"tensor-parallel": {}}, 4, 1, {"tensor": 4}),
        ({"fsdp": {}, "tensor-parallel": {}}, 8, 1, {"shard": 4, "tensor": 2}),
        ({"hsdp": {}, "tensor-parallel": {}}, 1, 1, {"replicate": 1, "shard": 1, "tensor": 1}),
        ({"hsdp": {}, "tensor-parallel": {"degree": "4"}}, 16, 1, {"replicate": 2, "shard": 2, "tensor": 4}),
    ],
)
def test_sizes(techniques: Mapping[str, Any], size: int, machines: int, expected: Mapping[str, int]) -> None:
    assert mesh_sizes(techniques, size, machines) == expected


@pytest.mark.parametrize(
    ("techniques", "size", "message"),
    [
        ({"tensor-parallel": {"degree": 2}}, 4, r"4 processes are not a mesh of 2 \(tensor\)"),
        ({"fsdp": {}, "tensor-parallel": {"degree": 3}}, 4, r"not a mesh of 1 \(shard\) x 3 \(tensor\)"),
        ({"hsdp": {"replicas": 8}}, 4, r"not a mesh of 8 \(replicate\) x 1 \(shard\)"),
        ({"hsdp": {}}, 2, "nothing is sharded along 'shard'"),
        ({"hsdp": {"replicas": 1}}, 4, "nothing is sharded along 'replicate'"),
        ({"fsdp": {}, "tensor-parallel": {"degree": 1}}, 4, "nothing is sharded along 'tensor'"),
    ],
)
def test_processes_that_are_not_a_mesh_are_refused(techniques: Mapping[str, Any], size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mesh_sizes(techniques, size)


def test_technique_without_processes_is_named_in_the_remedy() -> None:
    with pytest.raises(UsageError) as caught:
        mesh_sizes({"hsdp": {}}, 2)
    assert caught.value.remedy == "start at least 4 processes, or leave hsdp out"
