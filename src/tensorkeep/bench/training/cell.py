"""One cell of a training comparison: trains a run, compares the losses with the reference."""

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tensorkeep.bench.checkpoint.probes import release_memory
from tensorkeep.bench.experiment.workload import DoesNotApplyError, GateError, Outcome
from tensorkeep.bench.training.reference_losses import LossGate
from tensorkeep.errors import TechniqueNotActiveError, UnsupportedError, UsageError
from tensorkeep.machine import reset_peak_resident, resident_bytes
from tensorkeep.train.config.config import Config
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.loop import Summary, train
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.setup import open_run
from tensorkeep.train.run.state import Run
from tensorkeep.train.run.validation import validation_loss

SPEED = "tokens_per_second"
MEMORY = "peak_memory"
LOSS = "loss"
LOSS_IN_TIME = "loss_in_time"
STEP = "step"
FIRST = "first_step"
MFU = "mfu"
TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a cell is measured."""

    warmup: int  # steps after the first one that are not timed
    # After how many seconds of training the validation loss is measured, in addition to the end of the run. A run that
    # ends sooner has no such loss: it had less time than the others.
    seconds: float | None = None
    with_evaluation: bool = False  # whether the peak of memory includes evaluations


def run_training(config: Config, data: Path, folder: Path, protocol: Protocol, gate: LossGate) -> Outcome:
    """Train a run to its end, and return its figures.

    Raises GateError if a technique was not active, or the losses do not match the reference; DoesNotApplyError if the
    configuration is not valid on this machine.
    """
    begin = time.perf_counter()
    try:
        with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
            built = time.perf_counter()
            recorder = _Recorder(run, protocol, gate, others=_reset_peak(run))
            summary = train(run, recorder, stop=recorder.stop)
            outcome = _outcome(run, recorder, summary, protocol)
    except TechniqueNotActiveError as error:
        raise GateError(error.message) from error
    except (UnsupportedError, UsageError) as error:
        raise DoesNotApplyError(error.message) from error
    outcome.figures[MEMORY] = float(max(0, recorder.peak - recorder.others))
    outcome.clocks["build"] = built - begin
    return outcome


def _reset_peak(run: Run) -> int:
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
    """Records seconds, tokens and FLOPs after each step, and evaluates once when the given time has passed."""

    run: Run
    protocol: Protocol
    gate: LossGate
    others: int  # bytes of the process that do not belong to training
    begin: float = field(default_factory=time.perf_counter)  # before the first step
    first: float = 0.0  # seconds of the first step
    marks: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, tokens and FLOPs after each step
    peak: int = 0  # bytes
    loss_in_time: float | None = None
    observed: dict[str, str] = field(default_factory=dict)

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "technique":
            self.observed[values["name"]] = values["seen"]
        elif kind == "evaluate" and not self.protocol.with_evaluation:
            _reset_peak(self.run)
        elif kind == "train":
            self._record_step(step, values)

    def _record_step(self, step: int, values: dict[str, Any]) -> None:
        self.gate.check(step, values["loss"])
        self.marks.append((self.run.clock.seconds.get("train", 0.0), self.run.progress.tokens, self.run.speed.flops))
        self.peak = max(self.peak, values["peak_memory_bytes"])
        if step == 1:
            # Some techniques compile before the step, which the run's clock does not count.
            self.first = time.perf_counter() - self.begin
        # After the warm-up, because an optimizer may compile again in its second step.
        if step == 1 + self.protocol.warmup and self.run.device.type != "cuda":
            self.others, self.peak = _reset_peak(self.run), 0

    def stop(self) -> bool:
        limit = self.protocol.seconds
        if limit is not None and self.loss_in_time is None and self.marks[-1][0] >= limit:
            self.loss_in_time = validation_loss(self.run)
            _reset_peak(self.run)
        return False


def _outcome(run: Run, recorder: _Recorder, summary: Summary, protocol: Protocol) -> Outcome:
    figures: dict[str, float] = {FIRST: recorder.first, TOKENS: float(run.progress.tokens)}
    # The first mark is that of the step that compiles.
    timed = recorder.marks[protocol.warmup :]
    if len(timed) > 1:
        seconds, tokens, flops = (last - first for first, last in zip(timed[0], timed[-1], strict=True))
        figures |= {
            SPEED: tokens / seconds,
            STEP: statistics.median(after[0] - before[0] for before, after in pairwise(timed)),
            MFU: flops / seconds / max(run.speed.peak, 1.0),
        }
    # A run that was stopped early has seen fewer tokens than the others.
    if summary.reason == "done":
        figures[LOSS] = summary.loss
        if recorder.loss_in_time is not None:
            figures[LOSS_IN_TIME] = recorder.loss_in_time
    clocks = {name: spent for name, spent in summary.seconds.items() if name not in ("first step", "train")}
    return Outcome(figures=figures, clocks=clocks, observed=recorder.observed)
