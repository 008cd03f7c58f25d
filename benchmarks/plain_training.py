"""What the trainer costs: its steps beside a minimal loop in plain PyTorch, and beside its own steps with saving.

``python benchmarks/plain_training.py --text FILE`` runs three loops in turns, in one process, and prints tokens per
second as medians of interleaved rounds, and two ratios: the trainer to the plain loop, at least 0.97, and the trainer
that saves its whole state every 50 steps, in the background and incrementally, to the one that does not, at least 0.98.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from holdfast import environment
from holdfast.train.data.dataset import Dataset
from holdfast.train.data.prepare import prepare
from holdfast.train.loop import take_step
from holdfast.train.recipes import get_recipe
from holdfast.train.run import Run, open_run
from holdfast.train.run_folder import RunFolder

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
STEPS = 50


class Block(nn.Module):
    """Attention and an MLP, as nanoGPT writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, HEADS, -1).transpose(1, 2) for each in self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        )
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """The model, and nothing else."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places.weight)))


def plain_steps(tokens: np.ndarray[Any, Any], vocabulary: int) -> Iterator[None]:
    """Make a step of a loop that a person would write by hand, each time it is asked for one."""
    model = Gpt(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    draw = np.random.default_rng(0)
    for step in range(1, 1_000_000):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / 2000))))
        starts = draw.integers(0, len(tokens) - CONTEXT - 1, BATCH)
        rows = np.stack([tokens[start : start + CONTEXT + 1] for start in starts]).astype(np.int64)
        batch = torch.from_numpy(rows)
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        yield


def our_steps(run: Run) -> Iterator[None]:
    """Make a step of the trainer, each time it is asked for one."""
    while True:
        take_step(run)
        yield


def saving_steps(run: Run, every: int = 50) -> Iterator[None]:
    """Make a step of the trainer, and after every 50th, in the middle of a round, save the whole state."""
    for number, _ in enumerate(our_steps(run)):
        if number % every == every // 2:
            run.manager.save(run.progress.step, run.state())
        if number % every == every - 1:
            run.manager.wait()  # what was begun in a round is paid for in it
        yield


def main() -> int:
    """Measure, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--text", default="stdlib", help="what both train on: a file, or stdlib")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    samples: dict[str, list[float]] = {"trainer": [], "plain": [], "saving": []}
    with tempfile.TemporaryDirectory() as folder:
        prepare(options.text, f"{folder}/data")
        dataset = Dataset.open(f"{folder}/data")
        config = get_recipe("shakespeare-char-cpu").changed({"loop.steps": 1_000_000})
        with (
            open_run(config, RunFolder(f"{folder}/run"), dataset) as run,
            open_run(config, RunFolder(f"{folder}/saved"), dataset) as saved,
        ):
            steps = {
                "trainer": our_steps(run),
                "plain": plain_steps(dataset.train, dataset.vocab_size),
                "saving": saving_steps(saved),
            }
            order = random.Random(0)
            for number in range(options.rounds + 1):
                for name in order.sample(sorted(steps), len(steps)):
                    begin = time.perf_counter()
                    for _ in range(STEPS):
                        next(steps[name])
                    rate = STEPS * BATCH * CONTEXT / (time.perf_counter() - begin)
                    if number:  # the first round loads kernels
                        samples[name].append(rate)
        about = environment.describe(Path(folder))
    for name, rates in samples.items():
        print(f"{name:8} {statistics.median(rates):10,.0f} tokens/s ({min(rates):,.0f} to {max(rates):,.0f})")
    figures = {
        "trainer / plain": (_ratio(samples, "trainer", "plain"), 0.97),
        "saving every 50 steps / trainer": (_ratio(samples, "saving", "trainer"), 0.98),
    }
    for what, ((ratio, least, most), bound) in figures.items():
        verdict = "PASS" if ratio >= bound else "MISS"
        print(f"{what}: {ratio:.3f} ({least:.3f} to {most:.3f}), must be {bound} or more: {verdict}")
    if options.out:
        document = {
            "command": " ".join(sys.argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": about,
            "samples": samples,
            "figures": {what: {"ratio": found[0], "must_reach": bound} for what, (found, bound) in figures.items()},
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(found[0] >= bound for found, bound in figures.values()) else 1


def _ratio(samples: dict[str, list[float]], over: str, under: str) -> tuple[float, float, float]:
    found = [a / b for a, b in zip(samples[over], samples[under], strict=True)]
    return statistics.median(found), min(found), max(found)


if __name__ == "__main__":
    sys.exit(main())
