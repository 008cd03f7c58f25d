"""What the trainer costs: its loop beside a minimal one in plain PyTorch, and beside itself with saving.

``python benchmarks/plain_training.py`` lets three loops train the model of the recipe ``shakespeare-char-cpu``, in
float32 and in one process, in rounds of as many steps each. The first two take turns of ten steps, as a step of the
same code can take a quarter more time a few seconds later; the third is first or last:

* *plain*: a minimal loop, without anything that training does not need;
* *trainer*: `chatgot.loop.train` with its log, no evaluation and no checkpoint;
* *saving*: the same with a checkpoint every 50 steps, incremental and in the background as the recipe has it, until the
  last of them is durable.

Three ratios are printed with their 95% intervals: tokens per second of the trainer over those of the plain loop in the
same round, at least 0.97; the time of saving over that of never saving in the same round; and, as rounds differ by more
than a save costs, the time of the steps during a save, divided by the time of steps without one a second later, at most
1.02 for all steps.
"""

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from chatgot.config.recipes import get_recipe
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.loop import Silent, train
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.run.state import OpenRun
from figures import compared, mean_line, note, parser_of, show, write_samples
from tensorkeep_bench.statistics import compare, describe

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
SAVE_EVERY = 50
FASTER = "trainer / plain, tokens/s"
SLOWER = "saving / trainer, time, by rounds"
BESIDE = "saving / not saving, time, by steps"
BOUNDS = {FASTER: 0.97, BESIDE: 1.02}

TURN = 10
"""Steps after which the other loop continues."""

_DISTURBED = 10
"""Steps after a save, of which each takes some 40 ms and a save in the background less than 100."""

Samples = dict[str, list[float]]
"""Seconds of each loop, round by round; ``"beside"``: the time with a save over that without, save by save."""


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-", dir=options.dir) as folder:
        samples = measure(options, Path(folder))
    ratios = {
        FASTER: compared(samples["plain"], samples["trainer"]),
        SLOWER: compared(samples["saving"], samples["trainer"]),
        BESIDE: compare([math.log(each) for each in samples["beside"]]),
    }
    lines = [mean_line(what, BOUNDS.get(what), ratio, at_most=what != FASTER) for what, ratio in ratios.items()]
    for name in ("plain", "trainer", "saving"):
        rates = describe([options.steps * BATCH * CONTEXT / each for each in samples[name]])
        print(f"{name:8} {rates.median:10,.0f} tokens/s ({rates.low:,.0f} to {rates.high:,.0f})")
    write_samples(
        options.out,
        f"plain_training.py --data {Path(options.data).name} --rounds {options.rounds} --steps {options.steps}",
        folder=options.dir,
        lines=lines,
        threads=torch.get_num_threads(),
        tokens_per_round=options.steps * BATCH * CONTEXT,
        seconds=samples,
        ratios={what: asdict(ratio) for what, ratio in ratios.items()},
    )
    return show(lines)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=15, folder="a folder on the disk that is saved to")
    parser.add_argument("--data", default="stdlib", help="any text; by default Python's standard library")
    parser.add_argument("--steps", type=int, default=3 * SAVE_EVERY, help="of each loop in a round; a multiple of 10")
    options = parser.parse_args()
    if options.rounds < 2 or options.steps < 2 * SAVE_EVERY or options.steps % TURN:
        parser.error(f"--rounds takes 2 or more, --steps {2 * SAVE_EVERY} or more, a multiple of {TURN}")
    return options


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


def steps_by_hand(model: Gpt, tokens: np.ndarray[Any, Any]) -> Iterator[None]:
    """Make a step of a loop that a person would write by hand each time one is asked for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    draw = np.random.default_rng(0)
    for step in itertools.count(1):
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


def measure(options: argparse.Namespace, folder: Path) -> Samples:
    """Return what each loop took in each round; a first one only loads kernels and warms memory."""
    prepare(options.data, folder / "data")
    dataset = Dataset.open(folder / "data")
    config = get_recipe("shakespeare-char-cpu").changed(
        {"loop.steps": 10**9, "loop.device": "cpu", "eval.every": 0, "checkpoint.every": 0}
    )
    with ExitStack() as stack:
        run = stack.enter_context(open_run(config, RunFolder(folder / "run"), dataset))
        saving = config.changed({"checkpoint.every": SAVE_EVERY})
        saved = stack.enter_context(open_run(saving, RunFolder(folder / "saved"), dataset))
        model = Gpt(run.config.model.vocab_size)
        if sum(each.numel() for each in model.parameters()) != run.config.model.parameter_count():
            raise AssertionError("the plain model is not that of the recipe")
        plain = steps_by_hand(model, dataset.train)
        samples: Samples = {"plain": [], "trainer": [], "saving": [], "beside": []}
        loops: list[Callable[[], dict[str, list[float]]]] = [
            lambda: _trained_in_turns(run, plain, options.steps),
            lambda: _trained_and_saved(saved, options.steps),
        ]
        for number in range(options.rounds + 1):
            note(f"round {number} of {options.rounds}")
            for loop in loops[:: -1 if number % 2 else 1]:
                for name, seconds in loop().items():
                    samples[name] += seconds if number else []
    return samples


def _trained_in_turns(run: OpenRun, plain: Iterator[None], steps: int) -> dict[str, list[float]]:
    """Return the seconds of some steps of the trainer and of as many by hand.

    The checkpoint with which every training ends is not among them.
    """
    last, begin, by_hand, by_trainer = run.progress.step + steps, time.perf_counter(), 0.0, 0.0

    def stop() -> bool:
        nonlocal begin, by_hand, by_trainer
        if (last - run.progress.step) % TURN == 0:
            middle = time.perf_counter()
            for _ in range(TURN):
                next(plain)
            end = time.perf_counter()
            by_trainer, by_hand, begin = by_trainer + middle - begin, by_hand + end - middle, end
        return run.progress.step >= last

    train(run, Silent(), stop=stop)
    return {"plain": [by_hand], "trainer": [by_trainer]}


def _trained_and_saved(run: OpenRun, steps: int) -> dict[str, list[float]]:
    """Return the seconds of some steps of the trainer, until every checkpoint is durable, and what each save costs."""
    last, ends = run.progress.step + steps, [time.perf_counter()]

    def stop() -> bool:
        ends.append(time.perf_counter())
        return run.progress.step >= last

    train(run, Silent(), stop=stop)
    seconds = time.perf_counter() - ends[0]
    # `stop` runs before the save, so the cost of a save appears in the next steps.
    each = np.diff(ends)
    windows = [each[first : first + SAVE_EVERY] for first in range(SAVE_EVERY, steps - SAVE_EVERY + 1, SAVE_EVERY)]
    beside = [float(window.sum() / (window[_DISTURBED:].mean() * SAVE_EVERY)) for window in windows]
    return {"saving": [seconds], "beside": beside}


if __name__ == "__main__":
    sys.exit(main())
