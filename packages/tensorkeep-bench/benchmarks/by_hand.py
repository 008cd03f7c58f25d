"""Does the bench measure what a person would with a stopwatch? ``python benchmarks/by_hand.py``.

In each round the bench runs one cell twice, and a short script, which shares no code with it, times the same save by
hand: ``time.perf_counter`` around the call and an fsync. Two ratios are printed, each with its 95% interval: by hand
over bench, and bench over bench, which is what two measurements of the same thing differ by on this machine. The first
has to contain 1, or to lie within the second.
"""

import random
import subprocess
import sys
from pathlib import Path

from figures import compared, note, parser_of, write_samples
from tensorkeep.checkpoint.saving import save
from tensorkeep.units import format_seconds
from tensorkeep_bench.checkpoint.models import build
from tensorkeep_bench.checkpoint.workload import SEED
from tensorkeep_bench.results import Limits
from tensorkeep_bench.run.cell import run_cell
from tensorkeep_bench.run.runner import scratch_folder
from tensorkeep_bench.workload import Task

_BY_HAND = "by hand"
_METHODS = ("bench", "bench again", _BY_HAND)

SCRIPT = """
import os, sys, time, torch, tensorkeep
source, path, tool = sys.argv[1:]
state = tensorkeep.load(source)
for attempt in ("warm-up", "measured"):
    if attempt == "measured":
        os.system("rm -r " + path)
    os.sync()
    begin = time.perf_counter()
    if tool == "torch":
        torch.save(state, path)
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(folder)
        os.close(file)
    else:
        tensorkeep.save(state, path, compression="none")
    seconds = time.perf_counter() - begin
print(seconds)
"""


def main() -> int:
    parser = parser_of(__doc__, rounds=15, folder="a folder on the disk to measure")
    parser.add_argument("--model", default="openllama-3b:layers=6:bfloat16")
    options = parser.parse_args()
    samples: dict[str, dict[str, list[float]]] = {}
    with scratch_folder(options.dir) as scratch:
        source = scratch / "state.ckpt"
        save(build(options.model, seed=SEED), source, compression="none")
        draw = random.Random(SEED)
        for number in range(options.rounds):
            arms = [(tool, method) for tool in ("torch", "tensorkeep") for method in _METHODS]
            for tool, method in draw.sample(arms, len(arms)):
                measure = _by_hand if method == _BY_HAND else _bench
                seconds = measure(tool, source, scratch / "cell")
                samples.setdefault(tool, {}).setdefault(method, []).append(seconds)
                note(f"{number + 1}: {tool}, {method}: {format_seconds(seconds)}")
    ratios = {
        tool: {method: _ratio(found[_METHODS[0]], found[method]) for method in _METHODS[1:]}
        for tool, found in samples.items()
    }
    for tool, by_method in ratios.items():
        for method, found in by_method.items():
            print(f"{tool}: {method} / bench = {found['gain']:.3f} (95% {found['low']:.3f} to {found['high']:.3f})")
    command = f"by_hand.py --model {options.model} --rounds {options.rounds}"
    write_samples(options.out, command, folder=options.dir, samples=samples, ratios=ratios)
    return 0


def _bench(tool: str, source: Path, folder: Path) -> float:
    task = Task("checkpoint", tool, {"tool": tool}, {"checkpoint": str(source)}, ["save"], str(folder))
    outcome = run_cell(task, Limits())
    if outcome.status != "ok":
        raise SystemExit(f"{tool}: {outcome.reason}")
    return outcome.figures["save"]


def _by_hand(tool: str, source: Path, folder: Path) -> float:
    folder.mkdir()
    try:
        command = [sys.executable, "-c", SCRIPT, str(source), str(folder.absolute() / "state"), tool]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    finally:
        subprocess.run(["rm", "-r", str(folder)], check=True)


def _ratio(bench: list[float], other: list[float]) -> dict[str, float | None]:
    found = compared(other, bench)
    return {"gain": found.gain, "low": found.low, "high": found.high, "p": found.p}


if __name__ == "__main__":
    sys.exit(main())
