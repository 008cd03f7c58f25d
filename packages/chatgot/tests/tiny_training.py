"""Training runs that take a fraction of a second, and readers of their results."""

import json
import math
import random
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.loop import EventListener, TrainingSummary, train
from chatgot.model.config import ModelConfig
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.step.state import StepState
from tensorkeep import CheckpointManager
from tensorkeep.cli.main import main
from tensorkeep.testing.equality import difference

TEXT = "the quick brown fox jumps over the lazy dog; " * 60
CONFIG = Config(
    recipe="tiny", model=ModelConfig(vocab_size=1, context_length=16, n_layers=1, n_heads=2, d_model=16, dropout=0.1)
).changed(
    {"loop.steps": 12, "loop.batch_size": 3, "loop.device": "cpu", "loop.threads": 1, "schedule.name": "constant"}
    | {"eval.every": 0, "checkpoint.every": 0, "log.every": 1}
)
OF_THE_MACHINE = {"tokens_per_second", "mfu", "mfu_of_data_sheet", "outran_peak", "peak_memory_bytes", "path"}


class Witness:
    """Records events."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, dict[str, Any]]] = []

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        self.seen.append((step, kind, values))

    def of(self, kind: str) -> list[int]:
        """Return the steps of the events of a kind."""
        return [step for step, seen, _ in self.seen if seen == kind]


def prepared(folder: Path) -> Path:
    """Return a folder of prepared text."""
    (folder / "text.txt").write_text(TEXT)
    prepare(folder / "text.txt", folder / "prepared", tokenizer="char")
    return folder / "prepared"


def conversations(folder: Path, talks: Iterable[Iterable[tuple[str, str]]], tokenizer: str = "byte") -> Path:
    """Return a folder of prepared conversations; each has turns, of a role and a text."""
    found = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    (folder / "talk.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
    return prepare(folder / "talk.jsonl", folder / "talk", tokenizer=tokenizer).path


def run(
    config: Config,
    folder: Path,
    data: Path,
    *,
    resume: bool = False,
    stop_at: int | None = None,
    listener: EventListener | None = None,
    arrange: Callable[[StepState], object] = lambda run: None,
) -> TrainingSummary:
    """Train; ``arrange`` is given the run before it begins."""
    # As each process has it.
    random.seed()
    np.random.seed()
    with open_run(config, RunFolder(folder), Dataset.open(data), resume=resume) as opened:
        arrange(opened)
        return train(opened, listener or Witness(), stop=lambda: opened.progress.step == stop_at)


def follow(remedy: str | None, **names: object) -> None:
    """Run the command of a remedy; ``names`` are what stands for a path in it."""
    (command,) = re.findall(r"tensorkeep ([^;\n]*)", str(remedy))
    words = [re.sub("|".join(names), lambda found: str(names[found[0]]), word) for word in shlex.split(command)]
    assert main(words) == 0, words


class Trained(Protocol):
    """Puts a run on the data of the tests, which is trained once for all of them, into a folder that does not exist."""

    def __call__(self, config: Config, folder: Path, *, stop_at: int | None = None) -> TrainingSummary: ...


def poison(opened: StepState, steps: Collection[int]) -> None:
    """Make the losses of some steps infinite."""
    real = opened.model.loss

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = real(inputs, targets)
        return found * (math.inf if opened.model.training and opened.progress.step in steps else 1.0)

    opened.model.loss = loss  # type: ignore[method-assign]


def lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the log lines of some kinds, or all but saves, without figures that depend on the machine."""
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if name not in OF_THE_MACHINE}
        for line in found
        if (line["kind"] in kinds if kinds else line["kind"] != "save")
    ]


def check_resumes_exactly(
    config: Config,
    folder: Path,
    data: Path,
    *kinds: str,
    stop_at: int,
    arrange: Callable[[StepState], object] = lambda run: None,
) -> None:
    """Train a run at once, and another one in two parts; check that their logs and last states are the same."""
    run(config, folder / "whole", data, arrange=arrange)
    run(config, folder / "parts", data, arrange=arrange, stop_at=stop_at)
    run(config, folder / "parts", data, arrange=arrange, resume=True)
    check_same(folder / "parts", folder / "whole", *kinds)


def check_same(folder: Path, whole: Path, *kinds: str) -> None:
    """Check that two runs have the same log lines of some kinds, or of all but saves, and the same last state."""
    assert lines(folder, *kinds) == lines(whole, *kinds)
    assert difference(last_state(folder), last_state(whole)) is None


def last_state(folder: Path) -> dict[str, Any]:
    """Return the state of the last checkpoint."""
    return dict(CheckpointManager(folder / "checkpoints").restore())
