"""Kinds of training runs that are killed and resumed: their settings and their data."""

import json
from pathlib import Path
from typing import NamedTuple

from chatgot.config.config import Config
from chatgot.config.recipes import get_recipe
from chatgot.data.prepare import prepare
from chatgot.model.config import ModelConfig

SMALL: dict[str, object] = {"loop.steps": 12, "loop.batch_size": 5, "loop.threads": 1, "schedule.warmup_steps": 2}
SMALL |= {"sample.every": 5, "sample.prompt": "the", "sample.tokens": 8}
SMALL |= {"eval.every": 3, "checkpoint.every": 3, "log.every": 1}
PLAIN = Config(
    recipe="tiny", model=ModelConfig(vocab_size=1, context_length=16, n_layers=2, n_heads=2, d_model=16, dropout=0.1)
)
BEST = get_recipe("shakespeare-char-cpu-best").changed(
    {"model.context_length": 16, "model.n_layers": 2, "model.n_heads": 2, "model.d_model": 16}
    # By default, a measurement chooses it.
    | {"default_techniques": {}, "techniques.mixed-precision": {"dtype": "bf16", "attention": "same"}}
)


class Variant(NamedTuple):
    """A kind of run: its settings, its data, and whether it is a leg or a branch of a run of 4 steps."""

    changes: dict[str, object]
    data: str = "text"
    begins: str = "new"
    base: Config = PLAIN

    @property
    def config(self) -> Config:
        return self.base.changed({**SMALL, **self.changes})


# Step 8 is the last one with short windows.
STAGES = {"pieces": [4, 1], "shares": [0.65, 0.35]}

VARIANTS = {
    "AdamW, averaged, random order": Variant(
        {"ema.decay": 0.9, "data.order": "random", "loop.gradient_accumulation_steps": 3}
    ),
    "Muon, shuffled order": Variant(
        {"optim.name": "muon", "optim.muon_beta2": 0.9, "data.order": "shuffled", "loop.gradient_accumulation_steps": 3}
    ),
    "one batch a step, differences": Variant({"data.order": "shuffled", "checkpoint.incremental": "delta"}),
    "a leg on answers, shuffled": Variant(
        {"data.order": "shuffled", "loop.gradient_accumulation_steps": 3}, "talk", "leg"
    ),
    "a branch on answers, at random": Variant(
        {"data.order": "random", "loop.gradient_accumulation_steps": 3}, "talk", "branch"
    ),
    "the best recipe for CPUs, on a mixture, averaged": Variant(
        {"ema.decay": 0.9, "loop.gradient_accumulation_steps": 2, "techniques.progressive-length": STAGES},
        "mixture",
        base=BEST,
    ),
    "documents masked, progressive length, plateau": Variant(
        {"data.mask_documents": True, "techniques.progressive-length": STAGES}
        | {"schedule.name": "plateau", "schedule.patience": 1},
        "mixture",
    ),
    "LoRA on answers, recomputed, fused": Variant(
        {"techniques.lora": {"rank": 4}, "techniques.activation-checkpointing": "on"}
        | {"techniques.fused-optimizer": "on", "techniques.fused-cross-entropy": "on"},
        "talk",
    ),
    "curriculum by loss on answers, micro-batches": Variant(
        {"loop.batch_size": 4, "techniques.loss-curriculum": "on", "techniques.gradient-accumulation": {"batches": 2}},
        "talk",
    ),
    "mixed precision, 8-bit optimizer, recomputed, averaged": Variant(
        {"model.d_model": 64, "ema.decay": 0.9, "techniques.mixed-precision": {"dtype": "bf16"}}
        | {"techniques.low-bit-optimizer": {"compiled": False}, "techniques.activation-checkpointing": "on"},
    ),
}

ORIGIN: dict[str, object] = {"loop.steps": 4, "optim.lr": 5e-3, "schedule.name": "constant"}
"""The settings of the run of 4 steps that differ."""


def prepare_data(folder: Path) -> dict[str, Path]:
    """Return folders of prepared data, by the name that a variant gives."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    talks = [[("user", f"q{number}"), ("assistant", "a" * (1 + number % 5))] for number in range(60)]
    found = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in talks]
    (folder / "talk.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    for name, words in (("foxes", "the quick brown fox; "), ("dogs", "the lazy dog, ")):
        texts = [words * (1 + number % 4) for number in range(60)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    mixture = f"{folder}/foxes.jsonl:0.7,{folder}/dogs.jsonl:0.3"
    return {
        "text": prepare(folder / "text.txt", folder / "text", tokenizer="char").path,
        "talk": prepare(folder / "talk.jsonl", folder / "talk", tokenizer="byte").path,
        "mixture": prepare(mixture, folder / "mixture", tokenizer="byte").path,
    }
