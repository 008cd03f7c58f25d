"""One rank of `ranks.py`: has its shards of a model in memory, and saves and loads them in the way that it is asked.

Requests are lines of JSON on the standard input, answers on the standard output. The model's values depend only on a
seed and their position, so that every number of ranks has the same state.
"""

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorkeep
from tensorkeep.distributed import DcpReader, DcpWriter
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes
from tensorkeep_bench.checkpoint.files import make_cold, release_memory, remove, sync_tree, warm
from tensorkeep_bench.checkpoint.models import parse

SEED = 20_261_122

State = dict[str, Any]


def full_tensors(spec: str) -> Any:
    """Yield name and full tensor, one at a time."""
    parsed = parse(spec)
    for number, (name, shape) in enumerate(parsed.shapes.items()):
        generator = torch.Generator().manual_seed(SEED + number)
        yield name, torch.empty(shape, dtype=getattr(torch, parsed.dtype)).normal_(0.0, 0.02, generator=generator)


def shards(spec: str, *, replicas: int = 1) -> State:
    """Return this rank's shards, by rows; of several replicas, as HSDP has them, if so many are given."""
    sizes = (dist.get_world_size(),) if replicas == 1 else (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", sizes)
    placements = [Shard(0)] if replicas == 1 else [Replicate(), Shard(0)]
    state: State = {}
    for name, tensor in full_tensors(spec):
        sharded = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        # Alone in its memory, not a view of the full tensor.
        local = sharded.to_local().clone()
        state[name] = DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=tensor.stride())
    return state


class Rank:
    """The state of this rank, and what it can be asked to do."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        alone = dist.get_world_size() == 1
        self.state: State = dict(full_tensors(spec)) if alone else shards(spec)
        self.group = {} if alone else {"group": dist.group.WORLD}
        gc.freeze()

    def save(self, arm: str, path: Path) -> None:
        """Save durably: files, directory and the name of the directory."""
        match arm.split():
            case ["tensorkeep", *rest]:
                tensorkeep.save(self.state, path, compression="lossless" if rest else "none", **self.group)
            case ["DcpWriter"]:
                dcp.save(self.state, storage_writer=DcpWriter(path))
            case ["dcp", threads]:
                dcp.save(self.state, storage_writer=dcp.FileSystemWriter(path, thread_count=int(threads)))
                if dist.get_rank() == 0:
                    sync_tree(path)

    def load(self, arm: str, path: Path) -> None:
        """Load into the shards."""
        match arm.split()[0]:
            case "tensorkeep":
                tensorkeep.load(path, into=self.state, **self.group)
            case "DcpReader":
                dcp.load(self.state, storage_reader=DcpReader(path))
            case "dcp":
                dcp.load(self.state, storage_reader=dcp.FileSystemReader(path))

    def stall(self, arm: str, path: Path) -> tuple[float, Callable[[], object]]:
        """Begin a save in the background; return the seconds that it took, and what waits for its end."""
        started = time.perf_counter()
        if arm == "copy":
            copies = [each.to_local().clone() for each in self.state.values()]
            seconds = time.perf_counter() - started
            return seconds, copies.clear
        if arm == "dcp":
            future: Any = dcp.async_save(self.state, storage_writer=dcp.FileSystemWriter(path))
            return time.perf_counter() - started, future.result
        pending = tensorkeep.save_async(self.state, path, **self.group)
        return time.perf_counter() - started, pending.wait

    def answer(self, request: dict[str, Any]) -> dict[str, float]:
        """Do what is asked for, beginning with all ranks at once, and ending when all are done."""
        what, arm, path = request["what"], request["arm"], Path(request["path"])
        if what == "check":
            return {"equal": float(self._is_as_built())}
        if dist.get_rank() == 0:
            if what in ("save", "stall", "replicas"):
                remove(path)
            else:
                (make_cold if what == "cold load" else warm)(path)
        if what == "replicas":
            self.state = shards(self.spec, replicas=2)
        if "load" in what:
            for tensor in self.state.values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        release_memory()
        dist.barrier()
        before, read, written = resident_bytes(), transferred("rchar"), transferred("wchar")
        reset_peak_resident()
        if what == "stall":
            dist.barrier()
            seconds, end = self.stall(arm, path)
            end()
        else:
            dist.barrier()
            started = time.perf_counter()
            (self.load if "load" in what else self.save)(arm, path)
            seconds = time.perf_counter() - started
        dist.barrier()
        return {
            "seconds": seconds,
            "memory": peak_resident_bytes() - before,
            "read": transferred("rchar") - read,
            "written": transferred("wchar") - written,
            "own": sum(bytes_here(each) for each in self.state.values()),
        }

    def _is_as_built(self) -> bool:
        """Return whether every bit of the shards is that of the model."""
        expected = dict(full_tensors(self.spec)) if not self.group else shards(self.spec)
        return all(same_bits(self.state[name], each) for name, each in expected.items())


def bytes_here(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    pair = [(each.to_local() if isinstance(each, DTensor) else each).view(torch.int16) for each in (first, second)]
    return torch.equal(*pair)


def transferred(counter: str) -> int:
    """Return the bytes that this process has read (``rchar``) or written (``wchar``) by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields[counter])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("rank", "size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--spec")
    parser.add_argument("--store")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.size)
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=options.size, timeout=timedelta(seconds=300)
    )
    rank = Rank(options.spec)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        print(json.dumps(rank.answer(json.loads(line))), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
