"""The workload of training: a recipe, with techniques and other settings, for the same steps on the same data."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from tensorkeep.bench.experiment.json_fields import Fields
from tensorkeep.bench.experiment.workload import Outcome, Prepared, Task, Workload
from tensorkeep.bench.results import Measure
from tensorkeep.bench.training import cell as cell
from tensorkeep.bench.training.arms import DEFAULT_RECIPE, check_arm, config_of, lacks, tolerance_of, without_systems
from tensorkeep.bench.training.reference_losses import LossGate, reference_losses
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.recipes import get_recipe
from tensorkeep.train.data.dataset import FILE, Dataset
from tensorkeep.train.data.prepare import prepare
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.run.data import absolute_source
from tensorkeep.train.run.device import chosen_device
from tensorkeep.units import format_bytes

_MOST_STEPS = 1_000_000
_SETTINGS = ("recipe", "data", "steps", "warmup", "gate_steps", "evaluated", "seconds", "save_dir")
_BYTES_OF_A_WEIGHT = 4
_COMPILED = "TORCHINDUCTOR_CACHE_DIR"

MEASURES = (
    Measure(
        cell.SPEED,
        "speed",
        "tokens/s",
        "of training alone, after the first step and the warm-up",
        "higher",
        primary=True,
    ),
    Measure(
        cell.MEMORY,
        "peak memory",
        "B",
        "the most bytes at once; CUDA: of tensors; CPU: of the process after the warm-up, but what it had loaded",
        primary=True,
    ),
    Measure(
        cell.LOSS, "validation loss", "nats", "after all steps, with a seed of its own for each block", primary=True
    ),
    Measure(
        cell.LOSS_IN_TIME,
        "equal-time validation loss",
        "nats",
        "after so many seconds of training (first step not counted); none of a run that ended sooner",
        primary=True,
    ),
    Measure(cell.STEP, "step", "s", "the median step"),
    Measure(cell.FIRST, "first step", "s", "with all that is loaded and compiled, nothing of it in any cache"),
    Measure(cell.MFU, "MFU", "1", "model FLOPs, as a share of the matrix products that this machine makes", "higher"),
    Measure(cell.TOKENS, "tokens", "1", "that the run was trained on", "higher"),
)


class TrainingWorkload(Workload):
    """Settings of an experiment: ``recipe``, ``data`` (the recipe's by default), ``steps``, ``warmup`` (steps that are
    not timed), ``gate_steps`` (whose losses are held against the plain run's), ``evaluated`` (batches), ``seconds``
    (for the loss in equal time). An arm's settings are those of a recipe, by dotted name, as ``tensorkeep train`` takes
    them: ``{"techniques.compile": "on"}``.
    """

    name: ClassVar[str] = "training"
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    def settings(self, given: object, path: str | None) -> dict[str, Any]:
        fields = Fields(given, "settings", path or "", _SETTINGS)
        found = {
            "recipe": fields.text("recipe", DEFAULT_RECIPE, example=f'"{DEFAULT_RECIPE}"'),
            "data": fields.text("data", None, example='"stdlib"'),
            "steps": fields.whole("steps", 100, least=3, most=_MOST_STEPS, example=100),
            "warmup": fields.whole("warmup", 5, least=0, most=_MOST_STEPS, example=5),
            "gate_steps": fields.whole("gate_steps", 6, least=1, most=_MOST_STEPS, example=6),
            "evaluated": fields.whole("evaluated", 20, least=1, most=_MOST_STEPS, example=20),
            "seconds": fields.whole("seconds", None, least=1, most=_MOST_STEPS, example=10),
            "save_dir": fields.text("save_dir", None, example='"runs/"'),
        }
        get_recipe(found["recipe"])
        if found["steps"] < found["warmup"] + 3:
            fields.refuse(
                f'has "steps": {found["steps"]}, of which the first and {found["warmup"]} of warm-up are not timed',
                remedy=f'give at least "steps": {found["warmup"] + 3}',
            )
        return found

    def check(self, settings: Mapping[str, Any]) -> None:
        check_arm(settings)

    def missing(self, settings: Mapping[str, Any]) -> str | None:
        return lacks(settings)

    def prepare(self, settings: Mapping[str, Any], arms: Collection[Mapping[str, Any]], scratch: Path) -> Prepared:
        source = absolute_source(settings["data"] or get_recipe(settings["recipe"]).data.source)
        subject = {**settings, "source": source, "references": str(scratch / "references")}
        del subject["save_dir"]
        for arm in arms:
            _config(subject, arm, 0)
        data = _opened(subject, scratch / "data")
        subject["data"] = str(data.path)
        described = _described(_config(subject, next(iter(arms), {}), 0), subject, data)
        return Prepared(subject, subject, described, described)

    def measures_of(self, settings: Mapping[str, Any]) -> list[str]:
        return [each.name for each in MEASURES if each.name != cell.LOSS_IN_TIME or settings["seconds"] is not None]

    def measure(self, task: Task) -> Outcome:
        subject, folder = task.subject, Path(task.directory)
        begin = time.perf_counter()
        data = _opened(subject, folder / "data").path
        found = time.perf_counter()
        config = _config(subject, task.settings, task.block)
        gate = _gate(config, data, subject, folder)
        gated = time.perf_counter()
        plan = cell.Plan(subject["warmup"], subject["seconds"], with_evaluation="config" in subject)
        with _compiling_anew(folder / "compiled"):
            outcome = cell.run_training(config, data, folder / "run", plan, gate)
        outcome.clocks |= {"data": found - begin, "gate": gated - found}
        return outcome


def _config(subject: Mapping[str, Any], arm: Mapping[str, Any], block: int) -> Config:
    # A single trial brings its own, which need not be near any recipe's.
    if "config" in subject:
        return Config.from_dict(subject["config"])
    return config_of(subject["recipe"], arm, steps=subject["steps"], evaluated=subject["evaluated"], block=block)


@contextmanager
def _compiling_anew(folder: Path) -> Iterator[None]:
    """Let torch keep compiled code in a folder that is new: that of an earlier cell would shorten the first step."""
    before = os.environ.get(_COMPILED)
    os.environ[_COMPILED] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_COMPILED]
        else:
            os.environ[_COMPILED] = before


def _gate(config: Config, data: Path, subject: Mapping[str, Any], folder: Path) -> LossGate:
    plain = without_systems(config)
    if plain == config or not subject["gate_steps"]:
        return LossGate([], 0.0)
    kept = Path(subject["references"])
    # A cell that is run again by hand, after the run removed its folder, keeps them in its own.
    kept = kept if kept.parent.exists() else folder / "references"
    return LossGate(reference_losses(plain, data, subject["gate_steps"], kept), tolerance_of(config))


def _opened(subject: Mapping[str, Any], made: Path) -> Dataset:
    """Return the data of a subject, which is prepared unless it is."""
    for place in (Path(subject["data"] or made), Path(subject["source"])):
        if (place / FILE).exists():
            return Dataset.open(place)
    how = get_recipe(subject["recipe"]).data
    prepare(subject["source"], made, tokenizer=how.tokenizer, vocab_size=how.vocab_size, validation=how.validation)
    return Dataset.open(made)


def _described(config: Config, subject: Mapping[str, Any], data: Dataset) -> dict[str, Any]:
    """Describe what is trained, as the first arm, the baseline, trains it."""
    size = max(config.model.vocab_size, data.vocab_size)
    model = GPT(config.changed({"model.vocab_size": size}).model, device="meta")
    shapes = [each.numel() for each in model.parameters()]
    nbytes = _BYTES_OF_A_WEIGHT * sum(shapes)
    loop = config.loop
    batch = f"{loop.accumulate} x " if loop.accumulate > 1 else ""
    sentence = (
        f"{subject['recipe']}: {sum(shapes):,} parameters ({format_bytes(nbytes)}), {subject['steps']:,} steps of "
        f"{batch}{loop.batch_size} x {config.model.context_length:,} tokens of {subject['source']}, {_where(config)}"
    )
    return {"description": sentence, "tensors": len(shapes), "bytes": nbytes, "dtypes": {"float32": nbytes}}


def _where(config: Config) -> str:
    """Say what the first arm is trained on: how many threads a CPU has of it decides about the speed."""
    device = chosen_device(config.loop.device)
    if device.type != "cpu":
        return f"on {device}"
    threads = config.loop.threads or torch.get_num_threads()
    return f"on the CPU with {threads} {'thread' if threads == 1 else 'threads'}"


WORKLOAD = TrainingWorkload()
