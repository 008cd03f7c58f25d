"""A loop with FSDP2 that can be killed at any time and resumes on another number of ranks.

``torchrun --nproc-per-node 2 examples/fsdp_train.py``: run it, kill it, run it again with ``--nproc-per-node 3``. Each
rank saves and loads its own shards. Gradients are then summed in another order; apart from that, the run is the same.
"""

import argparse
import os

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import tensorkeep

BATCH = 48  # rows of all ranks together


def main() -> None:
    """Train from the last checkpoint, or from the beginning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", default="fsdp-run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
    for module in (*model, model):
        fully_shard(module)
        module.set_force_sum_reduction_for_comms(device.type == "cpu")  # gloo has no averages
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}

    with tensorkeep.CheckpointManager(options.out, keep_last=2, group=dist.group.WORLD) as manager:
        if manager.latest() is not None:
            state["step"] = manager.restore(into=state)["step"]
            if rank == 0:
                print(f"resumes on {ranks} ranks after step {state['step']}", flush=True)
        while state["step"] < options.steps:
            state["step"] += 1
            # The batch of a step is the same for any number of ranks, each of which takes some of its rows.
            rows = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(state["step"]))
            batch = rows.tensor_split(ranks)[rank].to(device)
            # FSDP averages the gradients of the ranks, whatever number of rows each has.
            loss = (model(batch) - batch.sin()).square().mean() * len(batch) * ranks / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state["step"] % 10 == 0 or state["step"] == options.steps:
                dist.all_reduce(mean := loss.detach() / ranks)
                if rank == 0:
                    print(f"step {state['step']}: loss {mean.item():.6f}", flush=True)
                manager.save(state["step"], state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
