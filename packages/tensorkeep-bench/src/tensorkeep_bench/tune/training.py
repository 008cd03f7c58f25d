"""``tensorkeep tune training``: the cheapest techniques that fit into a memory limit, by prediction and by trials."""

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from chatgot.config.config import Config
from chatgot.memory import Ledger, predict
from chatgot.run.auto_batch_size import with_batch_size
from chatgot.step.device import chosen_device
from chatgot.techniques.base import Machine
from chatgot.techniques.stack import Stack, turn_on_defaults
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.ext import machine
from tensorkeep_bench.results import Limits, Settings
from tensorkeep_bench.run.cell import run_cell
from tensorkeep_bench.training.cell import MEMORY
from tensorkeep_bench.training.workload import TrainingInput, TrainingSettings, measured_config
from tensorkeep_bench.workload import Outcome, Task

TRIAL_STEPS = 3
TRIAL_SECONDS = 600

_MOST_TRIALS = 5
_CLEARLY_LESS = 0.9
# What a process may use beyond training in its first step, while it loads libraries and compiles.
_STARTUP_BYTES = 1 << 30
_COST_OF_HALVING = 1.01  # the expected factor on the time of a step for each halving of the micro-batch

RunTrial = Callable[[Config], Outcome]


class Option(NamedTuple):
    name: str
    settings: Settings
    cost: float


# At most one option per group is chosen. The costs come from the techniques' papers and our own measurements.
OPTIONS: tuple[tuple[Option, ...], ...] = (
    (Option("fused-cross-entropy", {}, 1.02),),
    (Option("low-bit-optimizer", {"bits": 8}, 1.04), Option("optimizer-offload", {}, 1.5)),
    (
        Option("activation-checkpointing", {"keep": "matmuls"}, 1.12),
        Option("activation-checkpointing", {}, 1.3),
        Option("activation-swapping", {}, 1.6),
    ),
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    config: Config
    ledger: Ledger  # the predicted memory
    cost: float = 1.0  # the expected factor on the time of a step; 1.0 for the given configuration
    added: dict[str, Settings] = field(default_factory=dict)  # techniques that the given one does not have

    def settings(self) -> Settings:
        loop = self.config.loop
        techniques = {f"techniques.{name}": settings or "on" for name, settings in self.added.items()}
        return {
            **techniques,
            "loop.batch_size": loop.batch_size,
            "loop.gradient_accumulation_steps": loop.gradient_accumulation_steps,
        }


@dataclass(frozen=True, slots=True)
class Trial:
    batch_size: int
    fits: bool
    reason: str


@dataclass(frozen=True, slots=True)
class TunedTraining:
    memory: int  # bytes that training may use
    before: MemoryPlan  # the given configuration
    chosen: MemoryPlan  # the cheapest that fits; if none is predicted to fit, the one that needs the least memory
    predicted_to_fit: bool
    measured: int | None = None  # peak of the trial in bytes; None without a trial, or where it exceeded the limit
    tried: bool = False  # whether there was a trial
    trials: Sequence[Trial] = ()  # trials of the search for the largest batch

    @property
    def fits(self) -> bool:
        # A measured peak is worth more than the prediction.
        if not self.tried:
            return self.predicted_to_fit
        return self.measured is not None and self.measured <= self.memory

    def as_dict(self) -> Settings:
        return {
            "memory": self.memory,
            "before": self.before.ledger.as_dict(),
            "chosen": {
                "settings": self.chosen.settings(),
                "expected_cost": self.chosen.cost,
                "predicted": self.chosen.ledger.as_dict(),
            },
            "fits": self.fits,
            "measured_peak": self.measured,
            "trials": msgspec.to_builtins(self.trials),
        }


def tune(config: Config, data: Path, memory: int, *, run_trials: bool = True, largest: bool = False) -> TunedTraining:
    """Choose techniques and a batch size for prepared data; the configuration has its vocabulary size.

    ``memory`` is the bytes that training may use: the tensors on CUDA; on the CPU, the process beyond what it needs
    without training. The choice is trained for some steps if ``run_trials``. With ``largest``, trials search the
    largest batch that fits.

    Raises UsageError if a trial fails for another reason than memory, or techniques cannot be combined;
    UnsupportedError if a technique is unknown, or this machine lacks what it needs.
    """
    device = chosen_device(config.loop.device)
    # As a training run does: the plan must start from what would really run.
    config, _ = turn_on_defaults(config, Machine(device))
    Stack.of(config.techniques).check(Machine(device))
    found = memory_plans(config)
    before = next(each for each in found if not each.added and each.config.loop == config.loop)
    fitting = [each for each in found if each.ledger.peak <= memory]
    if not fitting:
        return TunedTraining(memory, before, min(found, key=lambda each: each.ledger.peak), predicted_to_fit=False)
    tuned = TunedTraining(memory, before, fitting[0], predicted_to_fit=True)
    if not run_trials:
        return tuned
    # On CUDA the peak counts tensors only; on a CPU the process also holds its libraries.
    run_trial = trial_runner(data, memory, 0 if device.type == "cuda" else machine.resident_bytes() + _STARTUP_BYTES)
    tuned = _try_plans(tuned, fitting, run_trial)
    if not (largest and tuned.fits):
        return tuned
    best, trials = largest_batch(tuned.chosen.config, memory, run_trial)
    if best is None:
        return tuned
    config, peak = best
    chosen = replace(tuned.chosen, config=config, ledger=predict(config, device=device.type))
    return replace(tuned, chosen=chosen, measured=peak, trials=trials)


def memory_plans(config: Config) -> list[MemoryPlan]:
    """Return the configuration alone and with every set of techniques that can run here, the cheapest first."""
    device = chosen_device(config.loop.device)
    # None leaves the group out; a technique that the configuration has already stays as it is.
    groups = [[None, *(each for each in group if each.name not in config.techniques)] for group in OPTIONS]
    found: list[MemoryPlan] = []
    for picked in itertools.product(*groups):
        options = [each for each in picked if each is not None]
        added = {each.name: each.settings for each in options}
        together = msgspec.structs.replace(config, techniques={**config.techniques, **added})
        try:
            Stack.of(together.techniques).check(Machine(device))
        # Some techniques exclude each other, or need another device.
        except (UsageError, UnsupportedError):
            continue
        cost = math.prod(each.cost for each in options)
        for halvings, batch_size in enumerate(_halved(config.loop.batch_size)):
            # The number of sequences in a step does not change: a smaller micro-batch is accumulated more often.
            smaller = with_batch_size(together, batch_size)
            ledger = predict(smaller, device=device.type)
            found.append(MemoryPlan(smaller, ledger, cost * _COST_OF_HALVING**halvings, added))
    # Of two plans with equal cost, the simpler one.
    return sorted(found, key=lambda plan: (plan.cost, len(plan.added)))


def _halved(size: int) -> Iterator[int]:
    yield size
    while size % 2 == 0:
        size //= 2
        yield size


def _try_plans(tuned: TunedTraining, fitting: Sequence[MemoryPlan], run_trial: RunTrial) -> TunedTraining:
    limit = tuned.memory
    for _ in range(_MOST_TRIALS):
        # The cheapest of the plans that need clearly less than the last one tried.
        plan = next((each for each in fitting if each.ledger.peak <= limit), None)
        if plan is None:
            break
        outcome = run_trial(plan.config)
        fitted = fits(outcome, tuned.memory)
        peak = int(outcome.figures[MEMORY]) if MEMORY in outcome.figures else None
        tuned = replace(tuned, chosen=plan, measured=peak, tried=True)
        if fitted:
            break
        # A plan that is predicted to need nearly as much would not fit either.
        limit = round(plan.ledger.peak * _CLEARLY_LESS)
    return tuned


def largest_batch(config: Config, memory: int, run_trial: RunTrial) -> tuple[tuple[Config, int] | None, list[Trial]]:
    """Return configuration and peak bytes of the largest batch that fits, or None, and the trials."""
    sequences = config.loop.batch_size * config.loop.gradient_accumulation_steps
    # Only divisors keep the number of sequences in a step. The peak grows with the size, so bisection finds the
    # largest.
    sizes = [size for size in range(1, sequences + 1) if sequences % size == 0]
    trials: list[Trial] = []
    best: tuple[Config, int] | None = None

    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        tried = with_batch_size(config, sizes[middle])
        outcome = run_trial(tried)
        fitted = fits(outcome, memory)
        trials.append(Trial(sizes[middle], fitted, outcome.reason or ""))
        if fitted:
            best, low = (tried, int(outcome.figures[MEMORY])), middle + 1
        else:
            high = middle
    return best, trials


def fits(outcome: Outcome, memory: int) -> bool:
    """Return whether a trial used at most so many bytes; UsageError if it failed for another reason."""
    # It ran out of memory or was ended at its limit, and has no figures.
    if outcome.status == "memory":
        return False
    if outcome.status != "ok":
        raise UsageError(f"a trial failed: {outcome.reason}", remedy="fix the cause, and try again")
    return outcome.figures[MEMORY] <= memory


def trial_runner(data: Path, memory: int, overhead: int) -> RunTrial:
    """Return a function that trains a configuration for a few steps in its own process, with a limit."""
    # The memory for training, and what the process needs without training.
    limits = Limits(TRIAL_SECONDS, memory + overhead)

    def run_trial(config: Config) -> Outcome:
        # The peak is read after a step, so the evaluation must come between two steps to be included.
        config = measured_config(config, steps=TRIAL_STEPS, evaluated=1, changes={"eval.every": 1})
        # Without a warm-up: the peak matters, not the speed.
        settings = TrainingSettings(recipe=config.recipe, steps=TRIAL_STEPS, warmup=0)
        given = TrainingInput(settings, source=str(data), data=str(data), config=config.as_dict())
        with tempfile.TemporaryDirectory(prefix="tensorkeep-tune-") as folder:
            directory = str(Path(folder, "cell"))
            task = Task("training", "trial", {}, msgspec.to_builtins(given), [MEMORY], directory)
            return run_cell(task, limits)

    return run_trial
