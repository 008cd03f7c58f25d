"""One cell of a comparison of training: a run is built, trained step by step, watched, and held against its gate."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorkeep.bench.checkpoint.gate import GateError
from tensorkeep.bench.checkpoint.probes import release_memory
from tensorkeep.bench.experiment.workload import DoesNotApplyError, Outcome
from tensorkeep.bench.training.reference_losses import LossGate
from tensorkeep.errors import TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.machine import reset_peak_resident, resident_bytes
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.batches import windows
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.evaluate import evaluate, evaluation_batch_size
from tensorkeep.train.loop import Summary, train
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run

SPEED = "tokens_per_second"
MEMORY = "peak_memory"
LOSS = "loss"
LOSS_IN_TIME = "loss_in_time"
STEP = "step"
FIRST = "first_step"
MFU = "mfu"
TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a cell is measured.

    Attributes
    ----------
    warmup : int
        Steps after the first one that are not timed.
    seconds : float or None
        After how much training the validation loss is measured, beside that of the end. A run that ends sooner has no
        such loss: it had less time than the others.
    with_evaluation : bool
        Whether what evaluations take counts for the peak of memory.
    """

    warmup: int
    seconds: float | None = None
    with_evaluation: bool = False


def run_training(config: Config, data: Path, folder: Path, plan: Plan, gate: LossGate) -> Outcome:
    """Train a run to its end, and return what was measured.

    Raises
    ------
    GateError
        If a technique was not at work, or the losses are not what they must be.
    DoesNotApplyError
        If the configuration makes no sense here.
    """
    begin = time.perf_counter()
    try:
        with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
            built = time.perf_counter()
            watch = _Watch(run, plan, gate, others=_begin_peak(run))
            summary = train(run, watch, stop=watch.stop)
            outcome = _outcome(run, watch, summary, plan)
    except TechniqueNotActiveError as error:
        raise GateError(error.message) from error
    except (UnsupportedError, UsageError) as error:
        raise DoesNotApplyError(error.message) from error
    outcome.figures[MEMORY] = float(max(0, watch.peak - watch.others))
    outcome.clocks["build"] = built - begin
    return outcome


def _begin_peak(run: Run) -> int:
    """Let the peak of memory begin here, between two steps; return what of it is no part of training.

    On the CPU it is the memory of the process, which has loaded and compiled a lot by now.
    """
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
        return 0
    release_memory()
    reset_peak_resident()
    states = [value for each in run.optimizers.values() for state in each.state.values() for value in state.values()]
    averages = run.average.state_dict().values()
    return resident_bytes() - sum(_nbytes(each) for each in (*run.model.parameters(), *states, *averages))


def _nbytes(value: Any) -> int:
    """Return the bytes of a tensor, and of a quantised one those of what it consists of."""
    if is_traceable_wrapper_subclass(value):
        return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, torch.Tensor) else 0


@dataclass
class _Watch:
    """Notes, after each step, the seconds, tokens and FLOPs so far; evaluates once when its time has come."""

    run: Run
    plan: Plan
    gate: LossGate
    others: int
    begin: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    peak: int = 0
    loss_in_time: float | None = None
    observed: dict[str, str] = field(default_factory=dict)

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "technique":
            self.observed[values["name"]] = values["seen"]
        elif kind == "evaluate" and not self.plan.with_evaluation:
            _begin_peak(self.run)
        elif kind == "train":
            self._stepped(step, values)

    def _stepped(self, step: int, values: dict[str, Any]) -> None:
        self.gate.check(step, values["loss"])
        self.marks.append((self.run.clock.seconds.get("train", 0.0), self.run.progress.tokens, self.run.speed.flops))
        self.peak = max(self.peak, values["peak_memory_bytes"])
        if step == 1:
            # Some techniques compile before the step itself, which the run's clock does not count.
            self.first = time.perf_counter() - self.begin
        # An optimizer may compile a second time in its second step.
        if step == 1 + self.plan.warmup and self.run.device.type != "cuda":
            self.others, self.peak = _begin_peak(self.run), 0

    def stop(self) -> bool:
        if self.plan.seconds is not None and self.loss_in_time is None and self.marks[-1][0] >= self.plan.seconds:
            self.loss_in_time = _validation_loss(self.run)
            _begin_peak(self.run)
        return False


def _validation_loss(run: Run) -> float:
    """Return the loss on what the run is evaluated on in the end."""
    model = run.config.model
    rows = windows(
        run.dataset.validation,
        model.context_length,
        batch_size=evaluation_batch_size(model),
        most=run.config.eval.batches,
    )
    with run.average.in_place():
        return evaluate(run.model, rows)


def _outcome(run: Run, watch: _Watch, summary: Summary, plan: Plan) -> Outcome:
    figures: dict[str, float] = {FIRST: watch.first, TOKENS: float(run.progress.tokens)}
    # The first mark is the step that compiles.
    timed = watch.marks[plan.warmup :]
    if len(timed) > 1:
        seconds, tokens, flops = (last - first for first, last in zip(timed[0], timed[-1], strict=True))
        figures |= {
            SPEED: tokens / seconds,
            STEP: statistics.median(after[0] - before[0] for before, after in pairwise(timed)),
            MFU: flops / seconds / max(run.speed.peak, 1.0),
        }
    # A run that ended early was not trained on as much as the others.
    if summary.reason == "done":
        figures[LOSS] = summary.loss
        if watch.loss_in_time is not None:
            figures[LOSS_IN_TIME] = watch.loss_in_time
    clocks = {name: spent for name, spent in summary.seconds.items() if name not in ("first step", "train")}
    return Outcome(figures, clocks, watch.observed)
