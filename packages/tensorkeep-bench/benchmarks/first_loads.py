"""The first load of a process, which is the one that everybody waits for: ours beside torch and safetensors.

Each sample is a new process that imports its library, reads the files once so that they are in the page cache, and then
times one load. The tools take turns. How long new memory takes to fill depends on what the machine did before, so the
rounds are made in three states: idle for some seconds, just after another process used and freed memory, and beside a
process that keeps one processor busy. Prints a table with PASS or MISS; the exit code is 1 if a bound is missed.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from figures import Line, busy_processes, parser_of, ratio_line, show, write_samples
from tensorkeep.cli.text import Table
from tensorkeep.units import format_bytes, parse_bytes

SEED = 20_261_122
TOOLS = {
    "torch": "torch.load",
    "safetensors": "safetensors load_file, then a copy",
    "raw": "tensorkeep.load",
    "lossless": "tensorkeep.load, lossless",
    "into": "tensorkeep.load(into=)",
    "safetensors-mmap": "safetensors load_file (mapped)",
    "mmap": "tensorkeep.load(mmap=True)",
    "safetensors-mmap-used": "safetensors load_file, every byte used",
    "mmap-used": "tensorkeep.load(mmap=True), every byte used",
}
BOUNDS = [("raw", "torch", 1.0), ("into", "torch", 0.5), ("mmap", "safetensors-mmap", 1.2)]
BOUNDS += [("mmap-used", "safetensors-mmap-used", 1.2)]
"""The most that the time of a tool may be of another one's."""

COPIES = ("torch", "raw", "into")
"""What is measured in every state; the others only when the machine is idle."""

SETTLE_SECONDS = 3.0
_MADV_POPULATE_WRITE = 23


def main() -> int:
    options = _options()
    if options.worker:
        print(measure(options.worker, options.dir))
        return 0
    results = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-", dir=options.dir) as folder:
            spec, nbytes = make_files(parse_bytes(size), Path(folder))
            for name, state in STATES.items():
                tools = tuple(TOOLS) if name == "idle" else COPIES
                samples = _rounds(state, Path(folder), tools, options.rounds)
                results.append({"spec": spec, "bytes": nbytes, "state": name, "seconds": samples})
                _print(results[-1])
    lines = [line for result in results for line in _lines(result)]
    command = f"first_loads.py --rounds {options.rounds} --sizes {' '.join(options.sizes)}"
    write_samples(options.out, command, lines=lines, results=results)
    return show(lines)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=7, folder="a folder on the disk to use")
    parser.add_argument("--sizes", nargs="+", default=["0.7GB", "2GB"], help="about this much of bfloat16 weights")
    parser.add_argument("--worker", choices=TOOLS, help=argparse.SUPPRESS)
    return parser.parse_args()


def make_files(size: int, folder: Path) -> tuple[str, int]:
    """Save one model with every tool; return its spec and its bytes."""
    import safetensors.torch
    import torch

    import tensorkeep
    from tensorkeep.state.tree import flatten
    from tensorkeep_bench.checkpoint.models import build, parse, spec_of_size

    spec = spec_of_size(size)
    state = {name: leaf.array for name, leaf in flatten(build(spec, seed=SEED)).leaves.items()}
    torch.save(state, folder / "weights.pt")
    safetensors.torch.save_file(state, folder / "weights.safetensors")
    tensorkeep.save(state, folder / "raw")
    tensorkeep.save(state, folder / "lossless", compression="lossless")
    return spec, parse(spec).nbytes


def measure(tool: str, folder: Path) -> float:
    """Return the seconds of one load in this process, of files that are in the page cache."""
    import safetensors.torch
    import torch

    from tensorkeep import load as tensorkeep_load
    from tensorkeep import open as tensorkeep_open
    from tensorkeep_bench.checkpoint.files import warm

    def load() -> Any:
        if tool == "torch":
            return torch.load(folder / "weights.pt")
        if tool == "safetensors":
            return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(weights).items()}
        if tool.startswith("safetensors-mmap"):
            return safetensors.torch.load_file(weights)
        if tool == "into":
            return tensorkeep_load(folder / "raw", into=existing)
        if tool.startswith("mmap"):
            return tensorkeep_load(folder / "raw", mmap=True)
        return tensorkeep_load(folder / tool)

    weights = folder / "weights.safetensors"
    existing = {}
    if tool == "into":
        with tensorkeep_open(folder / "raw") as checkpoint:
            existing = {name: torch.full(lazy.shape, 1, dtype=lazy.dtype) for name, lazy in checkpoint.items()}
    read = {"torch": ["weights.pt"], "lossless": ["lossless"], "raw": ["raw"], "into": ["raw"]}
    for name in read.get(tool, ["raw"] if tool.startswith("mmap") else ["weights.safetensors"]):
        warm(folder / name)
    started = time.perf_counter()
    loaded = load()
    if tool.endswith("used"):
        for tensor in loaded.values():
            tensor.view(torch.int64).sum()
    return time.perf_counter() - started


def _settle(folder: Path) -> None:
    time.sleep(SETTLE_SECONDS)


def _use_memory(folder: Path) -> None:
    nbytes = 4 * (folder / "weights.pt").stat().st_size
    code = f"import mmap; memory = mmap.mmap(-1, {nbytes}); memory.madvise({_MADV_POPULATE_WRITE})"
    subprocess.run([sys.executable, "-c", code], check=True)


State = tuple[Callable[[Path], None], Callable[[], Any]]
STATES: dict[str, State] = {
    "idle": (_settle, nullcontext),
    "memory just freed": (_use_memory, nullcontext),
    "busy": (_settle, partial(busy_processes, 1)),
}
"""What is done before each sample, and what runs beside it."""


def _rounds(state: State, folder: Path, tools: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    before, beside = state
    samples: dict[str, list[float]] = {tool: [] for tool in tools}
    order = random.Random(SEED)
    for _ in range(rounds):
        for tool in order.sample(tools, len(tools)):
            before(folder)
            with beside():
                line = [sys.executable, __file__, "--worker", tool, "--dir", os.fspath(folder)]
                done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
            samples[tool].append(float(done.stdout))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return samples


def _lines(result: dict[str, Any]) -> Iterator[Line]:
    """Yield each bound with the ratios within the rounds."""
    seconds = result["seconds"]
    for tool, other, bound in BOUNDS:
        if tool in seconds:
            what = f"{format_bytes(result['bytes'])}, {result['state']}: {TOOLS[tool]} / {TOOLS[other]}"
            yield ratio_line(what, bound, seconds, tool, other, at_most=True)


def _print(result: dict[str, Any]) -> None:
    print(f"\n{result['spec']}, {format_bytes(result['bytes'])}, {result['state']}: seconds of the first load\n")
    rows = [
        (TOOLS[tool], *(f"{each(seconds):.4f}" for each in (statistics.median, min, max)))
        for tool, seconds in result["seconds"].items()
    ]
    Table(("", ">median", ">least", ">most"), rows).show()


if __name__ == "__main__":
    sys.exit(main())
