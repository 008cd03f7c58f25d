"""What lossless compression costs: ``python benchmarks/lossless.py``, part of ``make bench``.

Each figure that must be reached is one line with PASS or MISS; raw samples and the environment go to a JSON file.

* How fast one core codes and decodes weights of each dtype with each coder, and how small they get (``coder_rates``).
* Durable saves, cold loads, and warm loads into existing tensors: raw, lossless with each coder, and torch, in turns.
* Training steps beside a lossless background save, beside a raw one, and alone, in turns.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import coder_rates
import figures
import tensorkeep
from tensorkeep.state.dtypes import BY_NAME
from tensorkeep_bench.checkpoint.files import make_cold, remove, sync_tree, warm
from tensorkeep_bench.checkpoint.models import build, spec_of_size

SEED = 20_261_122
ARMS = {"torch": "compiled", "raw": "compiled", "lossless": "compiled", "lossless in Python": "python"}
"""The coder of the process that measures each arm."""


def main() -> int:
    parser = figures.parser_of(__doc__, rounds=7, folder="a folder on the disk to measure", size="2GB", parts=PARTS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    return work(options) if options.worker else figures.run_parts("lossless.py", PARTS, options)


# One core


def rates(folder: Path, options: argparse.Namespace) -> figures.Samples:
    """Return rates and sizes of each dtype and coder."""
    samples: figures.Samples = {}
    for dtype in coder_rates.DTYPES:
        figures.note(f"one core, {dtype}")
        samples |= coder_rates.measure(BY_NAME[dtype], options.rounds)
    return samples


def rates_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    for what, bound in (("code", 3.0), ("decode", 3.5)):
        found = samples[f"{what} bfloat16 compiled"]
        yield figures.median_line(f"{what}, one core, bfloat16", bound, found, unit="GB/s")
    size = statistics.median(samples["size bfloat16 compiled"])
    yield figures.Line("stored bytes over raw, bfloat16", 0.664, size, at_most=True)
    for dtype in coder_rates.DTYPES:
        for what in ("code", "decode"):
            found = figures.ratios(samples, f"{what} {dtype} compiled", f"{what} {dtype} python")
            yield figures.Line(f"{what}, {dtype}, times the coder in Python", BOUNDS.get(dtype), *found)
        found = figures.ratios(samples, f"size {dtype} compiled", f"size {dtype} python")
        yield figures.Line(f"stored bytes, {dtype}, over those of the coder in Python", 1.002, *found, at_most=True)


BOUNDS = {"float16": 2.0, "float32": 2.0}


# Saves and loads


def saves(folder: Path, options: argparse.Namespace) -> figures.Samples:
    """Return seconds and processor seconds of saves and loads of each arm."""
    command = [sys.executable, __file__, "--worker", "--size", str(options.size), "--dir", str(folder)]
    # Each has the state in memory, and uses one coder.
    workers = {
        coder: figures.Worker(*command, env=os.environ | {"TENSORKEEP_CODER": coder})
        for coder in ("compiled", "python")
    }
    for worker in workers.values():
        worker.answer()
    samples: figures.Samples = {}
    for number in range(options.rounds + 1):
        for what in ("save", "cold load", "warm load"):
            figures.note(f"round {number} of {options.rounds}: {what}")
            for arm in list(ARMS)[number % len(ARMS) :] + list(ARMS)[: number % len(ARMS)]:
                seconds, processor = workers[ARMS[arm]].ask([what, arm])
                if number:  # the first round is not counted
                    samples.setdefault(f"{what}, {arm}", []).append(seconds)
                    samples.setdefault(f"{what}, {arm}, processor", []).append(processor)
    for worker in workers.values():
        worker.close()
    return samples


def saves_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    def faster(bound: float | None, what: str, ours: str, theirs: str) -> figures.Line:
        return figures.ratio_line(
            f"{what}, {ours}, against {theirs}", bound, samples, f"{what}, {theirs}", f"{what}, {ours}"
        )

    yield faster(1.2, "save", "lossless", "raw")
    yield faster(3.0, "save", "lossless", "torch")
    yield faster(None, "save", "lossless", "lossless in Python")
    name = "save, {}, processor"
    found = figures.ratios(samples, name.format("lossless"), name.format("lossless in Python"))
    yield figures.Line("save, processor seconds, over those of the coder in Python", 0.35, *found, at_most=True)
    yield faster(1.3, "cold load", "lossless", "raw")
    yield faster(1.5, "warm load", "lossless", "torch")


def work(options: argparse.Namespace) -> int:
    """Measure what is asked for on standard input."""
    state = build(spec_of_size(options.size), seed=SEED)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    print("[]", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(*json.loads(line), options.dir, state, into)), flush=True)
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


def training(folder: Path, options: argparse.Namespace) -> figures.Samples:
    """Return the median seconds of a training step, alone and beside background saves."""
    state = build(spec_of_size(options.size), seed=SEED)
    step = figures.training_step()
    samples: figures.Samples = {"alone": [], "raw": [], "lossless": []}
    for number in range(options.rounds + 1):
        figures.note(f"round {number} of {options.rounds}: steps of training")
        found = {"alone": figures.median_step(step, figures.for_seconds(1.0))}
        for arm in ("raw", "lossless") if number % 2 else ("lossless", "raw"):
            compression = "none" if arm == "raw" else arm
            pending = tensorkeep.save_async(state, folder / "beside", compression=compression, overwrite=True)
            found[arm] = figures.median_step(step, lambda pending=pending: not pending.done())
            pending.wait()
        if number:
            for arm, seconds in found.items():
                samples[arm].append(seconds)
    return samples


def training_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    what = "training step beside a lossless save / a raw one"
    yield figures.ratio_line(what, 1.05, samples, "lossless", "raw", at_most=True)
    yield figures.ratio_line("training step beside a raw save / alone", None, samples, "raw", "alone", at_most=True)


PARTS: dict[str, figures.Part] = {
    "rates": (rates, rates_lines),
    "saves": (saves, saves_lines),
    "training": (training, training_lines),
}

if __name__ == "__main__":
    sys.exit(main())
