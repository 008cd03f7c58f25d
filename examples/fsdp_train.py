"""A loop with FSDP2 that can be killed at any time and resumes on another number of ranks.

``torchrun --nproc-per-node 2 examples/fsdp_train.py``: run it, kill it, run it again with ``--nproc-per-node 3``. Each
rank saves and loads its own shards, and the losses are those of an uninterrupted run, up to the order of sums.
"""

import argparse

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import tensorkeep


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="fsdp-run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
    for module in (*model, model):
        fully_shard(module)
        module.set_force_sum_reduction_for_comms(not torch.cuda.is_available())  # gloo has no averages
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0}

    with tensorkeep.CheckpointManager(options.out, keep_last=2, group=dist.group.WORLD) as manager:
        first = 1
        if manager.latest() is not None:
            first = manager.restore(into=state)["step"] + 1
            print(f"rank {rank} of {ranks} resumes with step {first}", flush=True)
        for step in range(first, options.steps + 1):
            # The batch of a step is the same for any number of ranks, each of which takes some of its rows.
            batch = torch.randn(48, 64, generator=torch.Generator().manual_seed(step)).tensor_split(ranks)[rank]
            # Gradients are summed over the ranks, or averaged, with equal weights: each loss is scaled by its rows.
            loss = (model(batch) - batch.sin()).square().mean() * len(batch) * ranks / 48
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0 or step == options.steps:
                manager.save(step, {**state, "step": step})
    if first > options.steps:
        print("all steps are done already")
    else:
        total = loss.detach() / ranks
        dist.all_reduce(total)
        print(f"step {step}: loss {total.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
