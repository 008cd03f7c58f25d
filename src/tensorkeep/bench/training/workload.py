"""The training workload: a recipe with techniques and other changes, on the same data."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta

from tensorkeep.bench.experiment.validation import convert
from tensorkeep.bench.experiment.workload import Outcome, Prepared, Task, Workload
from tensorkeep.bench.results import Measure, Settings, Subject
from tensorkeep.bench.training import cell as cell
from tensorkeep.bench.training.arms import (
    DEFAULT_RECIPE,
    RANKS,
    arm_config,
    check_arm,
    loss_tolerance,
    missing_for,
    without_systems_techniques,
)
from tensorkeep.bench.training.ranks import run_on_ranks
from tensorkeep.bench.training.reference_losses import LossGate, reference_losses
from tensorkeep.bench.training.turns import THREADS, PartnerTask
from tensorkeep.errors import UsageError
from tensorkeep.structs import prepared
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.recipes import get_recipe
from tensorkeep.train.data.dataset import FILE, Dataset
from tensorkeep.train.data.prepare import absolute_source, prepare
from tensorkeep.train.memory import predict
from tensorkeep.train.model.gpt import GPT
from tensorkeep.train.step.device import chosen_device
from tensorkeep.units import counted, format_bytes

_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_BYTES_PER_WEIGHT = 4
_PEAK = "most bytes of tensors at once in a step; of several ranks, that of the rank with most"
_PREDICTED = "the same as the memory ledger predicts it from shapes; missing if a technique's effect is not predicted"
_RESIDENT = "of the process on a CPU, after the warm-up and without what it had loaded"
_SPEED = "of training alone, after the first step and the warm-up; the baseline trains in turns with each arm"
_IN_TIME = "after the given seconds of training (first step not counted); missing if the run ends sooner"

MEASURES = (
    Measure(cell.SPEED, "speed", "tokens/s", _SPEED, "higher", primary=True),
    Measure(cell.MEMORY, "peak memory", "B", _PEAK, primary=True),
    Measure(cell.PREDICTED, "predicted peak memory", "B", _PREDICTED),
    Measure(cell.RESIDENT, "peak resident memory", "B", _RESIDENT),
    Measure(cell.LOSS, "validation loss", "nats", "after all steps; each block has its own seed", primary=True),
    Measure(cell.LOSS_IN_TIME, "equal-time validation loss", "nats", _IN_TIME, primary=True),
    Measure(cell.STEP, "step", "s", "the median step"),
    Measure(cell.FIRST, "first step", "s", "with loading and compiling, all caches empty"),
    Measure(cell.MFU, "MFU", "1", "model FLOPs, as a fraction of the matmul peak of this machine", "higher"),
    Measure(cell.TOKENS, "tokens", "1", "that the run was trained on", "higher"),
)

Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class TrainingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of an experiment."""

    recipe: str = DEFAULT_RECIPE
    data: str | None = None  # a source or a prepared folder; the recipe's source if None
    steps: Annotated[int, Meta(ge=3, le=1_000_000)] = 100
    warmup: Annotated[int, Meta(ge=0, le=1_000_000)] = 5  # steps after the first one that are not timed
    gate_steps: Count = 6  # whose losses are compared with those of the run without systems techniques
    evaluated: Count = 20  # batches of the validation loss
    seconds: Count | None = None  # of training, for the loss in equal time
    turn: Annotated[float, Meta(gt=0, le=3600)] = 0.25  # seconds that the baseline and another arm train in turns
    save_dir: str | None = None  # the folder that the run works in


class TrainingInput(msgspec.Struct, frozen=True):
    """What a cell trains."""

    settings: TrainingSettings
    source: str  # what the data is prepared from
    data: str | None = None  # the prepared data
    references: str | None = None  # the folder of the reference losses
    # A configuration that is trained instead of the recipe, without a gate. The peak of memory includes evaluations.
    config: Settings | None = None

    def arm_config(self, arm: Mapping[str, object], block: int = 0) -> Config:
        """Return the configuration of an arm."""
        if self.config is not None:
            return Config.from_dict(self.config)
        given = self.settings
        return arm_config(given.recipe, arm, steps=given.steps, evaluated=given.evaluated, block=block)

    def open_data(self, folder: Path) -> Dataset:
        """Return the data, which is prepared in ``folder`` unless it is prepared already."""
        for place in (Path(self.data or folder), Path(self.source)):
            if (place / FILE).exists():
                return Dataset.open(place)
        data = get_recipe(self.settings.recipe).data
        prepare(self.source, folder, tokenizer=data.tokenizer, vocab_size=data.vocab_size, validation=data.validation)
        return Dataset.open(folder)


class TrainingWorkload(Workload[TrainingSettings, Settings]):
    """Trains a recipe; an arm is the changes to it by dotted name: ``{"techniques.compile": "on"}``."""

    name: ClassVar[str] = "training"
    measures: ClassVar[tuple[Measure, ...]] = MEASURES

    def parse_settings(self, given: Mapping[str, object], path: str | None = None) -> TrainingSettings:
        settings = convert(dict(given), TrainingSettings, what="settings", path=path)
        get_recipe(settings.recipe)
        least = settings.warmup + 3
        if settings.steps < least:
            message = f"settings: steps: {settings.steps} is less than {least}; first step and warm-up are not timed"
            raise UsageError(message, path=path, remedy=f'give at least "steps": {least}')
        return settings

    def parse_arm(self, given: Mapping[str, object]) -> Settings:
        check_arm(given)
        return dict(given)

    def missing(self, arm: Settings) -> str | None:
        return missing_for(arm)

    def prepare(self, settings: TrainingSettings, arms: Collection[Settings], scratch: Path) -> Prepared:
        source = absolute_source(settings.data or get_recipe(settings.recipe).data.source)
        given = TrainingInput(settings, source, settings.data, str(scratch / "references"))
        configs = [given.arm_config(arm) for arm in arms]
        data = given.open_data(scratch / "data")
        given = msgspec.structs.replace(given, data=str(data.path))
        subject = _describe(configs[0], given, data)
        return Prepared(given, given, subject, subject)

    def measures_of(self, settings: TrainingSettings) -> list[str]:
        return [each.name for each in MEASURES if each.name != cell.LOSS_IN_TIME or settings.seconds is not None]

    def measure(self, task: Task) -> Outcome:
        given, folder = msgspec.convert(task.input, prepared(TrainingInput)), Path(task.directory)
        before = Outcome()
        with before.clock("data"):
            data = given.open_data(folder / "data")
        with before.clock("gate"):
            config = given.arm_config(task.settings, task.block)
            gate = _gate(config, data.path, given, folder)
        partner = None if task.baseline is None else _partner(given, data, task)
        protocol = cell.Protocol(
            warmup=given.settings.warmup,
            seconds=given.settings.seconds,
            with_evaluation=given.config is not None,
            turn=given.settings.turn,
            partner=partner,
        )
        job = cell.TrainingJob(config.as_dict(), str(data.path), str(folder / "run"), protocol, gate)
        ranks = int(task.settings.get(RANKS, 1))
        with _empty_compile_cache(folder / "compiled"):
            outcome = job.run() if ranks == 1 else run_on_ranks(job, ranks, folder)
        predicted = None if ranks > 1 else _predicted(config, data)
        figures = {**outcome.figures, **({} if predicted is None else {cell.PREDICTED: float(predicted)})}
        return msgspec.structs.replace(outcome, figures=figures, clocks={**outcome.clocks, **before.clocks})


def _partner(given: TrainingInput, data: Dataset, task: Task) -> PartnerTask | None:
    """Return what the process of the baseline trains; None if the baseline has several ranks itself."""
    baseline = task.baseline or {}
    if baseline.get(RANKS, 1) != 1:
        return None
    config, settings = given.arm_config(baseline, task.block), given.settings
    return PartnerTask(
        config=config.as_dict(),
        data=str(data.path),
        folder=str(Path(task.directory, "baseline")),
        warmup=settings.warmup,
        turn=settings.turn,
        threads=os.environ.get(THREADS),
    )


def _predicted(config: Config, data: Dataset) -> int | None:
    """Return the peak of memory that the ledger predicts, or None if it does not know a technique's effect."""
    config = config.changed({"model.vocab_size": max(config.model.vocab_size, data.vocab_size)})
    ledger = predict(config, device=chosen_device(config.loop.device).type)
    return None if ledger.unknown else ledger.peak_of_steps


@contextmanager
def _empty_compile_cache(folder: Path) -> Iterator[None]:
    """Let torch keep compiled code in a new folder: code of an earlier cell would shorten the first step."""
    before = os.environ.get(_INDUCTOR_CACHE)
    os.environ[_INDUCTOR_CACHE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INDUCTOR_CACHE]
        else:
            os.environ[_INDUCTOR_CACHE] = before


def _gate(config: Config, data: Path, given: TrainingInput, folder: Path) -> LossGate:
    plain = without_systems_techniques(config)
    if plain == config or given.config is not None:
        return LossGate([], 0.0)
    # When a user runs a cell again after the run, the shared folder was removed.
    shared = Path(given.references) if given.references else None
    cache = shared if shared is not None and shared.parent.exists() else folder / "references"
    return LossGate(reference_losses(plain, data, given.settings.gate_steps, cache), loss_tolerance(config))


def _describe(config: Config, given: TrainingInput, data: Dataset) -> Subject:
    """Describe the recipe of the baseline and the device, with threads, which a CPU's speed depends on."""
    model = GPT(config.model.with_tokens(data.vocab_size), device="meta")
    shapes = [each.numel() for each in model.parameters()]
    nbytes = _BYTES_PER_WEIGHT * sum(shapes)
    loop, device = config.loop, chosen_device(config.loop.device)
    cpu = f"the CPU with {counted(loop.threads or torch.get_num_threads(), 'thread')}"
    accumulated = loop.gradient_accumulation_steps
    sentence = (
        f"{config.recipe}: {sum(shapes):,} parameters ({format_bytes(nbytes)}), {loop.steps:,} steps of "
        f"{f'{accumulated} x ' if accumulated > 1 else ''}{loop.batch_size} x "
        f"{config.model.context_length:,} tokens of {given.source}, on {device if device.type != 'cpu' else cpu}"
    )
    return Subject(sentence, len(shapes), nbytes, {"float32": nbytes})


WORKLOAD = TrainingWorkload()
