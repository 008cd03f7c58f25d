"""What recipes reach, and in which time: ``python benchmarks/recipes.py --data FILE --seeds 8``.

Each arm is trained from several seeds, the default seed first, by ``tensorkeep train`` in a process of its own, with
the arms interleaved:

* *reference*: the recipe ``shakespeare-char-cpu``;
* *best*: the recipe ``shakespeare-char-cpu-best``;
* *stack*, with ``--arms reference,stack``: the reference with techniques that only make it faster.

Printed are the loss over the whole validation split, the seconds of training, and those of the whole process: start,
compilation (into an empty cache), training, evaluations and checkpoints; and the latter against the reference's from
the same seed. The file is written after every run, so an interrupted benchmark keeps what it has measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chatgot.config.config import LoopConfig
from chatgot.data.prepare import prepare
from figures import compared, note, parser_of, positive, write_samples
from tensorkeep_bench.statistics import describe

_BF16 = ("--techniques.mixed-precision.dtype", "bf16")
STACK = ("shakespeare-char-cpu", "--technique", "compile,fused-optimizer", *_BF16)
ARMS: dict[str, tuple[str, ...]] = {
    "reference": ("shakespeare-char-cpu",),
    "stack": STACK,
    "best": ("shakespeare-char-cpu-best",),
}

Samples = dict[str, list[dict[str, Any]]]
"""What each run of each arm came to, seed by seed."""


def main() -> int:
    options = _options()
    samples: Samples = {name: [] for name in options.arms}
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-") as folder:
        data = Path(folder) / "data"
        prepare(options.data, data, tokenizer="char")
        for number, seed in enumerate(seeds(options.seeds)):
            # Interleaved, so that a drift of the machine affects all arms alike.
            for name in options.arms[:: -1 if number % 2 else 1]:
                run = train_run([*ARMS[name], "--loop.seed", str(seed)], data, Path(folder))
                samples[name].append({"seed": seed} | run)
                seconds = run["seconds"]
                times = f"{seconds['train']:.1f} s of training, {seconds['whole']:.1f} s in all"
                note(f"{name}, seed {seed}: loss {run['loss']:.4f}, {times}")
                _write(options, samples)
    _print(samples)
    return 0


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="the text of tiny Shakespeare")
    parser.add_argument("--seeds", type=positive, default=8, help="how many; the default seed is the first")
    parser.add_argument("--arms", default="reference,best", help="of reference, stack and best")
    options = parser.parse_args()
    options.arms = options.arms.split(",")
    if options.arms[0] != "reference" or not set(options.arms) <= set(ARMS):
        parser.error(f"--arms takes reference, and then others of {', '.join(ARMS)}")
    return options


def seeds(count: int) -> list[int]:
    """Return the default seed and as many small ones as make the count."""
    return [LoopConfig().seed, *range(1, count)]


def train_run(
    words: Sequence[str], data: Path, folder: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Train in a process of its own; return its loss, rate and times.

    ``seconds["whole"]`` is from the start of the process to its end. What it compiles, no run before it has compiled.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        command = [sys.executable, "-m", "tensorkeep", "train", *words, "--data", str(data), "--out", f"{place}/run"]
        environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": f"{place}/compiled"}
        begin = time.perf_counter()
        command += ["--loop.device", "cpu", "--json"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        whole = time.perf_counter() - begin
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")
    summary: dict[str, Any] = json.loads(ended.stdout)
    kept = {key: summary[key] for key in ("loss", "best", "tokens_per_second", "peak_memory_bytes")}
    seconds = {**summary["seconds"], "whole": whole}
    return {"steps": summary["step"], **kept, "seconds": seconds}


def _ratios(samples: Samples, name: str) -> dict[str, Any]:
    """Compare seconds of whole processes with the reference's from the same seed."""
    if not samples[name]:
        return {}
    mine, reference = ([each["seconds"]["whole"] for each in samples[arm]] for arm in (name, "reference"))
    return asdict(compared(mine, reference[: len(mine)]))


def _print(samples: Samples) -> None:
    for name, runs in samples.items():
        losses = describe([each["loss"] for each in runs])
        print(
            f"{name:10} loss {losses.mean:.4f} +- {losses.std or 0:.4f} ({losses.low:.4f} to {losses.high:.4f}), "
            f"{statistics.mean(each['seconds']['train'] for each in runs):.1f} s of training, "
            f"{statistics.mean(each['seconds']['whole'] for each in runs):.1f} s in all, "
            f"{statistics.mean(each['tokens_per_second'] for each in runs):,.0f} tokens/s"
        )
    for name in list(samples)[1:]:
        ratio = _ratios(samples, name)
        print(f"whole time of {name} / reference: {ratio['gain']:.3f} (95% {ratio['low']} to {ratio['high']})")


def _write(options: argparse.Namespace, samples: Samples) -> None:
    known = {name: runs for name, runs in samples.items() if runs}
    command = f"recipes.py --data {Path(options.data).name} --seeds {options.seeds} --arms {','.join(options.arms)}"
    write_samples(
        options.out,
        command,
        arms={name: " ".join(ARMS[name]) for name in samples},
        losses={name: asdict(describe([each["loss"] for each in runs])) for name, runs in known.items()},
        whole_seconds={
            name: asdict(describe([each["seconds"]["whole"] for each in runs])) for name, runs in known.items()
        },
        times={name: _ratios(samples, name) for name in list(samples)[1:]},
        runs=samples,
    )


if __name__ == "__main__":
    sys.exit(main())
