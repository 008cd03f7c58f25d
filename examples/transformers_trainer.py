"""``transformers.Trainer`` with a `CheckpointManager`: run it, kill it, run it again.

`TensorkeepTrainer` saves the whole training state in the background, incrementally, without pickle, and resumes from
it: the weights at the end are those of a run that was never interrupted.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import tensorkeep


class TensorkeepTrainer(Trainer):
    """A ``Trainer`` whose checkpoints are steps of a manager; for one process.

    Parameters
    ----------
    manager : tensorkeep.CheckpointManager
        Its rules decide which steps are kept; ``save_strategy`` and ``save_steps`` decide when to save.
    """

    def __init__(self, *args: Any, manager: tensorkeep.CheckpointManager, **options: Any) -> None:
        super().__init__(*args, **options)
        self.manager = manager

    def train_on(self) -> Any:
        """Train from the last undamaged step, or from the beginning without one."""
        # Verified, because it is read twice, and both times it must be the same step.
        step = next((each for each in reversed(self.manager.steps()) if tensorkeep.verify(each.path).ok), None)
        if step is None:
            return self.train()
        self._step = step
        # The trainer reads its own state from a file, before the optimizer exists that the rest is restored into.
        folder = Path(self.args.output_dir) / "resumed-from"
        folder.mkdir(parents=True, exist_ok=True)
        trainer_state = tensorkeep.load(step.path, select=[])["trainer"]
        (folder / "trainer_state.json").write_text(trainer_state)
        return self.train(resume_from_checkpoint=str(folder))

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        self.manager.save(
            self.state.global_step,
            {
                **self._stateful(),
                "rng": tensorkeep.RandomState(),
                "trainer": json.dumps(dataclasses.asdict(self.state)),
            },
            metrics={"loss": losses[-1]} if losses else None,
        )

    def _stateful(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        pass  # the weights are restored together with the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            others = {"rng": _DeferredRandomState(), "trainer": ""}
            self._restored = self.manager.restore(self._step, into={**self._stateful(), **others})

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            tensorkeep.RandomState().load_state_dict(self._restored["rng"].state)


class _DeferredRandomState(tensorkeep.RandomState):
    """Random states that are loaded now and set later, after the data loader was advanced."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def main() -> None:
    """Train a tiny GPT-2 on counting."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("transformers-run"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    rows = [{"input_ids": (row := (torch.arange(32) + start) % 97), "labels": row} for start in range(512)]
    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        save_steps=10,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with tensorkeep.CheckpointManager(options.out, keep_last=2, incremental=True) as manager:
        trainer = TensorkeepTrainer(model, arguments, train_dataset=rows, manager=manager)
        trainer.train_on()
    total = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
    print(f"step {trainer.state.global_step}: |w| = {total:.12f}")


if __name__ == "__main__":
    main()
