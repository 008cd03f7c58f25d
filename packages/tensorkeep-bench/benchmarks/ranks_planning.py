"""What the coordinator of a save computes, for more ranks than this machine has: synthetic, in one process.

Every tensor is sharded by rows over all ranks. Planning is what the coordinator does between the last rank's request
and the first byte that it writes; finishing is what it does with the results of all ranks. Both begin with decoding
what the ranks send, and end with the bytes that are sent or written. The network is not measured.
"""

import pickle
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS_EACH, COLUMNS = 8, 64


@dataclass(frozen=True, slots=True)
class Planning:
    """What planning and finishing one save costs the coordinator."""

    tool: str
    ranks: int
    tensors: int
    planning: float  # seconds
    finishing: float  # seconds
    received: int  # bytes to the coordinator while planning
    sent: int  # bytes from the coordinator to each of the ranks, summed, while planning


def name_of(number: int) -> str:
    """Return the name of a tensor as a model of many layers has it."""
    return f"model.layers.{number // 8}.block.{number % 8}.projection.weight"


def plan_by_dcp(ranks: int, tensors: int) -> Planning:
    """Measure `DefaultSavePlanner` and `FileSystemWriter`; what is received and sent are pickles."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    plans = [_dcp_plan(rank, ranks, tensors) for rank in range(ranks)]
    received = [pickle.dumps(each) for each in plans]
    results = [
        pickle.dumps(
            [WriteResult(item.index, 1024, _StorageInfo(f"__{rank}_0.distcp", 0, 1024)) for item in plan.items]
        )
        for rank, plan in enumerate(plans)
    ]
    del plans
    with tempfile.TemporaryDirectory() as folder:
        writer, planner = FileSystemWriter(folder), DefaultSavePlanner()
        started = time.perf_counter()
        global_plans, metadata = planner.create_global_plan([pickle.loads(each) for each in received])
        sent = sum(len(pickle.dumps(each)) for each in writer.prepare_global_plan(global_plans))
        planned = time.perf_counter()
        writer.finish(metadata, [pickle.loads(each) for each in results])
        finished = time.perf_counter()
    return Planning("dcp", ranks, tensors, planned - started, finished - planned, sum(map(len, received)), sent)


def _dcp_plan(rank: int, ranks: int, tensors: int) -> Any:
    """Return the plan that `create_local_plan` makes of sharded tensors."""
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    offsets, sizes = torch.Size((rank * ROWS_EACH, 0)), torch.Size((ROWS_EACH, COLUMNS))
    whole = torch.Size((ranks * ROWS_EACH, COLUMNS))
    names = [name_of(number) for number in range(tensors)]
    items = [
        WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.bfloat16), whole),
        )
        for name in names
    ]
    return SavePlan(items, planner_data={name: tuple(name.split(".")) for name in names})


def plan_by_tensorkeep(ranks: int, tensors: int) -> Planning:
    """Measure the first save of a run, in which the ranks exchange their tensors; later saves exchange digests."""
    import msgspec

    from tensorkeep.formats.base import WriteSettings
    from tensorkeep.formats.native.directory import is_replaceable
    from tensorkeep.formats.native.manifest import FragmentReport
    from tensorkeep.formats.native.sharded import plan_root, write_plan, write_root
    from tensorkeep.ranks.merge import BoxKey, RankOutline, Tensors, assign, merge_tensors
    from tensorkeep.storage.commit import Commit

    encode = msgspec.msgpack.encode
    same, reports = msgspec.msgpack.Decoder(Tensors), msgspec.msgpack.Decoder(FragmentReport)
    boxes = msgspec.msgpack.Decoder(list[list[BoxKey]])
    # All ranks have the same tensors, of which one sends names, dtypes and shapes.
    first = encode(_outline(0, ranks, tensors).tensors)
    received = [encode(_outline(rank, ranks, tensors).boxes) for rank in range(ranks)]
    results = [encode(_report(rank, tensors)) for rank in range(ranks)]
    skeleton = {"dict": {name_of(number): {"tensor": name_of(number)} for number in range(tensors)}}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        known = same.decode(first)
        merged = merge_tensors([RankOutline(known, boxes.decode(each)) for each in received])
        assign(merged, ranks, 0)
        commit = Commit(Path(folder, "saved"), directory=True, overwrite=False, replaceable=is_replaceable)
        with commit:
            root = plan_root(merged.flat(skeleton), WriteSettings(), save="0" * 16, ranks=ranks)
            write_plan(commit, root)
            planned = time.perf_counter()
            write_root(commit.path, root, [reports.decode(each) for each in results])
            commit.publish()
            finished = time.perf_counter()
    count = len(first) + sum(map(len, received))
    # An all-gather: every rank receives what the coordinator does.
    return Planning("tensorkeep", ranks, tensors, planned - started, finished - planned, count, count * (ranks - 1))


def _outline(rank: int, ranks: int, tensors: int) -> Any:
    from tensorkeep.ranks.merge import RankOutline, TensorOutline, Tensors

    box = rank * ROWS_EACH, 0, ROWS_EACH, COLUMNS
    shape, layout = (ranks * ROWS_EACH, COLUMNS), f"mesh (dp={ranks}): S(0)"
    names = [name_of(number) for number in range(tensors)]
    found = [TensorOutline(name, "model", name, "bfloat16", shape, layout) for name in names]
    return RankOutline(Tensors(found, {}), [[box] for _ in names])


def _report(rank: int, tensors: int) -> Any:
    from tensorkeep.formats.native.manifest import FragmentRecord, FragmentReport, fragment_name

    boxes = [(number, (rank * ROWS_EACH, 0), (ROWS_EACH, COLUMNS)) for number in range(tensors)]
    names = [name_of(number) for number in range(tensors)]
    record = FragmentRecord(fragment_name(rank), 80_000, "0" * 32)
    return FragmentReport(rank, record, [f"model-rank-{rank:05d}.safetensors"], names, boxes)
