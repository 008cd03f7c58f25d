"""The bytes that each rank writes and reads with torch's distributed checkpoints, and with ours."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

from distributed.sharded_states import emptied, save, sharded, transferred
from ranks import run_ranks

LAYERS = {f"layers.{number}.{name}": (256, 1024) for number in range(4) for name in ("attention", "up", "down")}
SHAPES = {"embedding": (4096, 256), **LAYERS, "head": (4096, 256)}
STATE_BYTES = 4 * sum(rows * columns for rows, columns in SHAPES.values())


def save_replicated_shards(path: Path) -> int:
    state = sharded(SHAPES, 0, sizes=(2, 2), placements=[Replicate(), Shard(0)])
    before = transferred("wchar")
    save(state, dcp.FileSystemWriter(path))
    return transferred("wchar") - before


def save_shards(path: Path) -> None:
    save(sharded(SHAPES, 0), dcp.FileSystemWriter(path))


def load_shards(path: Path) -> int:
    state = emptied(sharded(SHAPES, 0))
    dist.barrier()
    before = transferred("rchar")
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    return transferred("rchar") - before


def test_dcp_gives_some_ranks_more_to_write(tmp_path: Path) -> None:
    written = run_ranks(4, save_replicated_shards, tmp_path / "c")
    assert sum(written) > STATE_BYTES
    assert max(written) > 1.15 * sum(written) / len(written)


@pytest.mark.parametrize(("count", "times"), [(3, 1.5), (8, 2.0)])
def test_dcp_reads_whole_shards_on_another_number_of_ranks(count: int, times: float, tmp_path: Path) -> None:
    run_ranks(4, save_shards, tmp_path / "c")
    assert sum(run_ranks(count, load_shards, tmp_path / "c")) > times * STATE_BYTES
