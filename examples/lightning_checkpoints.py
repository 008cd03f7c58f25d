"""Lightning with Tensorkeep's checkpoints: run it, kill it, run it again.

`TensorkeepIO` is a plug-in for every ``Trainer``; ``ModelCheckpoint`` and ``ckpt_path`` work as usual. What is in a
checkpoint, and where in an epoch a run resumes, is decided by Lightning, which does not save random states.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import tensorkeep


class TensorkeepIO(CheckpointIO):
    """Saves in the background: training waits only while the state is copied."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._pending: tensorkeep.PendingSave | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save, once the save before is durable."""
        self.teardown()
        self._pending = tensorkeep.save_async(checkpoint, path, overwrite=True, **self._options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load with every block checked; nothing is ever unpickled, whatever ``weights_only`` is."""
        self.teardown()
        return tensorkeep.load(path, device=None if callable(map_location) else map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once the next one is durable."""
        self.teardown()
        # A run that was killed afterwards has removed it already.
        if Path(path).exists():
            shutil.rmtree(path)

    def teardown(self) -> None:
        """Wait for the save in progress, and raise its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


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
