"""Training techniques on a GPU, in turns: ``python benchmarks/gpu_training.py --data text.txt --out results.json``.

Each arm trains the recipe in a process of its own, which proves in its first step that its techniques are active. When
all have compiled and warmed up they take turns on the GPU, in random order in each round: speed is that of whole turns,
without their first step, with the loss of each step read; memory is what torch's allocator counts in them. An arm that
cannot run is listed with its error.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from chatgot.config.config import Config
from chatgot.config.recipes import get_recipe
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.step.train_step import take_step
from figures import Worker, compared, note, parser_of, write_samples
from tensorkeep.cli.text import Table
from tensorkeep.units import format_bytes
from tensorkeep_bench.training.workload import measured_config

SEED = 20_261_126
PLAIN = "plain"

BF16 = {"mixed-precision.dtype": "bf16"}
ARMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "tf32": {"tf32": "on"},
    "mixed-precision": BF16,
    "fused-optimizer": {"fused-optimizer": "on"},
    "fused-cross-entropy": {"fused-cross-entropy": "on"},
    "cuda-graphs": {"cuda-graphs": "on"},
    "triton-kernel": {"triton-kernel": "on"},
    "activation-checkpointing": {"activation-checkpointing": "on"},
    "activation-swapping": {"activation-swapping": "on"},
    "optimizer-offload": {"optimizer-offload": "on"},
    "low-bit-optimizer": {"low-bit-optimizer.bits": 8},
    "compile": {"compile": "on"},
    "bf16, efficient": {**BF16, "attention-kernel.kernel": "efficient"},
    "bf16, flash": {**BF16, "attention-kernel.kernel": "flash"},
    "bf16, cudnn": {**BF16, "attention-kernel.kernel": "cudnn"},
    "bf16, compile": {**BF16, "compile": "on"},
    "bf16, compile, float8": {**BF16, "compile": "on", "quantised-forward.mode": "float8"},
}
"""What is on beside the plain loop; two more arms have what the recipe turns on, without and with CUDA graphs."""


def main() -> int:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--recipe", default="chatgot-85m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--turn", type=float, default=0.5, help="the least seconds of a turn")
    parser.add_argument("--at-once", type=int, default=4, help="arms that start together")
    parser.add_argument("--seconds", type=float, default=600, help="after which no further round begins")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(json.loads(options.worker), options.data, options.turn)
        return 0
    begin, recipe = time.perf_counter(), get_recipe(options.recipe)
    arms = {name: {f"techniques.{key}": value for key, value in given.items()} for name, given in ARMS.items()}
    default = {f"techniques.{name}": given or "on" for name, given in recipe.default_techniques.items()}
    arms |= {"of the recipe": default, "of the recipe, cuda-graphs": {**default, "techniques.cuda-graphs": "on"}}
    fixed = {"loop.batch_size": options.batch, "loop.gradient_accumulation_steps": 1, "eval.every": 0}
    configs = {name: measured_config(recipe, steps=100_000, changes={**fixed, **given}) for name, given in arms.items()}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = recipe.data
        prepare(str(options.data), folder / "data", tokenizer=source.tokenizer, vocab_size=source.vocab_size)
        workers: dict[str, Arm] = {}
        names = [*configs]
        for first in range(0, len(names), options.at_once):
            started = {
                name: stack.enter_context(worker(configs[name], folder, name, options.turn))
                for name in names[first : first + options.at_once]
            }
            for name, each in started.items():
                workers[name] = Arm(*each)
                note(f"{name}: {workers[name].error or 'ready'}")
        order, rounds = random.Random(SEED), 0
        while rounds < options.rounds and time.perf_counter() - begin < options.seconds:
            running = [name for name, each in workers.items() if each.error is None]
            for name in order.sample(running, len(running)):
                workers[name].turn()
            rounds += 1
    found = {name: each.found() for name, each in workers.items()}
    Table(("techniques", ">tokens/s", ">gain", ">95%", ">memory"), rows(found)).show()
    command = f"gpu_training.py --recipe {options.recipe} --batch {options.batch}"
    write_samples(options.out, command, rounds=rounds, settings=arms, arms=found)
    return 0


def rows(found: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the speed of each arm beside that of the plain loop in the same rounds, and its memory."""
    table, plain = [], found[PLAIN]["tokens_per_second"]
    for name, arm in found.items():
        if "error" in arm:
            table.append((name, arm["error"][-60:], "", "", ""))
            continue
        gain = compared(arm["tokens_per_second"], plain)
        spread = "" if gain.low is None else f"{gain.low:.2f} - {gain.high:.2f}"
        speed = f"{statistics.median(arm['tokens_per_second']):,.0f}"
        table.append((name, speed, f"{gain.gain:.2f}", spread, format_bytes(arm["peak_memory"])))
    return table


class Arm:
    """The process of an arm: what it reported first, its turns, and the error that ended it."""

    def __init__(self, worker: Worker, errors: Path) -> None:
        self._worker, self._errors = worker, errors
        self.error: str | None = None
        self.turns: list[dict[str, Any]] = []
        self.first = self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._worker.answer()
        except SystemExit:
            self.error = (self._errors.read_text().strip().splitlines() or ["ended"])[-1][:300]
            return {}
        return found

    def turn(self) -> None:
        """Let the process train for a turn."""
        self._worker.send()
        if found := self._answer():
            self.turns.append(found)

    def found(self) -> dict[str, Any]:
        """Return the figures of the arm."""
        if self.error is not None:
            return {"error": self.error}
        return {
            **self.first,
            "tokens_per_second": [each["tokens_per_second"] for each in self.turns],
            "steps": [each["steps"] for each in self.turns],
            "peak_memory": max(each["peak_memory"] for each in self.turns),
        }


@contextmanager
def worker(config: Config, folder: Path, name: str, turn: float) -> Iterator[tuple[Worker, Path]]:
    """Start the process of an arm, and end it."""
    errors = folder / f"{name}.txt"
    task = json.dumps({"config": config.as_dict(), "folder": str(folder / f"run of {name}")})
    command = [sys.executable, __file__, "--data", str(folder / "data"), "--turn", str(turn), "--worker", task]
    # A cache for each: otherwise the seconds of compilation would be those of the first arm alone.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / f"compiled {name}")}
    with errors.open("w") as output:
        started = Worker(*command, stderr=output, env=environment)
    try:
        yield started, errors
    finally:
        started.process.kill()
        started.process.communicate()


def work(task: dict[str, Any], data: Path, turn: float) -> None:
    """Train: the first steps, whose losses and proofs are reported, and then a turn for each line that is read."""
    config = Config.from_dict(task["config"])
    with open_run(config, RunFolder(Path(task["folder"])), Dataset.open(data)) as run:
        begin = time.perf_counter()
        with run.techniques.verified(run):
            losses = [take_step(run)["loss"]]
        seconds = time.perf_counter() - begin
        losses += [take_step(run)["loss"] for _ in range(7)]
        seen = {name: proof.summary for name, proof in run.techniques.proofs.items()}
        torch.cuda.empty_cache()
        print(json.dumps({"first_step": seconds, "losses": losses, "seen": seen}), flush=True)
        for _ in sys.stdin:
            torch.cuda.reset_peak_memory_stats()
            take_step(run)
            torch.cuda.synchronize()
            begin, tokens, steps = time.perf_counter(), run.progress.tokens, 0
            while steps < 2 or time.perf_counter() - begin < turn:
                take_step(run)
                steps += 1
            torch.cuda.synchronize()
            speed = (run.progress.tokens - tokens) / (time.perf_counter() - begin)
            figures = {"tokens_per_second": speed, "steps": steps, "peak_memory": torch.cuda.max_memory_allocated()}
            torch.cuda.empty_cache()
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    sys.exit(main())
