"""The training workload: a recipe with techniques and other changes, on the same data."""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta

from chatgot.config.config import RENAMED, TECHNIQUES, Config, setting_names, unknown_setting
from chatgot.config.recipes import get_recipe
from chatgot.data.dataset import FILE, Dataset
from chatgot.data.prepare import absolute_source, prepare
from chatgot.memory import predict
from chatgot.model.gpt import GPT
from chatgot.step.device import chosen_device
from chatgot.techniques.base import TECHNIQUE_CLASSES, Machine
from chatgot.techniques.stack import Stack
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.ext import counted, format_bytes, prepared
from tensorkeep_bench.results import Measure, Settings, Subject
from tensorkeep_bench.training import cell
from tensorkeep_bench.training.cell import THREADS, LossGate, PartnerTask, reference_losses, run_on_ranks
from tensorkeep_bench.workload import Outcome, PreparedInput, PreparedInputs, Task, Workload, convert

DEFAULT_RECIPE = "shakespeare-char-cpu"
RANKS = "ranks"  # the setting of an arm that a recipe does not have: by how many processes torchrun trains it
_MOST_RANKS = 1024
_INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_BYTES_PER_WEIGHT = 4

_FIXED: Settings = {
    "checkpoint.every": 0,
    "checkpoint.keep_best": 0,
    "checkpoint.asynchronous": False,
    "sample.every": 0,
    "log.every": 1,
    "eval.patience": None,
    # Arms are compared at equal batches.
    "loop.auto_batch_size": False,
    # An arm states what is on: the same experiment compares the same techniques on each machine.
    "default_techniques": None,
}
# Settings that all arms share: arms are compared at equal steps, on equal data.
_SET_BY_EXPERIMENT = (
    "loop.steps",
    "loop.seed",
    "eval.batches",
    "recipe",
    "data.",
    "log.",
    "checkpoint.",
    "sample.",
    "default_techniques",
)

_PEAK = "most bytes of tensors at once in a step; with several ranks, on the rank that needs most"
_PREDICTED = "the peak that the memory ledger predicts from shapes; missing if a technique's effect is not predicted"
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
    recipe: str = DEFAULT_RECIPE
    data: str | None = None  # a source or a prepared folder; the recipe's source if None
    steps: Annotated[int, Meta(ge=3, le=1_000_000)] = 100
    warmup: Annotated[int, Meta(ge=0, le=1_000_000)] = 5  # steps after the first one that are not timed
    gate_steps: Count = 6  # steps that must have the losses of the run without systems techniques
    evaluated: Count = 20  # batches of the validation loss
    seconds: Count | None = None  # of training, for the loss in equal time
    turn: Annotated[float, Meta(gt=0, le=3600)] = 0.25  # seconds that the baseline and another arm train in turns
    save_dir: str | None = None  # the folder that the run works in


class TrainingInput(msgspec.Struct, frozen=True):
    settings: TrainingSettings
    source: str  # what the data is prepared from
    data: str | None = None  # the prepared data
    references: str | None = None  # the folder of the reference losses
    # A configuration that is trained instead of the recipe, without a gate. The peak of memory includes evaluations.
    config: Settings | None = None

    def arm_config(self, arm: Mapping[str, object], block: int = 0) -> Config:
        if self.config is not None:
            return Config.from_dict(self.config)
        given = self.settings
        return arm_config(given.recipe, arm, steps=given.steps, evaluated=given.evaluated, block=block)

    def open_data(self, folder: Path) -> Dataset:
        # The data may be prepared already, by the run or by the user.
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

    def parse_settings(self, given: Mapping[str, object]) -> TrainingSettings:
        settings = convert(dict(given), TrainingSettings, what="settings")
        get_recipe(settings.recipe)
        least = settings.warmup + 3
        if settings.steps < least:
            message = f"settings: steps: {settings.steps} is less than {least}; first step and warm-up are not timed"
            raise UsageError(message, remedy=f'give at least --steps {least}; "steps": {least} in a file')
        return settings

    def parse_arm(self, given: Mapping[str, object]) -> Settings:
        check_arm(given)
        return dict(given)

    def missing(self, arm: Settings) -> str | None:
        return missing_for(arm)

    def prepare(self, settings: TrainingSettings, arms: Collection[Settings], scratch: Path) -> PreparedInputs:
        source = absolute_source(settings.data or get_recipe(settings.recipe).data.source)
        given = TrainingInput(settings, source, settings.data, str(scratch / "references"))
        # All configurations first: a value that is not valid must not show after hours.
        configs = [given.arm_config(arm) for arm in arms]
        data = given.open_data(scratch / "data")
        given = msgspec.structs.replace(given, data=str(data.path))
        prepared = PreparedInput(given, _describe(configs[0], given, data))
        return prepared, prepared

    def measures_of(self, settings: TrainingSettings) -> list[str]:
        return [each.name for each in MEASURES if each.name != cell.LOSS_IN_TIME or settings.seconds is not None]

    def use(self, settings: Settings, arm: Settings) -> str:
        ranks, techniques, words = arm.get(RANKS, 1), list[str](), list[str]()
        for name, value in arm.items():
            technique, _, setting = name.removeprefix(TECHNIQUES).partition(".")
            if name.startswith(TECHNIQUES) and (setting or value == "on"):
                techniques.append(technique)
            if name != RANKS and (setting or value != "on"):
                words.append(f"--{name} {'none' if value is None else shlex.quote(str(value))}")
        start = "tensorkeep" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m tensorkeep"
        data = f" --data {shlex.quote(settings['data'])}" if settings.get("data") else ""
        named = f" --technique {','.join(dict.fromkeys(techniques))}" if techniques else ""
        return " ".join([f"{start} train {settings.get('recipe') or DEFAULT_RECIPE}{data}{named}", *words])

    def words(self, arm: Settings) -> Collection[str]:
        techniques = {name.split(".")[1] for name in arm if name.startswith(TECHNIQUES)}
        return [word for name in techniques for word in (name, *TECHNIQUE_CLASSES.get(name).aliases)]

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
        # Code that an earlier cell compiled would shorten the first step.
        with _empty_compile_cache(folder / "compiled"):
            outcome = job.run() if ranks == 1 else run_on_ranks(job, ranks, folder)
        # The ledger predicts one process.
        predicted = None if ranks > 1 else _predicted(config, data)
        figures = {**outcome.figures, **({} if predicted is None else {cell.PREDICTED: float(predicted)})}
        return msgspec.structs.replace(outcome, figures=figures, clocks={**outcome.clocks, **before.clocks})


def _partner(given: TrainingInput, data: Dataset, task: Task) -> PartnerTask | None:
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
    config = config.changed({"model.vocab_size": max(config.model.vocab_size, data.vocab_size)})
    ledger = predict(config, device=chosen_device(config.loop.device).type)
    # A technique with an unknown effect would make the prediction wrong.
    return None if ledger.unknown else ledger.peak_of_steps


@contextmanager
def _empty_compile_cache(folder: Path) -> Iterator[None]:
    before = os.environ.get(_INDUCTOR_CACHE)
    os.environ[_INDUCTOR_CACHE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            # As it was: unset, not empty.
            del os.environ[_INDUCTOR_CACHE]
        else:
            os.environ[_INDUCTOR_CACHE] = before


def _gate(config: Config, data: Path, given: TrainingInput, folder: Path) -> LossGate:
    # Systems techniques must not change the losses; algorithmic ones may, so the reference has them, too.
    plain = without_systems_techniques(config)
    if plain == config or given.config is not None:
        return LossGate([], 0.0)
    # When a user runs a cell again after the run, the shared folder was removed.
    shared = Path(given.references) if given.references else None
    cache = shared if shared is not None and shared.parent.exists() else folder / "references"
    return LossGate(reference_losses(plain, data, given.settings.gate_steps, cache), loss_tolerance(config))


def _describe(config: Config, given: TrainingInput, data: Dataset) -> Subject:
    # On the meta device, shapes need no memory.
    model = GPT(config.model.with_tokens(data.vocab_size), device="meta")
    shapes = [each.numel() for each in model.parameters()]
    nbytes = _BYTES_PER_WEIGHT * sum(shapes)
    loop, device = config.loop, chosen_device(config.loop.device)
    accumulated = loop.gradient_accumulation_steps
    # The speed of a CPU depends on its threads.
    cpu = f"the CPU with {counted(loop.threads or torch.get_num_threads(), 'thread')}"
    sentence = (
        f"{config.recipe}: {sum(shapes):,} parameters ({format_bytes(nbytes)}), {loop.steps:,} steps of "
        f"{f'{accumulated} x ' if accumulated > 1 else ''}{loop.batch_size} x "
        f"{config.model.context_length:,} tokens of {given.source}, on {device if device.type != 'cpu' else cpu}"
    )
    return Subject(sentence, len(shapes), nbytes, {"float32": nbytes})


# Arms: changes to a recipe, and the losses that they must keep


def arm_config(
    recipe: str, arm: Mapping[str, Any], *, steps: int, evaluated: int | None = None, block: int = 0
) -> Config:
    """Return the configuration of an arm; UsageError if recipe or settings are unknown or not valid."""
    base = get_recipe(recipe)
    # Each block has its own seed, so that the verdict on a loss does not rest on one.
    own = {"loop.seed": base.loop.seed + block, "eval.every": 0}
    changes = {name: value for name, value in arm.items() if name != RANKS}
    return measured_config(base, steps=steps, evaluated=evaluated, changes={**own, **changes})


def measured_config(
    config: Config, *, steps: int, evaluated: int | None = None, changes: Mapping[str, Any] | None = None
) -> Config:
    """Return a configuration for a measurement: every step is logged, without checkpoints."""
    return config.changed({**_FIXED, "loop.steps": steps, "eval.batches": evaluated, **(changes or {})})


def check_arm(arm: Mapping[str, Any]) -> None:
    """Check the names of an arm's settings and its techniques; UsageError if they are not valid."""
    known = [*setting_names(), *RENAMED]
    ranks = arm.get(RANKS, 1)
    # Not isinstance: True is an int.
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"{RANKS} is {ranks!r}", remedy=f"give a number of processes, 1 to {_MOST_RANKS}")
    for name in arm:
        if name == RANKS:
            continue
        if name.startswith(_SET_BY_EXPERIMENT):
            remedy = 'remove it from the arm; "steps" and "data" are settings of the experiment'
            raise UsageError(f"{name} is the same for all arms", remedy=remedy)
        if name not in known and not name.startswith(TECHNIQUES):
            raise unknown_setting(name)
    try:
        _techniques(arm)
    except UnsupportedError as error:
        raise UsageError(error.message, remedy=error.remedy) from error


def missing_for(arm: Mapping[str, Any]) -> str | None:
    if arm.get(RANKS, 1) > 1:
        return None  # each rank checks it
    machine = Machine(chosen_device(arm.get("loop.device", "auto")))
    for technique in _techniques(arm).techniques:
        lack = technique.missing(machine)
        if lack is not None:
            return f"{technique.name} {lack}"
    return None


def _techniques(arm: Mapping[str, Any]) -> Stack:
    own = {name: value for name, value in arm.items() if name.startswith(TECHNIQUES)}
    # Techniques do not depend on the recipe, so any will do.
    return Stack.of(get_recipe(DEFAULT_RECIPE).changed(own).techniques)


def without_systems_techniques(config: Config) -> Config:
    """Return a configuration without its systems techniques, which must not change the losses."""
    algorithmic = {name for name in config.techniques if TECHNIQUE_CLASSES.get(name).kind == "algorithmic"}
    kept = {name: given for name, given in config.techniques.items() if name in algorithmic}
    return msgspec.structs.replace(config, techniques=kept)


def loss_tolerance(config: Config) -> float:
    """Return how far losses may differ from `without_systems_techniques`, relatively: the techniques' sum."""
    kinds = (TECHNIQUE_CLASSES.get(name) for name in config.techniques)
    # Tolerances add up, because each technique may round differently.
    return float(sum(each.tolerance for each in kinds if each.kind == "systems"))


WORKLOAD = TrainingWorkload()
