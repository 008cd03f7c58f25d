"""Training beside nanoGPT's own: ``python benchmarks/nanogpt.py --nanogpt CHECKOUT --data FILE``.

``CHECKOUT`` is a clone of https://github.com/karpathy/nanoGPT, of which nothing is in this repository. In rounds, in
processes of their own and in alternating order, these train the model of nanoGPT's README for a CPU (4 layers of 128, 4
heads, context 64, batches of 12, without ``torch.compile``) on the same text, on this machine:

* *nanogpt*: its ``train.py``, for 2,000 steps, with the options of its README;
* *ours*: the recipe ``shakespeare-char-cpu`` with the techniques that only make it faster, and windows at random places
  as nanoGPT draws them;
* *best*: the recipe ``shakespeare-char-cpu-best``, as many steps as take less than half of nanoGPT's time.

Each round of the latter two has another seed, the default seed first; that of nanoGPT is fixed in its code.

All losses are over the whole validation split, nanoGPT's of its own model with the weights that it saved last. Two
ratios are printed: the tokens per second of *ours* over nanoGPT's, at least 1.5, and nanoGPT's whole time over that of
*best*, at least 2. The exit code is 1 if one is missed, if the mean loss of *ours* is more than 1% above nanoGPT's, or
if that of *best* is not below it.
"""

import argparse
import contextlib
import importlib
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chatgot.data.batches import EvaluationWindows
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from figures import Line, compared, mean_line, note, parser_of, show, write_samples
from recipes import STACK, seeds, train_run

CONTEXT, BATCH, EVAL_EVERY = 64, 12, 250
SETTINGS = {
    "device": "cpu",
    "compile": False,
    "eval_iters": 20,
    "log_interval": 1,
    "block_size": CONTEXT,
    "batch_size": BATCH,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "dropout": 0.0,
    # The last weights are saved, even if a noisy estimate finds earlier ones better.
    "always_save_checkpoint": True,
}
"""The command of nanoGPT's README, and the last line."""

FASTER = "tokens/s, ours / nanogpt"
SOONER = "whole time, nanogpt / best"
EQUAL_LOSS = 1.01
BOUNDS = {FASTER: 1.5, SOONER: 2.0}
BEST_LOSS = 1.0

_STEP = re.compile(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", re.MULTILINE)
_SETTLED = 5
"""Steps at the start of a process that load kernels."""

Samples = dict[str, list[dict[str, Any]]]


def main() -> int:
    options = _options()
    samples: Samples = {"nanogpt": [], "ours": [], "best": []}
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-") as place:
        folder = Path(place)
        prepare(options.data, folder / "data", tokenizer="char")
        dataset = Dataset.open(folder / "data")
        checkout = _copied(options.nanogpt, dataset, folder / "nanoGPT")
        ours = [*STACK, "--data.order", "random", "--loop.steps", str(options.steps)]
        best = ["shakespeare-char-cpu-best", "--loop.steps", str(options.best_steps)]
        runs: dict[str, Callable[[int], dict[str, Any]]] = {
            # Its seed is a constant of its code.
            "nanogpt": lambda _: _train_nanogpt(checkout, dataset, options.steps),
            "ours": lambda seed: train_run([*ours, "--loop.seed", str(seed)], folder / "data", folder),
            "best": lambda seed: train_run([*best, "--loop.seed", str(seed)], folder / "data", folder),
        }
        for number, seed in enumerate(seeds(options.rounds)):
            # Interleaved, so that a drift of the machine affects all alike.
            for name in list(runs)[:: -1 if number % 2 else 1]:
                run = runs[name](seed)
                samples[name].append(run)
                note(f"{name}: {_shown(run['loss'], run['tokens_per_second'], run['seconds']['whole'])}")

    def runs_of(name: str, figure: Callable[[dict[str, Any]], float]) -> list[float]:
        return [figure(run) for run in samples[name]]

    def speed(run: dict[str, Any]) -> float:
        return float(run["tokens_per_second"])

    def whole(run: dict[str, Any]) -> float:
        return float(run["seconds"]["whole"])

    ratios = {
        FASTER: compared(runs_of("ours", speed), runs_of("nanogpt", speed)),
        SOONER: compared(runs_of("nanogpt", whole), runs_of("best", whole)),
    }
    loss = {name: statistics.mean(run["loss"] for run in runs) for name, runs in samples.items()}
    for name, trained in samples.items():
        means = (statistics.mean(runs_of(name, figure)) for figure in (speed, whole))
        print(f"{name:8} {trained[0]['steps']:,} steps: {_shown(loss[name], *means)}")
    lines = [mean_line(what, BOUNDS[what], ratio) for what, ratio in ratios.items()]
    lines.append(Line("mean loss, ours / nanogpt", EQUAL_LOSS, loss["ours"] / loss["nanogpt"], at_most=True))
    lines.append(Line("mean loss, nanogpt / best", BEST_LOSS, loss["nanogpt"] / loss["best"]))
    command = f"nanogpt.py --nanogpt nanoGPT --data {Path(options.data).name} --rounds {options.rounds}"
    write_samples(
        options.out,
        f"{command} --steps {options.steps} --best-steps {options.best_steps}",
        lines=lines,
        nanogpt_commit=_commit(options.nanogpt),
        ratios={what: asdict(ratio) for what, ratio in ratios.items()},
        runs=samples,
    )
    return show(lines)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--nanogpt", type=Path, required=True, help="a clone of nanoGPT")
    parser.add_argument("--data", required=True, help="the text of tiny Shakespeare")
    parser.add_argument("--steps", type=int, default=2000, help="of nanogpt and ours")
    parser.add_argument("--best-steps", type=int, default=600)
    options = parser.parse_args()
    missing = [name for name in ("train.py", "model.py", "configurator.py") if not (options.nanogpt / name).is_file()]
    if missing:
        parser.error(f"{options.nanogpt} has no {missing[0]}: give a clone of https://github.com/karpathy/nanoGPT")
    if options.steps <= _SETTLED:
        parser.error(f"--steps takes more than {_SETTLED}")
    return options


def _copied(checkout: Path, dataset: Dataset, folder: Path) -> Path:
    """Copy nanoGPT's files, and write the text as its ``data/shakespeare_char/prepare.py`` does."""
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    shutil.copytree(checkout / "config", folder / "config")
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(checkout / name, folder / name)
    np.asarray(dataset.train, dtype=np.uint16).tofile(data / "train.bin")
    np.asarray(dataset.validation, dtype=np.uint16).tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": dataset.tokenizer.vocab_size}))
    return folder


def _train_nanogpt(checkout: Path, dataset: Dataset, steps: int) -> dict[str, Any]:
    settings = {**SETTINGS, "max_iters": steps, "lr_decay_iters": steps, "eval_interval": min(EVAL_EVERY, steps)}
    words = [f"--{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *words]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    begin = time.perf_counter()
    ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=environment)
    whole = time.perf_counter() - begin
    if ended.returncode:
        raise RuntimeError(f"nanoGPT ended with {ended.returncode}:\n{ended.stderr}")
    times = {int(number): float(milliseconds) / 1000 for number, milliseconds in _STEP.findall(ended.stdout)}
    # The time of a step with an evaluation includes that.
    trained = [
        seconds for number, seconds in times.items() if number >= _SETTLED and number % settings["eval_interval"]
    ]
    return {
        "steps": steps,
        "loss": _loss_of_nanogpt(checkout, dataset),
        "tokens_per_second": BATCH * CONTEXT / statistics.mean(trained),
        "seconds": {"train": sum(trained), "whole": whole},
    }


def _loss_of_nanogpt(checkout: Path, dataset: Dataset) -> float:
    """Return the loss of its model over the whole validation split, with the weights that it saved last."""
    # Its file, not a package, is imported.
    sys.path.insert(0, str(checkout))
    model_file = importlib.import_module("model")
    saved = torch.load(checkout / "out-shakespeare-char" / "ckpt.pt", map_location="cpu", weights_only=True)
    with contextlib.redirect_stdout(sys.stderr):  # it prints its number of parameters
        model = model_file.GPT(model_file.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    model.eval()
    total, counted = 0.0, 0
    with torch.no_grad():
        for inputs, targets in EvaluationWindows(dataset.validation, CONTEXT).batches(64):
            count = int((targets >= 0).sum())
            total, counted = total + model(inputs, targets)[1].item() * count, counted + count
    return total / counted


def _shown(loss: float, speed: float, whole: float) -> str:
    return f"loss {loss:.4f}, {speed:,.0f} tokens/s, {whole:.1f} s in all"


def _commit(checkout: Path) -> str | None:
    found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
