"""One cell of a training comparison: trains a run, compares the losses with the reference."""

import math
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorkeep.bench.checkpoint.probes import release_memory
from tensorkeep.bench.experiment.workload import DoesNotApplyError, GateError, Outcome
from tensorkeep.bench.results import Settings
from tensorkeep.bench.training.memory import step_peak
from tensorkeep.bench.training.reference_losses import LossGate
from tensorkeep.bench.training.turns import Partner, PartnerTask, StepTimer
from tensorkeep.errors import DivergedError, TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.machine import reset_peak_resident, resident_bytes
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import TrainingSummary, train, validation_loss
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import OpenRun
from tensorkeep.train.step.train_step import take_step

SPEED = "tokens_per_second"
MEMORY = "peak_memory"
PREDICTED = "predicted_memory"
RESIDENT = "peak_resident"
LOSS = "loss"
LOSS_IN_TIME = "loss_in_time"
STEP = "step"
FIRST = "first_step"
MFU = "mfu"
TOKENS = "tokens"

_MOST_POINTS = 100


class Protocol(msgspec.Struct, frozen=True):
    """How a cell is measured."""

    warmup: int  # steps after the first one that are not timed
    # After how many seconds of training the validation loss is measured, in addition to the end of the run. A run that
    # ends sooner has no such loss: it had less time than the others.
    seconds: float | None = None
    # Whether the peak of memory is that of the process, evaluations included, instead of that of the tensors of a step.
    with_evaluation: bool = False
    turn: float = 0.25  # seconds of a turn
    partner: PartnerTask | None = None  # the baseline that the run takes turns with


class TrainingJob(msgspec.Struct, frozen=True):
    """One run to train and measure, in one process or in each of several ranks."""

    config: Settings
    data: str
    folder: str
    protocol: Protocol
    gate: LossGate

    def run(self) -> Outcome:
        """Train the run and return its figures; see `run_training`."""
        config = Config.from_dict(self.config)
        return run_training(config, Path(self.data), Path(self.folder), self.protocol, self.gate)


def run_training(config: Config, data: Path, folder: Path, protocol: Protocol, gate: LossGate) -> Outcome:
    """Train a run to its end, and return its figures.

    Raises GateError if a technique was not active, or the losses do not match the reference; DoesNotApplyError if the
    configuration is not valid on this machine.
    """
    begin = time.perf_counter()
    recorder: _Recorder | None = None
    try:
        with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
            built = time.perf_counter()
            recorder = _Recorder(run, protocol, gate, others=_reset_peak(run))
            summary = train(run, recorder, stop=recorder.stop)
            outcome = _outcome(run, recorder, summary, protocol)
            outcome.figures |= _memory(run, recorder)
    except TechniqueNotActiveError as error:
        raise GateError(error.message) from error
    except (UnsupportedError, UsageError) as error:
        raise DoesNotApplyError(error.message) from error
    finally:
        if recorder is not None and recorder.partner is not None:
            recorder.partner.close()
    outcome.clocks["build"] = built - begin
    return outcome


def _memory(run: OpenRun, recorder: "_Recorder") -> dict[str, float]:
    """Return the peak of memory; on a CPU, that of its tensors in one more step, and that of the process."""
    peak = float(max(0, recorder.peak - recorder.others))
    if run.device.type == "cuda" or recorder.protocol.with_evaluation:
        return {MEMORY: peak}
    figures = {RESIDENT: peak}
    # A range test ends where losses are no longer finite.
    with suppress(DivergedError):
        figures[MEMORY] = float(step_peak(lambda: take_step(run)))
    return figures


def _reset_peak(run: OpenRun) -> int:
    """Restart the peak of memory, between two steps; return the bytes of it that do not belong to training.

    On the CPU it is the resident memory of the process, which has loaded libraries and compiled code.
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
    """Return the bytes of a tensor; of a quantised one, those of the tensors that it consists of."""
    if is_traceable_wrapper_subclass(value):
        return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, torch.Tensor) else 0


@dataclass
class _Recorder:
    """Times the steps, takes turns with the baseline, and evaluates once when the given time has passed.

    Events come to rank 0 only; `stop` is called in all ranks.
    """

    run: OpenRun
    protocol: Protocol
    gate: LossGate
    others: int  # bytes of the process that do not belong to training
    begin: float = field(default_factory=time.perf_counter)  # before the first step
    first: float = 0.0  # seconds of the first step
    pairs: list[tuple[float, float]] = field(default_factory=list)  # tokens per second: this run's, the baseline's
    peak: int = 0  # bytes
    loss_in_time: float | None = None
    observed: dict[str, str] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)  # by step

    def __post_init__(self) -> None:
        self.timer = StepTimer(self.run, self.protocol.warmup, self.protocol.turn)
        self.partner: Partner | None = None

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "technique":
            self.observed[values["name"]] = values["seen"]
        elif kind == "evaluate" and not self.protocol.with_evaluation:
            _reset_peak(self.run)
        elif kind == "train":
            self._record_step(step, values)

    def _record_step(self, step: int, values: dict[str, Any]) -> None:
        self.gate.check(step, values["loss"])
        self.losses.append((step, values["loss"]))
        self.peak = max(self.peak, values["peak_memory_bytes"])
        if step == 1:
            # Some techniques compile before the step, which the run's clock does not count.
            self.first = time.perf_counter() - self.begin
        # After the warm-up, because an optimizer may compile again in its second step.
        if step == 1 + self.protocol.warmup and self.run.device.type != "cuda":
            self.others, self.peak = _reset_peak(self.run), 0

    def stop(self) -> bool:
        speed, world = self.timer.add_step(), self.run.world
        if self.protocol.partner is not None and world.is_main:
            # Not earlier: loading it would take time from the first step.
            self.partner = self.partner or Partner(self.protocol.partner)
            if speed is not None:
                self.pairs.append((speed, self.partner.train_turn()))
        limit = self.protocol.seconds
        if limit is not None and self.loss_in_time is None and world.any(self.timer.seconds >= limit):
            self.loss_in_time = validation_loss(self.run)
            _reset_peak(self.run)
        return False


def _outcome(run: OpenRun, recorder: _Recorder, summary: TrainingSummary, protocol: Protocol) -> Outcome:
    figures: dict[str, float] = {FIRST: recorder.first, TOKENS: float(run.progress.tokens)}
    if steps := recorder.timer.steps:
        seconds, tokens, flops = (sum(column) for column in zip(*steps, strict=True))
        figures |= {
            SPEED: tokens / seconds,
            STEP: statistics.median(step[0] for step in steps),
            MFU: flops / seconds / max(run.speed.peak, 1.0),
        }
    # A run that was stopped early has seen fewer tokens than the others.
    if summary.reason == "done":
        figures[LOSS] = summary.loss
        if recorder.loss_in_time is not None:
            figures[LOSS_IN_TIME] = recorder.loss_in_time
    clocks = {name: spent for name, spent in summary.seconds.items() if name not in ("first step", "train")}
    turns = {SPEED: tuple(recorder.pairs)} if recorder.pairs else {}
    losses = thinned(recorder.losses)
    return Outcome(figures=figures, clocks=clocks, observed=recorder.observed, turns=turns, losses=losses)


def thinned(losses: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the losses by step as at most 100 points: a step, and the mean of the finite losses since the one before.

    A results file has a curve for each cell, and must not become large.
    """
    count = min(len(losses), _MOST_POINTS)
    ends = [place * len(losses) // count for place in range(1, count + 1)]
    points = []
    for begin, end in pairwise([0, *ends]):
        finite = [loss for _, loss in losses[begin:end] if math.isfinite(loss)]
        if finite:
            points.append((losses[end - 1][0], float(f"{statistics.fmean(finite):.6g}")))
    return tuple(points)
