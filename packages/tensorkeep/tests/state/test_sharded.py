"""The boxes of DTensors, of every placement, against what torch gives each rank of its fake process group."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tensorkeep.errors import UnsupportedLeafError
from tensorkeep.state.sharded import ShardedLeaf, is_dtensor
from tensorkeep.testing.cases import case


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def on_each_rank(mesh_shape: tuple[int, ...]) -> Iterator[dist.device_mesh.DeviceMesh]:
    """Yield the mesh as each of its ranks sees it; nothing is sent."""
    size = torch.Size(mesh_shape).numel()
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        yield init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner")[: len(mesh_shape)])
        dist.destroy_process_group()


PLACEMENTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    *(((4,), (Shard(0),)), ((4,), (Shard(1),)), ((3,), (Replicate(),)), ((2, 2), (Replicate(), Shard(0)))),
    *(((2, 3), (Shard(0), Shard(1))), ((2, 3), (Shard(1), Shard(0))), ((2, 2), (Shard(0), Shard(0)))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=3), Shard(1))),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS, ids=str)
def test_boxes_are_what_torch_gives_each_rank(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    shapes = [(12, 6), (7, 5), (1, 3), (2, 1), (0, 3)]
    counts = {shape: torch.zeros(shape, dtype=torch.int64) for shape in shapes}
    for mesh, shape in ((mesh, shape) for mesh in on_each_rank(mesh_shape) for shape in shapes):
        full = torch.arange(torch.Size(shape).numel()).reshape(shape)
        sharded = distribute_tensor(full, mesh, placements, src_data_rank=None)
        leaf = ShardedLeaf.of("w", sharded)
        with case(shape):
            assert (leaf.shape, leaf.nbytes) == (shape, full.nbytes)
            pieces = list(leaf.pieces())
            assert sum(piece.nbytes for piece in pieces) == sharded.to_local().nbytes
            for piece in pieces:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
                assert torch.equal(piece.array, full[box])
                assert piece.whole == shape
                counts[shape][box] += 1
    replicas = [size for size, placement in zip(mesh_shape, placements, strict=True) if placement.is_replicate()]
    for shape, count in counts.items():
        assert bool((count == max(replicas, default=1)).all()), shape


@pytest.mark.parametrize(("data", "model"), [*product([2, 4], [2, 3])])
def test_fsdp_after_tensor_parallel_divides_from_right_to_left(data: int, model: int) -> None:
    # Uneven rows: what FSDP makes of a tensor-parallel shard is not what the placements give from left to right.
    found: dict[int, list[int]] = {8: [], 9: [], 7: []}
    for mesh, rows in ((mesh, rows) for mesh in on_each_rank((data, model)) for rows in found):
        full = torch.arange(rows)
        outer, inner = mesh.get_coordinate() or (0, 0)
        chunks = list(full.chunk(model)) + [full[:0]] * model
        chunks = [*chunks[inner].chunk(data), *([full[:0]] * data)]
        placements = (_StridedShard(0, split_factor=model), Shard(0))
        local = DTensor.from_local(chunks[outer], mesh, placements, run_check=False, shape=full.shape, stride=(1,))
        for piece in ShardedLeaf.of("w", local).pieces():
            assert torch.equal(piece.array, full[piece.offsets[0] : piece.offsets[0] + piece.shape[0]])
            found[rows] += piece.array.tolist()
    assert {rows: sorted(values) for rows, values in found.items()} == {rows: [*range(rows)] for rows in found}


def test_scalars_and_parameters_are_leaves_and_a_part_of_a_sum_is_refused() -> None:
    for mesh in on_each_rank((2,)):
        scalar = distribute_tensor(torch.tensor(3.0), mesh, (Replicate(),), src_data_rank=None)
        leaf = ShardedLeaf.of("step", scalar)
        assert [(piece.shape, piece.offsets) for piece in leaf.pieces()] == [((), ())]
        assert leaf.layout == "mesh (outer=2): R"
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, (Shard(0),), src_data_rank=None))
        kept = ShardedLeaf.of("w", parameter)
        assert (kept.kind, kept.requires_grad) == ("parameter", True)
        assert is_dtensor(parameter)
        assert not is_dtensor(parameter.to_local())
        summand = DTensor.from_local(torch.ones(3), mesh, (Partial(),), run_check=False)
        with pytest.raises(UnsupportedLeafError, match=r"redistribute"):
            ShardedLeaf.of("w", summand)
