"""The bytes that each rank writes and reads with torch's distributed checkpoints, and with ours."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard

import tensorkeep
from distributed.sharded_states import emptied, save, sharded, transferred
from ranks import run_ranks
from tensorkeep.distributed import DcpReader, DcpWriter

LAYERS = {f"layers.{number}.{name}": (256, 1024) for number in range(4) for name in ("attention", "up", "down")}
SHAPES = {"embedding": (4096, 256), **LAYERS, "head": (4096, 256)}
LARGE = {"weight": (49_152, 512)}
"""Many times the distance of the cuts between blocks, of which a rank that reads another part reads one in full."""
STATE_BYTES = 4 * sum(rows * columns for rows, columns in SHAPES.values())
LARGE_BYTES = 4 * sum(rows * columns for rows, columns in LARGE.values())


def save_replicated_shards(path: Path) -> int:
    state = sharded(SHAPES, 0, sizes=(2, 2), placements=[Replicate(), Shard(0)])
    before = transferred("wchar")
    if path.name == "ours":
        tensorkeep.save(state, path, group=dist.group.WORLD)
    else:
        save(state, dcp.FileSystemWriter(path))
    return transferred("wchar") - before


def save_shards(path: Path) -> None:
    save(sharded(LARGE, 0), DcpWriter(path) if path.name == "ours" else dcp.FileSystemWriter(path))


def load_shards(path: Path) -> int:
    state = emptied(sharded(LARGE, 0))
    reader = DcpReader(path) if path.name == "ours" else dcp.FileSystemReader(path)
    dist.barrier()
    before = transferred("rchar")
    dcp.load(state, storage_reader=reader)
    return transferred("rchar") - before


def test_dcp_gives_some_ranks_more_to_write_and_ours_the_same(tmp_path: Path) -> None:
    written = {name: run_ranks(4, save_replicated_shards, tmp_path / name) for name in ("theirs", "ours")}
    over_the_mean = {name: max(each) * len(each) / sum(each) for name, each in written.items()}
    assert over_the_mean["theirs"] > 1.15
    assert over_the_mean["ours"] < 1.05
    assert sum(written["ours"]) < 1.02 * STATE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("count", "times"), [(3, 1.5), (8, 2.0)])
def test_dcp_reads_whole_shards_on_another_number_of_ranks_and_ours_what_it_needs(
    count: int, times: float, tmp_path: Path
) -> None:
    read = {}
    for name in ("theirs", "ours"):
        run_ranks(4, save_shards, tmp_path / name)
        read[name] = sum(run_ranks(count, load_shards, tmp_path / name)) / LARGE_BYTES
    assert read["theirs"] > times
    assert read["ours"] < 1.1
