"""accelerate with Tensorkeep: ``save_state`` and ``load_state`` for any number of ranks, with FSDP2, DDP or neither.

``torchrun --nproc-per-node 2 examples/accelerate_checkpoints.py``, or ``accelerate launch`` with ``fsdp_version: 2``:
run it, kill it, run it again.
"""

import argparse
import os

import torch
from accelerate.utils import set_seed

from tensorkeep.integrations.accelerate import TensorkeepAccelerator


class Progress:
    """The number of steps that are done; registered, so that it is in every checkpoint."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def main() -> None:
    """Train from the last checkpoint, or from the beginning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", default="accelerate-run")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    accelerator = TensorkeepAccelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    set_seed(accelerator.process_index)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    path = os.path.join(options.out, "step-last")
    if os.path.exists(path):
        accelerator.load_state(path)
        accelerator.print(f"resumes on {accelerator.num_processes} ranks after step {progress.step}", flush=True)
    while progress.step < options.steps:
        progress.step += 1
        batch = torch.randn(48 // accelerator.num_processes, 64).to(accelerator.device)
        loss = (model(batch) - batch.sin()).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if progress.step % 10 == 0 or progress.step == options.steps:
            accelerator.save_state(path)
            accelerator.print(f"step {progress.step}: loss {accelerator.reduce(loss, 'mean').item():.6f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
