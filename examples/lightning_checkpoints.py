"""Lightning with Tensorkeep's checkpoints: run it, kill it, run it again."""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tensorkeep.integrations.lightning import TensorkeepIO


class Model(LightningModule):
    """A regression on noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return (self.layers(batch) - batch.sum(1, keepdim=True).sin()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> torch.utils.data.DataLoader[torch.Tensor]:
        """Return batches of one random matrix, in its order."""
        rows = torch.randn(20 * 64, 32, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(rows, batch_size=64)


def main() -> None:
    """Train from the last checkpoint, or from the beginning."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("lightning-run"))
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()

    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_steps=options.steps,
        accelerator="cpu",
        plugins=[TensorkeepIO(compression="lossless")],
        callbacks=[
            ModelCheckpoint(
                options.out, filename="{step}", save_top_k=2, monitor="step", mode="max", save_on_train_epoch_end=True
            )
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    steps = sorted(options.out.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    model = Model()
    trainer.fit(model, ckpt_path=steps[-1] if steps else None)
    print(f"step {trainer.global_step}: |w| = {sum(p.detach().abs().sum() for p in model.parameters()):.9f}")


if __name__ == "__main__":
    main()
