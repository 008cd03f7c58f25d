"""How long the coordinator of a save takes to plan it, for more ranks than this machine has: synthetic, in one process.

Every tensor is sharded by rows over all ranks. Counted is what the coordinator does between the last rank's request
and the first rank's write: decoding what the ranks send, planning, and encoding what it sends back.
"""

import pickle
import time
from dataclasses import asdict, dataclass
from typing import Any

ROWS_EACH, COLUMNS = 8, 64


@dataclass(frozen=True, slots=True)
class Planning:
    """Seconds and bytes of the planning of one save.

    Attributes
    ----------
    tool : str
    ranks, tensors : int
    seconds : float
        On the coordinator.
    received, sent : int
        Bytes to the coordinator, and from it to all ranks.
    """

    tool: str
    ranks: int
    tensors: int
    seconds: float
    received: int
    sent: int

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def plan_by_dcp(ranks: int, tensors: int) -> Planning:
    """Measure `DefaultSavePlanner` and `FileSystemWriter`; what is received and sent are pickles."""
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    received = [pickle.dumps(_dcp_plan(rank, ranks, tensors)) for rank in range(ranks)]
    writer, planner = FileSystemWriter("unused"), DefaultSavePlanner()
    started = time.perf_counter()
    plans, _ = planner.create_global_plan([pickle.loads(each) for each in received])
    sent = [pickle.dumps(each) for each in writer.prepare_global_plan(plans)]
    seconds = time.perf_counter() - started
    return Planning("dcp", ranks, tensors, seconds, sum(map(len, received)), sum(map(len, sent)))


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


def name_of(number: int) -> str:
    """Return the name of a tensor as a model of many layers has it."""
    return f"model.layers.{number // 8}.block.{number % 8}.projection.weight"
