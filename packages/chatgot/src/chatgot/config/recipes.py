"""Recipes: functions that return a complete configuration. A variant calls another recipe and changes settings."""

import shlex
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from chatgot.config.config import CheckpointConfig, Config, DataConfig, EvalConfig, LoopConfig, SampleConfig
from chatgot.model.config import ModelConfig
from chatgot.optim.optimizers import OptimConfig
from chatgot.optim.schedules import ScheduleConfig
from tensorkeep.errors import UsageError, did_you_mean

# Opening a run raises this vocabulary size to the size of the data's vocabulary.
_FROM_DATA = 1
# GPUs are faster with vocabularies that are padded to a multiple of this.
_PADDED = 128
# What makes training on a GPU faster at the same loss; see `Config.default_techniques`.
_FAST: dict[str, dict[str, Any]] = {
    "mixed-precision": {},
    "tf32": {},
    "fused-optimizer": {},
    "compile": {},
    "attention-kernel": {"kernel": "auto"},
}


def shakespeare_char_cpu() -> Config:
    """The public reference for a laptop: nanoGPT's ``train_shakespeare_char`` on a CPU.

    The order of the data differs: each window comes once an epoch, which gives a loss about 0.015 lower than drawing
    windows with replacement.
    """
    return Config(
        recipe="shakespeare-char-cpu",
        model=ModelConfig(
            vocab_size=_FROM_DATA, context_length=64, n_layers=4, n_heads=4, d_model=128, dropout=0.0, bias=False
        ),
        data=DataConfig(tokenizer="char"),
        optim=OptimConfig(lr=1e-3, weight_decay=0.1, beta2=0.99, grad_clip=1.0),
        schedule=ScheduleConfig(name="cosine", warmup_steps=100, final=0.1),
        loop=LoopConfig(steps=2000, batch_size=12),
    )


def shakespeare_char_cpu_best() -> Config:
    """A much lower loss than shakespeare-char-cpu, with as many weights.

    Muon with normalised rows for the matrices of the blocks, token shifts and a convolution, rotary positions, ReLU^2,
    and matmuls, of attention too, in bfloat16 where that is faster. The context is 256, but the first two thirds of the
    steps cut each window into four.
    """
    return shakespeare_char_cpu().changed(
        {
            "recipe": "shakespeare-char-cpu-best",
            "model.context_length": 256,
            "model.positions": "rotary",
            "model.token_shift": "blocks",
            "model.convolution": 3,
            "model.activation": "relu2",
            "model.init_std": 0.05,
            "optim.name": "muon",
            "optim.muon_lr": 0.01,
            "optim.muon_split": True,
            "optim.muon_polynomials": "polar-express",
            "optim.muon_steps": 3,
            "optim.muon_beta2": 0.95,
            "optim.weight_decay": 0.2,
            "optim.lr": 0.01,
            "optim.implementation": "fused",
            "schedule.name": "linear",
            "schedule.warmup_steps": 50,
            "schedule.final": 0.0,
            "loop.steps": 2000,
            "loop.batch_size": 3,
            # At the end only.
            "eval.every": 0,
            "checkpoint.every": 500,
            "techniques.progressive-length": {"pieces": [4, 1], "shares": [0.65, 0.35]},
            "default_techniques": {"mixed-precision": {"dtype": "auto", "attention": "same"}},
            "techniques.attention-kernel": {"kernel": "matmul"},
        }
    )


def shakespeare_char_gpu() -> Config:
    """The public reference for one GPU: 6 layers of 384, context 256."""
    return shakespeare_char_cpu().changed(
        {
            "recipe": "shakespeare-char-gpu",
            "data.order": "random",
            "model.context_length": 256,
            "model.n_layers": 6,
            "model.n_heads": 6,
            "model.d_model": 384,
            "model.dropout": 0.2,
            "model.vocab_multiple": _PADDED,
            "loop.steps": 5000,
            "loop.batch_size": 64,
            "default_techniques": {**_FAST, "cuda-graphs": {}},
        }
    )


def chatgot_small_char() -> Config:
    """4 layers of 256 on characters: a small model."""
    return Config(
        recipe="chatgot-small-char",
        model=ModelConfig(
            vocab_size=_FROM_DATA, context_length=128, n_layers=4, n_heads=4, d_model=256, d_ff=1024, dropout=0.1
        ),
        data=DataConfig(tokenizer="char"),
        optim=OptimConfig(lr=1e-3),
        schedule=ScheduleConfig(name="cosine", warmup_steps=100),
        loop=LoopConfig(steps=2000, batch_size=16),
    )


def chatgot_85m() -> Config:
    """12 layers of 768 with rotary positions, RMSNorm and SwiGLU, on byte pairs: LLaMA's architecture, GPT-2's size."""
    return Config(
        recipe="chatgot-85m",
        model=ModelConfig(
            vocab_size=_FROM_DATA,
            context_length=1024,
            n_layers=12,
            n_heads=12,
            d_model=768,
            positions="rotary",
            norm="rmsnorm",
            activation="swiglu",
            tied=True,
            vocab_multiple=_PADDED,
        ),
        data=DataConfig(tokenizer="bpe", vocab_size=8192),
        optim=OptimConfig(lr=6e-4),
        schedule=ScheduleConfig(name="wsd", warmup_steps=500, final=0.0),
        loop=LoopConfig(steps=20_000, batch_size=8, gradient_accumulation_steps=8, auto_batch_size=True),
        eval=EvalConfig(every=500),
        sample=SampleConfig(every=500),
        checkpoint=CheckpointConfig(every=500),
        default_techniques={**_FAST, "fused-cross-entropy": {}},
    )


def gpt2_124m() -> Config:
    """GPT-2 small: 12 layers of 768, context 1,024, GPT-2's vocabulary padded to a multiple of 128."""
    return Config(
        recipe="gpt2-124m",
        model=ModelConfig(
            vocab_size=50304,
            context_length=1024,
            n_layers=12,
            n_heads=12,
            d_model=768,
            activation="gelu_tanh",
            bias=True,
            vocab_multiple=_PADDED,
        ),
        data=DataConfig(tokenizer="tiktoken:gpt2"),
        optim=OptimConfig(lr=6e-4, weight_decay=0.1),
        schedule=ScheduleConfig(name="cosine", warmup_steps=700),
        loop=LoopConfig(steps=19_000, batch_size=16, gradient_accumulation_steps=32, auto_batch_size=True),
        eval=EvalConfig(every=500),
        checkpoint=CheckpointConfig(every=1000),
        default_techniques={**_FAST, "fused-cross-entropy": {}},
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "shakespeare-char-cpu": shakespeare_char_cpu,
    "shakespeare-char-cpu-best": shakespeare_char_cpu_best,
    "shakespeare-char-gpu": shakespeare_char_gpu,
    "chatgot-small-char": chatgot_small_char,
    "chatgot-85m": chatgot_85m,
    "gpt2-124m": gpt2_124m,
}


def get_recipe(name: str) -> Config:
    """Return a recipe's configuration.

    Raises
    ------
    UsageError
        If there is no recipe of that name.

    Examples
    --------
    >>> from chatgot.config.recipes import get_recipe
    >>> config = get_recipe("shakespeare-char-cpu").changed({"loop.steps": 100, "optim.name": "muon"})
    >>> config.loop.steps, config.optim.name
    (100, 'muon')
    """
    if name not in RECIPES:
        remedy = did_you_mean(name, RECIPES, "recipes")
        if PurePath(name).suffix in (".toml", ".yaml", ".yml", ".json"):
            remedy = (
                f"give the file after the name of a recipe: tensorkeep train RECIPE -C {shlex.quote(name)}; {remedy}"
            )
        raise UsageError(f"there is no recipe {name!r}", remedy=remedy)
    return RECIPES[name]()
