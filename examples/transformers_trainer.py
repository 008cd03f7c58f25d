"""``transformers.Trainer`` with Tensorkeep's checkpoints: run it, kill it, run it again."""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from tensorkeep.integrations.transformers import TensorkeepTrainer


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
        save_total_limit=2,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = TensorkeepTrainer(model, arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=True)
    total = sum(parameter.detach().double().abs().sum() for parameter in model.parameters())
    print(f"step {trainer.state.global_step}: |w| = {total:.12f}")


if __name__ == "__main__":
    main()
