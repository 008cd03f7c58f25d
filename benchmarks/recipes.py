"""What recipes reach, and in which time: ``python benchmarks/recipes.py --data FILE``.

Each arm is trained from several seeds by ``tensorkeep train``, in a process of its own, with the arms interleaved:

* *reference*: the recipe ``shakespeare-char-cpu``;
* *stack*: the same with techniques that only make it faster;
* *best*: the recipe ``shakespeare-char-cpu-best``.

Printed are the loss over the whole validation split, the seconds of training (without evaluation, checkpoints and the
first step, which compiles and is given by itself), and both against the reference from the same seed.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tensorkeep import machine
from tensorkeep.bench.analysis.statistics import Comparison, compare
from tensorkeep.train.data.prepare import prepare

_BF16 = ("--techniques.mixed-precision.dtype", "bf16")
ARMS: dict[str, tuple[str, ...]] = {
    "reference": ("shakespeare-char-cpu",),
    "stack": ("shakespeare-char-cpu", "--technique", "compile,fused-optimizer", *_BF16),
    "best": ("shakespeare-char-cpu-best",),
}

Samples = dict[str, list[dict[str, Any]]]
"""What each run of each arm came to, seed by seed."""


def main() -> int:
    """Train, print, write."""
    options = _options()
    samples: Samples = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-") as folder:
        data = Path(folder) / "data"
        prepare(options.data, data, tokenizer="char")
        for seed in range(1, options.seeds + 1):
            # Interleaved, so that a drift of the machine affects all arms alike.
            for name in list(ARMS)[:: 1 if seed % 2 else -1]:
                samples[name].append(_trained(name, seed, data, Path(folder)))
    _print(samples)
    if options.out:
        options.out.write_text(json.dumps(_document(options, samples), indent=1) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--data", required=True, help="the text of tiny Shakespeare")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the samples")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds takes 2 or more")
    return options


def _trained(name: str, seed: int, data: Path, folder: Path) -> dict[str, Any]:
    words = [*ARMS[name], "--data", str(data), "--out", str(folder / f"{name}-{seed}")]
    words += ["--loop.seed", str(seed), "--loop.device", "cpu", "--json"]
    ended = subprocess.run([sys.executable, "-m", "tensorkeep", "train", *words], capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode}:\n{ended.stderr}")
    summary: dict[str, Any] = json.loads(ended.stdout)
    kept = ("loss", "best", "tokens_per_second", "peak_memory_bytes", "seconds")
    found = {"seed": seed, **{key: summary[key] for key in kept}}
    seconds = found["seconds"]
    print(f"{name}, seed {seed}: loss {found['loss']:.4f}, {seconds['train']:.1f} s of training", file=sys.stderr)
    return found


def _ratios(samples: Samples, name: str) -> Comparison:
    """Compare seconds of training with the reference's from the same seed."""
    pairs = zip(samples[name], samples["reference"], strict=True)
    return compare([math.log(mine["seconds"]["train"] / other["seconds"]["train"]) for mine, other in pairs])


def _print(samples: Samples) -> None:
    for name, runs in samples.items():
        losses = [each["loss"] for each in runs]
        seconds = [each["seconds"]["train"] for each in runs]
        rates = [each["tokens_per_second"] for each in runs]
        print(
            f"{name:10} loss {statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}), "
            f"{statistics.mean(seconds):.1f} s, {statistics.mean(rates):,.0f} tokens/s"
        )
    for name in list(samples)[1:]:
        ratio = _ratios(samples, name)
        print(f"time of {name} / reference: {ratio.gain:.3f} (95% {ratio.low:.3f} to {ratio.high:.3f})")


def _document(options: argparse.Namespace, samples: Samples) -> dict[str, Any]:
    return {
        "command": f"benchmarks/recipes.py --data {Path(options.data).name} --seeds {options.seeds}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {
            "versions": machine.versions(),
            "processor": machine.processor(),
            "memory": machine.memory(),
        },
        "arms": {name: " ".join(words) for name, words in ARMS.items()},
        "runs": samples,
        "times": {name: asdict(_ratios(samples, name)) for name in list(samples)[1:]},
    }


if __name__ == "__main__":
    sys.exit(main())
