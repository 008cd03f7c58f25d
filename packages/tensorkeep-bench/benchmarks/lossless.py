"""What lossless compression costs: ``python benchmarks/lossless.py``, part of ``make bench``.

Each figure that must be reached is one line with PASS or MISS; raw samples and the environment go to a JSON file.

* How fast one core codes and decodes weights of each dtype with each coder, and how small they get (``coder_rates``).
* Durable saves, cold loads, and warm loads into existing tensors: raw, lossless with each coder, and torch, in turns.
* Training steps beside a lossless background save, beside a raw one, and alone, in turns.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import coder_rates
import tensorkeep
from figures import Line, Samples, note, parser_of, ratios, show, write_samples
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep.units import parse_bytes
from tensorkeep_bench.checkpoint.files import make_cold, remove, sync_tree, warm
from tensorkeep_bench.checkpoint.models import build, spec_of_size

SEED = 20_261_122
ARMS = {"torch": "compiled", "raw": "compiled", "lossless": "compiled", "lossless in Python": "python"}
"""The coder of the process that measures each arm."""


def main() -> int:
    """Measure, print, write; return the exit code."""
    parser = parser_of(__doc__, rounds=7, folder="a folder on the disk to measure")
    parser.add_argument("--size", type=parse_bytes, default="2GB", help="about this many bytes of bfloat16 weights")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options)
    folder = Path(tempfile.mkdtemp(prefix="tensorkeep-bench-", dir=options.dir))
    try:
        samples = {name: PARTS[name](folder, options) for name in options.only}
    finally:
        shutil.rmtree(folder)
    lines = [line for name in options.only for line in LINES[name](samples[name])]
    command = f"lossless.py --size {options.size} --rounds {options.rounds}"
    write_samples(options.out, command, folder=options.dir, lines=lines, samples=samples)
    return show(lines)


# One core


def rates(folder: Path, options: argparse.Namespace) -> Samples:
    """Return rates and sizes of each dtype and coder."""
    samples: Samples = {}
    for dtype in coder_rates.DTYPES:
        note(f"one core, {dtype}")
        for each in coder_rates.measure(BY_NAME[dtype], options.rounds):
            for what, value in (("code", each.encode), ("decode", each.decode), ("size", each.size)):
                samples.setdefault(f"{what} {dtype} {each.coder}", []).append(value)
    return samples


def rates_lines(samples: Samples) -> Iterator[Line]:
    for what, bound in (("code", 3.0), ("decode", 3.5)):
        found = samples[f"{what} bfloat16 compiled"]
        yield Line(f"{what}, one core, bfloat16", bound, statistics.median(found), min(found), max(found), unit="GB/s")
    size = statistics.median(samples["size bfloat16 compiled"])
    yield Line("stored bytes over raw, bfloat16", 0.664, size, at_most=True)
    for dtype in coder_rates.DTYPES:
        for what in ("code", "decode"):
            found = ratios(samples, f"{what} {dtype} compiled", f"{what} {dtype} python")
            yield Line(f"{what}, {dtype}, times the coder in Python", BOUNDS.get(dtype), *found)
        found = ratios(samples, f"size {dtype} compiled", f"size {dtype} python")
        yield Line(f"stored bytes, {dtype}, over those of the coder in Python", 1.002, *found, at_most=True)


BOUNDS = {"float16": 2.0, "float32": 2.0}


# Saves and loads


class Worker:
    """A process of its own with the state in memory, which uses one coder."""

    def __init__(self, coder: str, folder: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--worker", "--size", str(options.size), "--dir", str(folder)]
        environment = os.environ | {"TENSORKEEP_CODER": coder}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.ask("ready")

    def ask(self, *request: str) -> list[float]:
        """Let it measure something; return seconds and seconds of processor time."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        found: list[float] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def saves(folder: Path, options: argparse.Namespace) -> Samples:
    """Return seconds and processor seconds of saves and loads of each arm."""
    workers = {coder: Worker(coder, folder, options) for coder in ("compiled", "python")}
    samples: Samples = {}
    for number in range(options.rounds + 1):
        for what in ("save", "cold load", "warm load"):
            note(f"round {number} of {options.rounds}: {what}")
            for arm in list(ARMS)[number % len(ARMS) :] + list(ARMS)[: number % len(ARMS)]:
                seconds, processor = workers[ARMS[arm]].ask(what, arm)
                if number:  # the first round is not counted
                    samples.setdefault(f"{what}, {arm}", []).append(seconds)
                    samples.setdefault(f"{what}, {arm}, processor", []).append(processor)
    for worker in workers.values():
        worker.close()
    return samples


def saves_lines(samples: Samples) -> Iterator[Line]:
    def faster(bound: float | None, what: str, ours: str, theirs: str) -> Line:
        return Line(
            f"{what}, {ours}, against {theirs}", bound, *ratios(samples, f"{what}, {theirs}", f"{what}, {ours}")
        )

    yield faster(1.2, "save", "lossless", "raw")
    yield faster(3.0, "save", "lossless", "torch")
    yield faster(None, "save", "lossless", "lossless in Python")
    name = "save, {}, processor"
    found = ratios(samples, name.format("lossless"), name.format("lossless in Python"))
    yield Line("save, processor seconds, over those of the coder in Python", 0.35, *found, at_most=True)
    yield faster(1.3, "cold load", "lossless", "raw")
    yield faster(1.5, "warm load", "lossless", "torch")


def work(options: argparse.Namespace) -> int:
    """Measure what is asked for on standard input."""
    state = build(spec_of_size(options.size), seed=SEED)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for line in sys.stdin:
        what, *arms = json.loads(line)
        print(json.dumps(measure(what, arms[0], options.dir, state, into) if arms else []), flush=True)
    return 0


def measure(
    what: str, arm: str, folder: Path, state: dict[str, torch.Tensor], into: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Measure one save or load."""
    path = folder / arm.replace(" ", "-")
    compression = "none" if arm == "raw" else "lossless"
    if what == "save":
        remove(path)
        os.sync()
        if arm == "torch":
            return timed(lambda: (torch.save(state, path), sync_tree(path)))
        return timed(lambda: tensorkeep.save(state, path, compression=compression))
    if what == "cold load":
        assert make_cold(path)
    else:
        warm(path)
    if arm == "torch":
        return timed(lambda: torch.load(path))
    return timed(lambda: tensorkeep.load(path, into=into))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    processor, begin = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - begin, time.process_time() - processor


# Beside training


def training(folder: Path, options: argparse.Namespace) -> Samples:
    """Return the median seconds of a training step, alone and beside background saves."""
    state = build(spec_of_size(options.size), seed=SEED)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(256, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def steps_while(busy: Callable[[], bool]) -> float:
        found = []
        while busy() or len(found) < 5:
            found.append(timed(step)[0])
        return statistics.median(found)

    samples: Samples = {"alone": [], "raw": [], "lossless": []}
    for number in range(options.rounds + 1):
        note(f"round {number} of {options.rounds}: steps of training")
        end = time.perf_counter() + 1.0
        found = {"alone": steps_while(lambda end=end: time.perf_counter() < end)}
        for arm in ("raw", "lossless") if number % 2 else ("lossless", "raw"):
            compression = "none" if arm == "raw" else arm
            pending = tensorkeep.save_async(state, folder / "beside", compression=compression, overwrite=True)
            found[arm] = steps_while(lambda pending=pending: not pending.done())
            pending.wait()
        if number:
            for arm, seconds in found.items():
                samples[arm].append(seconds)
    return samples


def training_lines(samples: Samples) -> Iterator[Line]:
    yield Line(
        "training step beside a lossless save / a raw one", 1.05, *ratios(samples, "lossless", "raw"), at_most=True
    )
    yield Line("training step beside a raw save / alone", None, *ratios(samples, "raw", "alone"), at_most=True)


PARTS: dict[str, Callable[[Path, argparse.Namespace], Samples]] = {
    "rates": rates,
    "saves": saves,
    "training": training,
}
LINES: dict[str, Callable[[Samples], Iterator[Line]]] = {
    "rates": rates_lines,
    "saves": saves_lines,
    "training": training_lines,
}

if __name__ == "__main__":
    sys.exit(main())
