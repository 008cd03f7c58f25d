"""Lightning with FSDP2 and Tensorkeep: each rank saves and loads its shards; a run resumes on another number of ranks.

``torchrun --nproc-per-node 2 examples/lightning_sharded.py``
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

from tensorkeep.integrations.lightning import TensorkeepStrategy


class Model(LightningModule):
    """A regression on noise, sharded over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def configure_model(self) -> None:
        """Shard the layers."""
        for module in (self.layers[0], self.layers[2], self.layers):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])
            module.set_force_sum_reduction_for_comms(self.device.type == "cpu")  # gloo has no averages

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return (self.layers(batch) - batch.sum(1, keepdim=True).sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        """Return batches of one random matrix, in its order."""
        rows = torch.randn(20 * 48, 32, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(rows, batch_size=48 // int(os.environ["WORLD_SIZE"]))


def main() -> None:
    """Train from the last checkpoint, or from the beginning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("lightning-run"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_steps=options.steps,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=TensorkeepStrategy(data_parallel_size=int(os.environ["WORLD_SIZE"]), tensor_parallel_size=1),
        callbacks=[ModelCheckpoint(options.out, filename="{step}", every_n_train_steps=20, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    steps = sorted(options.out.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    model = Model()
    trainer.fit(model, ckpt_path=steps[-1] if steps else None)
    total = sum(parameter.detach().abs().sum() for parameter in model.parameters()).full_tensor()
    if trainer.is_global_zero:
        resumed = f" from {steps[-1].stem} with {trainer.world_size} ranks" if steps else ""
        print(f"step {trainer.global_step}{resumed}: |w| = {total:.4f}")


if __name__ == "__main__":
    main()
