"""What saving costs a training run: ``python benchmarks/training_saves.py``, the second half of ``make bench``.

Each figure that must be reached is one line with PASS or MISS; raw samples and the environment go to a JSON file.

* How long an asynchronous save blocks the loop, against one plain copy of the state, and against DCP's ``async_save``.
* How much slower training steps are while a save is written, against the same save made by another process.
* What an incremental save of a state with 5% of its tensors changed writes, and how long it takes.
* How small differences make the checkpoints of a GPT that really trains, and what reading the deepest chain costs.
* How much host memory a save and a load take besides the state, at three sizes.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import figures
import tensorkeep
from tensorkeep.units import parse_bytes
from tensorkeep_bench.checkpoint.files import make_cold, warm
from tensorkeep_bench.checkpoint.models import build, spec_of_size

SEED = 20_241_121


def main() -> int:
    parser = figures.parser_of(__doc__, rounds=7, folder="a folder on the disk to measure", size="2GB", parts=PARTS)
    return figures.run_parts("training_saves.py", PARTS, parser.parse_args())


# How long the loop is blocked


def stall(folder: Path, options: argparse.Namespace) -> figures.Samples:
    """Return seconds by kind and round; the first round only makes memory warm."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    state = build(spec_of_size(options.size), seed=SEED)
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    # The second keeps its memory from save to save, as Tensorkeep does; its other options need a GPU.
    stagers = {"dcp": None, "dcp, kept memory": DefaultStager(StagingOptions(False, False, False, False))}
    samples: figures.Samples = {name: [] for name in ("copy", "one thread", "tensorkeep", *stagers)}
    manager = tensorkeep.CheckpointManager(folder / "run", keep_last=1)

    def plain() -> float:
        return figures.seconds_of(lambda: [target[name].copy_(tensor) for name, tensor in state.items()])

    def one_thread() -> float:
        pairs = [(target[n].view(torch.int16).numpy(), t.view(torch.int16).numpy()) for n, t in state.items()]
        return figures.seconds_of(lambda: [np.copyto(*pair) for pair in pairs])

    def ours(number: int) -> float:
        begin = time.perf_counter()
        pending = manager.save(number, state)
        held = time.perf_counter() - begin
        pending.wait()
        return held

    def theirs(number: int, name: str) -> float:
        place = folder / f"dcp-{number}"
        begin = time.perf_counter()
        future = dcp.async_save(
            dict(state), storage_writer=dcp.FileSystemWriter(place), async_stager=stagers[name], no_dist=True
        )
        held = time.perf_counter() - begin
        getattr(future, "upload_completion", future).result()
        shutil.rmtree(place)
        return held

    for number in range(options.rounds + 1):
        found = {"copy": plain(), "one thread": one_thread(), "tensorkeep": ours(number)}
        found |= {name: theirs(number, name) for name in stagers}
        if number:
            for name, seconds in found.items():
                samples[name].append(seconds)
    manager.close()
    return samples


def stall_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    yield figures.ratio_line("stall / plain copy", 1.3, samples, "tensorkeep", "copy", at_most=True)
    yield figures.ratio_line("stall / DCP async_save", 0.7, samples, "tensorkeep", "dcp", at_most=True)


# How much slower steps are


def slowdown(folder: Path, options: argparse.Namespace) -> figures.Samples:
    """Return the median seconds of a training step, alone, beside our save, and beside another process's save."""
    state = build(spec_of_size(options.size), seed=SEED)
    source = folder / "source"
    tensorkeep.save(state, source)
    step = figures.training_step()
    manager = tensorkeep.CheckpointManager(folder / "run", keep_last=1)
    manager.save(0, state).wait()
    other = figures.Worker(sys.executable, "-c", _OUTSIDE, str(source), str(folder / "outside"))
    other.answer()
    samples: figures.Samples = {"alone": [], "inside": [], "outside": [], "save": []}
    for number in range(1, options.rounds + 1):
        samples["alone"].append(figures.median_step(step, figures.for_seconds(1.0)))
        pending = manager.save(number, state)
        samples["inside"].append(figures.median_step(step, lambda pending=pending: not pending.done()))
        samples["save"].append(pending.wait().durable_seconds)
        other.send()
        reader = threading.Thread(target=other.answer)
        reader.start()
        samples["outside"].append(figures.median_step(step, reader.is_alive))
    other.close()
    manager.close()
    return samples


_OUTSIDE = """
import sys, shutil, tensorkeep
state = tensorkeep.load(sys.argv[1])
manager = tensorkeep.CheckpointManager(sys.argv[2], keep_last=1, asynchronous=False)
manager.save(0, state)
print("[]", flush=True)
for number, _ in enumerate(sys.stdin, start=1):
    manager.save(number, state)
    print("[]", flush=True)
"""


def slowdown_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    what = "training step beside our save / beside another process's"
    yield figures.ratio_line(what, 1.15, samples, "inside", "outside", at_most=True)


# Incremental


def incremental(folder: Path, options: argparse.Namespace) -> figures.Samples:
    """Return bytes and durable seconds of full saves and of those with 5% of the tensors changed."""
    state = build(spec_of_size(options.size), seed=SEED)
    pieces = {f"{name}.{k}": part for name, t in state.items() for k, part in enumerate(t.split(max(1, len(t) // 4)))}
    names = sorted(pieces)
    samples: figures.Samples = {"full bytes": [], "bytes": [], "full": [], "seconds": []}
    draw = np.random.default_rng(SEED)
    for number in range(options.rounds + 1):
        report = tensorkeep.save(pieces, folder / "full", incremental=True)
        budget = 0.05 * report.state_bytes
        for name in draw.permutation(names):
            budget -= pieces[name].nbytes
            if budget < 0:
                break
            pieces[name] = pieces[name] + 1
        changed = tensorkeep.save(pieces, folder / "step", base=folder / "full")
        for path in ("full", "step"):
            shutil.rmtree(folder / path)
        if number:
            samples["full bytes"].append(report.new_bytes)
            samples["bytes"].append(changed.new_bytes)
            samples["full"].append(report.durable_seconds)
            samples["seconds"].append(changed.durable_seconds)
    return samples


def incremental_lines(samples: figures.Samples) -> Iterator[figures.Line]:
    yield figures.ratio_line(
        "incremental, 5% changed: bytes / full", 0.06, samples, "bytes", "full bytes", at_most=True
    )
    yield figures.ratio_line("incremental, 5% changed: durable / full", 0.25, samples, "seconds", "full", at_most=True)


# Differences


class _Gpt(torch.nn.Module):
    """A small GPT over bytes: 4 layers of 256, 3.3 M parameters."""

    def __init__(self, width: int = 256, layers: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, width)
        self.places = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", torch.triu(torch.full((context, context), float("-inf")), 1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            found = block(found, src_mask=self.mask)
        return self.head(found)


_PARTS = ("bf16 weights", "fp32 weights", "first moments", "second moments")


def delta(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return, by part, the stored fraction of each of several successive checkpoints, and seconds of loading.

    Each is saved in three ways: as a difference from the one before it, 10 steps earlier; by a manager, which makes
    differences from blocks that were whole up to 70 steps earlier; and whole, by planes alone.
    """
    from pydoc_data.topics import topics  # text that every Python has

    text = torch.tensor(list("\n".join(topics.values()).encode()))
    torch.manual_seed(SEED)
    model = _Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples: dict[str, Any] = {name: [] for name in _PARTS}
    samples |= {f"{name}, {how}": [] for name in _PARTS for how in ("in a chain", "planes alone")} | {"deepest": []}
    kept: list[dict[str, Any]] = []
    manager = tensorkeep.CheckpointManager(folder / "run", incremental="delta")

    def train(steps: int) -> None:
        for _ in range(steps):
            starts = torch.randint(len(text) - 129, (8,)).tolist()
            batch = torch.stack([text[start : start + 129] for start in starts])
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def state() -> dict[str, Any]:
        moments = [optimizer.state[parameter] for parameter in model.parameters()]
        return {
            "bf16 weights": {name: t.bfloat16() for name, t in model.state_dict().items()},
            "fp32 weights": dict(model.state_dict()),
            "first moments": {str(n): entry["exp_avg"] for n, entry in enumerate(moments)},
            "second moments": {str(n): entry["exp_avg_sq"] for n, entry in enumerate(moments)},
        }

    train(200)
    for number in range(12):
        if number:
            train(10)
        found = state()
        manager.save(number, found).wait()
        plain, before = folder / f"plain-{number}", folder / f"plain-{number - 1}"
        tensorkeep.save(found, plain, compression="lossless", incremental=True)
        if number:
            apart = folder / "apart"
            tensorkeep.save(found, apart, compression="lossless", base=before, delta=True, overwrite=True)
            _add_shares(samples, "", apart)
        _add_shares(samples, ", planes alone", plain)
        path = manager.steps()[-1].path
        _add_shares(samples, ", in a chain", path)
        if number in (0, _LONGEST):
            kept.append(copy.deepcopy(found))
        samples["deepest"].append(tensorkeep.info(path).details.get("history", {}).get("deepest_chain", 0))
    manager.close()
    return samples | _restore(folder, *kept, options.rounds)


def _add_shares(samples: dict[str, Any], how: str, path: Path) -> None:
    about = tensorkeep.info(path)
    for name in _PARTS:
        samples[name + how].append(about.by_part[name].stored_bytes / about.by_part[name].nbytes)


_LONGEST = 7
"""Differences before a block is stored in full again: the last of them is furthest from its full block."""

_COPIES = 20


def _restore(folder: Path, first: dict[str, Any], last: dict[str, Any], rounds: int) -> figures.Samples:
    """Return the seconds of filling a large state from differences, and from whole blocks."""
    first, last = ({str(k): copy.deepcopy(state) for k in range(_COPIES)} for state in (first, last))
    tensorkeep.save(first, folder / "first", compression="lossless", incremental=True)
    tensorkeep.save(last, folder / "chain", compression="lossless", base=folder / "first", delta=True)
    tensorkeep.save(last, folder / "whole", compression="lossless")
    samples: figures.Samples = {}
    for _ in range(rounds):
        for kind in ("warm", "cold"):
            for name in ("whole", "chain"):
                path = folder / name
                (warm if kind == "warm" else make_cold)(path)
                seconds = figures.seconds_of(lambda path=path: tensorkeep.load(path, into=first))
                samples.setdefault(f"load {name}, {kind}", []).append(seconds)
    return samples


def delta_lines(samples: dict[str, Any]) -> Iterator[figures.Line]:
    bounds = {"bf16 weights": 0.37, "fp32 weights": 0.70, "second moments": 0.73}
    for name, bound in bounds.items():
        yield figures.median_line(f"{name}, 10 steps apart: stored / raw", bound, samples[name], at_most=True)
    for name in _PARTS:
        # Those that are differences: whole ones come at least every eighth time.
        found = [share for share, deep in zip(samples[f"{name}, in a chain"], samples["deepest"], strict=True) if deep]
        yield figures.median_line(f"{name}, 10 to 70 steps apart: stored / raw", None, found, at_most=True)
    worst = max(
        share / alone
        for name in _PARTS
        for shares in (samples[f"{name}, in a chain"], [0.0, *samples[name]])
        for share, alone in zip(shares, samples[f"{name}, planes alone"], strict=True)
    )
    yield figures.Line("differences / planes alone, at worst", 1.0, worst, at_most=True)
    for kind in ("warm", "cold"):
        found = figures.ratios(samples, f"load chain, {kind}", f"load whole, {kind}")
        yield figures.Line(f"load of differences / of whole blocks, {kind}", 2.0, *found, at_most=True)


# Memory


_MEMORY = """
import sys, json, tensorkeep
from tensorkeep_bench.checkpoint.models import build, spec_of_size
from tensorkeep.machine import peak_resident_bytes, reset_peak_resident, resident_bytes
size, path, budget = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
state = build(spec_of_size(size), seed=1)
found = {}
for name, options in {"none": {}, "lossless": {"compression": "lossless"}, "delta": {"incremental": "delta"}}.items():
    manager = tensorkeep.CheckpointManager(f"{path}/{name}", memory_budget=budget, keep_last=1, **options)
    manager.save(0, state).wait()
    before = resident_bytes()
    manager.close()
    manager = tensorkeep.CheckpointManager(f"{path}/{name}", memory_budget=budget, keep_last=1, **options)
    before = resident_bytes()
    reset_peak_resident()
    manager.save(1, state)
    manager.wait()
    found[f"save, {name}"] = peak_resident_bytes() - before
    manager.close()
    before = resident_bytes()
    reset_peak_resident()
    tensorkeep.load(f"{path}/{name}/step-000001", into=state)
    found[f"load, {name}"] = peak_resident_bytes() - before
print(json.dumps(found))
"""

_BUDGET = 512 * 1024**2
_SIZES = ("0.5GB", "2GB", "6GB")


def memory(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Return, by size, the most host memory that saves and loads took besides the state."""
    found = {}
    for size in _SIZES:
        command = [sys.executable, "-c", _MEMORY, str(parse_bytes(size)), str(folder), str(_BUDGET)]
        found[size] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        shutil.rmtree(folder)
        folder.mkdir()
    return found


def memory_lines(samples: dict[str, dict[str, int]]) -> Iterator[figures.Line]:
    for size, found in samples.items():
        most = max(found.values()) / 1024**2
        yield figures.Line(
            f"most memory besides a state of {size}, budget 512 MiB", 512 + 64, most, unit="MiB", at_most=True
        )


PARTS: dict[str, figures.Part] = {
    "stall": (stall, stall_lines),
    "slowdown": (slowdown, slowdown_lines),
    "incremental": (incremental, incremental_lines),
    "delta": (delta, delta_lines),
    "memory": (memory, memory_lines),
}

if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
