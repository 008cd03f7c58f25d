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


@pytest.fixture
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
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((3,), (Replicate(),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 3), (Shard(1), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=3), Shard(1))),
]


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize(("mesh_shape", "placements"), PLACEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(12, 6), (7, 5), (1, 3), (2, 1), (0, 3)], ids=str)
def test_boxes_are_what_torch_gives_each_rank(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> None:
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for mesh in on_each_rank(mesh_shape):
        sharded = distribute_tensor(full, mesh, placements, src_data_rank=None)
        leaf = ShardedLeaf.of("w", sharded)
        assert leaf is not None
        assert (leaf.shape, leaf.nbytes) == (shape, full.nbytes)
        pieces = list(leaf.pieces())
        assert sum(piece.nbytes for piece in pieces) == sharded.to_local().nbytes
        for piece in pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.shape, strict=True))
            assert torch.equal(piece.array, full[box])
            assert piece.whole == shape
            count[box] += 1
    replicas = {size for size, placement in zip(mesh_shape, placements, strict=True) if placement.is_replicate()}
    assert bool((count == (replicas.pop() if replicas else 1)).all())


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize(("rows", "data", "model"), [*product([8, 9, 7], [2, 4], [2, 3])])
def test_fsdp_after_tensor_parallel_divides_from_right_to_left(rows: int, data: int, model: int) -> None:
    # Uneven rows: what FSDP makes of a tensor-parallel shard is not what the placements give from left to right.
    full = torch.arange(rows)
    found = []
    for mesh in on_each_rank((data, model)):
        outer, inner = mesh.get_coordinate() or (0, 0)
        chunks = list(full.chunk(model)) + [full[:0]] * model
        chunks = [*chunks[inner].chunk(data), *([full[:0]] * data)]
        placements = (_StridedShard(0, split_factor=model), Shard(0))
        local = DTensor.from_local(chunks[outer], mesh, placements, run_check=False, shape=full.shape, stride=(1,))
        leaf = ShardedLeaf.of("w", local)
        assert leaf is not None
        for piece in leaf.pieces():
            assert torch.equal(piece.array, full[piece.offsets[0] : piece.offsets[0] + piece.shape[0]])
            found += piece.array.tolist()
    assert sorted(found) == full.tolist()


@pytest.mark.usefixtures("_no_group")
def test_a_part_of_a_sum_is_refused() -> None:
    for mesh in on_each_rank((2,)):
        summand = DTensor.from_local(torch.ones(3), mesh, (Partial(),), run_check=False)
        with pytest.raises(UnsupportedLeafError, match=r"redistribute"):
            ShardedLeaf.of("w", summand)


@pytest.mark.usefixtures("_no_group")
def test_scalars_and_parameters() -> None:
    for mesh in on_each_rank((2,)):
        scalar = distribute_tensor(torch.tensor(3.0), mesh, (Replicate(),), src_data_rank=None)
        leaf = ShardedLeaf.of("step", scalar)
        assert leaf is not None
        assert [(piece.shape, piece.offsets) for piece in leaf.pieces()] == [((), ())]
        assert leaf.layout == "mesh (outer=2): R"
        parameter = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, (Shard(0),), src_data_rank=None))
        kept = ShardedLeaf.of("w", parameter)
        assert kept is not None
        assert (kept.kind, kept.requires_grad) == ("parameter", True)
        assert is_dtensor(parameter)
        assert not is_dtensor(parameter.to_local())
