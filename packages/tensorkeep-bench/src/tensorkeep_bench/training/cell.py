"""One cell of a training comparison; also the processes ``reference``, ``partner`` and ``rank`` that help it."""

import hashlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from chatgot.config.config import Config
from chatgot.data.dataset import Dataset
from chatgot.loop import Silent, TrainingSummary, train, validation_loss
from chatgot.memory import live_bytes
from chatgot.run.folder import RunFolder
from chatgot.run.setup import open_run
from chatgot.run.state import OpenRun
from chatgot.step.train_step import take_step
from chatgot.step.world import LAUNCHER_VARIABLES
from tensorkeep import errors
from tensorkeep.ext import Closing, machine, prepared
from tensorkeep_bench.checkpoint.files import release_memory
from tensorkeep_bench.results import Settings
from tensorkeep_bench.run.cell import end_with_parent, failed_outcome, last_line
from tensorkeep_bench.workload import DoesNotApplyError, GateError, Outcome

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

THREADS = "OMP_NUM_THREADS"
_MODULE = "tensorkeep_bench.training.cell"
_MOST_POINTS = 100
_TURN_MARK = "tensorkeep-turn "
_MORE_STEPS = 20  # the partner can train this many times the steps of a cell, so that it never ends first
_JOB = "job.json"
_LOST = errors.RanksDisagreeError.__name__


class PartnerTask(msgspec.Struct, frozen=True):
    config: Settings
    data: str
    folder: str
    warmup: int  # steps after the first one that are not timed
    turn: float  # seconds
    # OMP_NUM_THREADS of a cell without ranks, or None. Where nothing limits the threads, torch must not get a number
    # either: then MKL may use fewer threads for small matrices. With a number, the baseline was up to 7% slower than
    # itself as an arm.
    threads: str | None


class Protocol(msgspec.Struct, frozen=True):
    warmup: int  # steps after the first one that are not timed
    # Seconds of training after which the validation loss is measured, in addition to the end of the run. A run that
    # ends sooner has no such loss: it had less time than the others.
    seconds: float | None = None
    # Whether the peak of memory counts the process with evaluations, instead of the tensors of a step.
    with_evaluation: bool = False
    turn: float = 0.25  # seconds of a turn
    partner: PartnerTask | None = None  # the baseline that the run takes turns with


@dataclass(frozen=True, slots=True)
class LossGate:
    expected: list[float]
    # The allowed relative difference; 0 means that they must be equal.
    tolerance: float

    def check(self, step: int, loss: float) -> None:
        """Raise GateError if the loss of a step, counted from 1, differs by more than the tolerance."""
        if step > len(self.expected):
            return
        # Steps are counted from 1.
        expected = self.expected[step - 1]
        # Written with `not <=`, because every comparison with NaN is false.
        if not abs(loss - expected) <= self.tolerance * abs(expected):
            allowed = f"at most {self.tolerance:.2%} may differ" if self.tolerance else "they must be equal"
            raise GateError(f"the loss of step {step} is {loss:.6g}, without the technique {expected:.6g}; {allowed}")


class TrainingJob(msgspec.Struct, frozen=True):
    """One run to train and measure, in one process or in each of several ranks."""

    config: Settings
    data: str
    folder: str
    protocol: Protocol
    gate: LossGate

    def run(self) -> Outcome:
        config = Config.from_dict(self.config)
        return run_training(config, Path(self.data), Path(self.folder), self.protocol, self.gate)


def run_training(config: Config, data: Path, folder: Path, protocol: Protocol, gate: LossGate) -> Outcome:
    """Train a run and return its figures; GateError if it is wrong, DoesNotApplyError if it cannot run here."""
    begin = time.perf_counter()
    recorder: _Recorder | None = None
    try:
        with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
            built = time.perf_counter()
            recorder = _Recorder(run, protocol, gate, others=_reset_peak(run))
            summary = train(run, recorder, stop=recorder.stop)
            outcome = _outcome(run, recorder, summary)
            outcome.figures |= _memory(run, recorder)
    # A technique that does nothing must not get a verdict on its speed.
    except errors.TechniqueNotActiveError as error:
        raise GateError(error.message) from error
    except (errors.UnsupportedError, errors.UsageError) as error:
        raise DoesNotApplyError(error.message) from error
    finally:
        if recorder is not None and recorder.partner is not None:
            recorder.partner.close()
    outcome.clocks["build"] = built - begin
    return outcome


@dataclass
class _Recorder:
    run: OpenRun
    protocol: Protocol
    gate: LossGate
    others: int  # bytes of the process that do not belong to training
    begin: float = field(default_factory=time.perf_counter)  # before the first step
    first: float = 0.0  # seconds of the first step
    pairs: list[tuple[float, float]] = field(default_factory=list)  # tokens per second: (this run, baseline)
    peak: int = 0  # bytes
    loss_in_time: float | None = None
    observed: dict[str, str] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)  # by step

    def __post_init__(self) -> None:
        # Events come to rank 0 only, but `stop` is called in all ranks, so steps are counted there.
        self.timer = StepTimer(self.run, self.protocol.warmup, self.protocol.turn)
        self.partner: Partner | None = None

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "technique":
            self.observed[values["name"]] = values["seen"]
        # An evaluation needs other memory than a step.
        elif kind == "evaluate" and not self.protocol.with_evaluation:
            _reset_peak(self.run)
        elif kind == "train":
            self._record_step(step, values)

    def _record_step(self, step: int, values: dict[str, Any]) -> None:
        # At once, so that a wrong run ends after some steps.
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
            # Not earlier: loading the partner would take time from the first step.
            self.partner = self.partner or Partner(self.protocol.partner)
            if speed is not None:
                self.pairs.append((speed, self.partner.train_turn()))
        # All ranks must evaluate in the same step, although their clocks differ.
        limit = self.protocol.seconds
        if limit is not None and self.loss_in_time is None and world.any(self.timer.seconds >= limit):
            self.loss_in_time = validation_loss(self.run)
            _reset_peak(self.run)
        return False


def _outcome(run: OpenRun, recorder: _Recorder, summary: TrainingSummary) -> Outcome:
    figures: dict[str, float] = {FIRST: recorder.first, TOKENS: float(run.progress.tokens)}
    if steps := recorder.timer.steps:
        seconds, tokens, flops = (sum(column) for column in zip(*steps, strict=True))
        figures |= {
            SPEED: tokens / seconds,
            # The median, because one step may wait for the disk or another program.
            STEP: statistics.median(step[0] for step in steps),
        }
        # A peak that training outran is not the peak of the machine.
        if not run.speed.outran:
            figures[MFU] = flops / seconds / max(run.speed.peak, 1.0)
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
    """Return at most 100 points: a step, and the mean of the finite losses since the point before."""
    # A results file has a curve for each cell, and must not become large.
    count = min(len(losses), _MOST_POINTS)
    ends = [place * len(losses) // count for place in range(1, count + 1)]
    points = []
    for begin, end in pairwise([0, *ends]):
        finite = [loss for _, loss in losses[begin:end] if math.isfinite(loss)]
        # A range test ends where losses are no longer finite; JSON has no numbers for them.
        if finite:
            points.append((losses[end - 1][0], float(f"{statistics.fmean(finite):.6g}")))
    return tuple(points)


# Memory


def _memory(run: OpenRun, recorder: _Recorder) -> dict[str, float]:
    peak = float(max(0, recorder.peak - recorder.others))
    # CUDA counts the tensors itself. With evaluations, the limit is on the whole process.
    if run.device.type == "cuda" or recorder.protocol.with_evaluation:
        return {MEMORY: peak}
    figures = {RESIDENT: peak}
    # A range test ends where losses are no longer finite.
    with suppress(errors.DivergedError):
        figures[MEMORY] = float(step_peak(lambda: take_step(run)))
    return figures


def _reset_peak(run: OpenRun) -> int:
    """Restart the peak of memory; return the bytes that do not belong to training."""
    if run.device.type == "cuda":
        # The allocator counts tensors only, so nothing else has to be subtracted.
        torch.cuda.reset_peak_memory_stats(run.device)
        return 0
    # On the CPU it is the resident memory of the process, which has loaded libraries and compiled code.
    release_memory()
    machine.reset_peak_resident()
    states = [value for each in run.optimizers.values() for state in each.state.values() for value in state.values()]
    averages = run.average.state_dict().values()
    return machine.resident_bytes() - sum(_nbytes(each) for each in (*run.model.parameters(), *states, *averages))


def _nbytes(value: Any) -> int:
    if is_traceable_wrapper_subclass(value):
        # A quantised tensor reports the bytes of its original dtype; its inner tensors have the real ones.
        return sum(_nbytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def step_peak(step: Callable[[], object]) -> int:
    """Return the peak bytes of CPU tensors in a step: tensors from before, and tensors that it allocates."""
    # The resident memory of a process depends on malloc, loaded libraries and earlier steps, so torch's profiler
    # records each allocation and release instead. The count is exact, the same in every run, and comparable with the
    # memory ledger, which predicts it from shapes. A tensor that is freed within the step counts until its end.
    before = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    tree = recorded.profiler.kineto_results.experimental_event_tree()
    allocations = sorted(_allocations(tree), key=lambda event: event.start_time_ns)
    used = peak = 0
    for event in allocations:
        used += event.extra_fields.alloc_size  # negative where memory is released
        peak = max(peak, used)
    return before + peak


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.typed[0].name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event
        yield from _allocations(event.children)


# Turns with the baseline


@dataclass
class StepTimer:
    run: OpenRun
    warmup: int
    turn: float  # the least seconds of a turn
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # (seconds, tokens, FLOPs) by timed step
    seconds: float = 0.0  # of training, all steps but the first
    _mark: tuple[float, int, int] = (0.0, 0, 0)
    _untimed: int = -1  # steps that are still not timed; -1 before the first step
    _first: int = 0  # index of the first timed step of this turn

    def add_step(self) -> float | None:
        """Count the step that has just ended; return the tokens per second of a turn if the step ends one."""
        run = self.run
        before, self._mark = self._mark, (run.clock.seconds.get("train", 0.0), run.progress.tokens, run.speed.flops)
        self.seconds = self._mark[0]
        if self._untimed < 0:
            # The run's clock does not count its first step.
            self._untimed = self.warmup
        elif self._untimed:
            self._untimed -= 1
        else:
            # The clock, tokens and FLOPs only grow, so a step is the difference of two marks.
            self.steps.append(tuple(now - then for now, then in zip(self._mark, before, strict=True)))  # type: ignore[arg-type]
        seconds = sum(step[0] for step in self.steps[self._first :])
        if seconds < self.turn or not seconds:
            return None
        speed = sum(step[1] for step in self.steps[self._first :]) / seconds
        # The partner has just used the caches and threads: the first step of the next turn warms them up and is not
        # timed.
        self._first, self._untimed = len(self.steps), 1
        return speed

    @property
    def warming_up(self) -> bool:
        return not self.steps and self._untimed != 0


class Partner(Closing):
    """The baseline's process; it has warmed up and waits. TensorkeepError if the process ends."""

    def __init__(self, task: PartnerTask) -> None:
        # The partner of a rank is a run by itself, with as many threads as one.
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment.pop(THREADS, None)
        environment |= {} if task.threads is None else {THREADS: task.threads}
        command = [sys.executable, "-m", _MODULE, "partner", msgspec.json.encode(task).decode()]
        # The speed of a machine drifts within seconds by more than most techniques change it. Two runs that take turns
        # for a fraction of a second see the same machine, so the ratio of a pair of turns is much less noisy than the
        # ratio of two full runs.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read()

    def train_turn(self) -> float:
        stdin = self._process.stdin
        if stdin is not None:
            stdin.write("\n")
            stdin.flush()
        return self._read()

    def _read(self) -> float:
        # Libraries print lines of their own.
        for line in self._process.stdout or ():
            if line.startswith(_TURN_MARK):
                return float(line.removeprefix(_TURN_MARK))
        # The output ended before a turn did, so the process has failed.
        code = self._process.wait()
        self.close()
        raise errors.TensorkeepError(f"the process of the baseline ended with exit code {code}")

    def close(self) -> None:
        self._process.kill()
        # Closes the pipes and collects the exit status.
        self._process.communicate()


def _run_partner(task: PartnerTask) -> None:
    config = Config.from_dict(task.config)
    config = config.changed({"loop.steps": _MORE_STEPS * config.loop.steps})
    with open_run(config, RunFolder(Path(task.folder)), Dataset.open(task.data)) as run:
        timer = StepTimer(run, task.warmup, task.turn)
        ready = False

        def stop() -> bool:
            nonlocal ready
            speed = timer.add_step()
            # The first line reports only that the warm-up is over.
            if not ready and not timer.warming_up:
                ready, speed = True, 0.0
            if speed is None:
                return False
            print(f"{_TURN_MARK}{speed}", flush=True)
            # Empty at the end of stdin: the cell has ended, or closed the pipe.
            return not sys.stdin.readline()

        train(run, Silent(), stop=stop)


# The reference losses


class _ReferenceTask(msgspec.Struct):
    config: Settings
    data: str
    steps: int


def reference_losses(config: Config, data: Path, steps: int, cache: Path) -> list[float]:
    """Return the losses of the first steps, shared in the folder ``cache``; TensorkeepError if it fails."""
    task = msgspec.json.encode(_ReferenceTask(config.as_dict(), str(data), steps)).decode()
    # By all that determines the losses: configuration, data and steps.
    path = cache / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", _MODULE, "reference", task]
        # In its own process, because compiled code and caches of the reference would change the first step of the cell.
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise errors.TensorkeepError(f"the reference run without techniques failed: {last_line(done.stderr)}")
        # The last line: libraries may print before it.
        path.write_text(done.stdout.splitlines()[-1])
    return msgspec.json.decode(path.read_bytes(), type=list[float])


def train_steps(config: Config, data: Path, steps: int, folder: Path) -> list[float]:
    with open_run(config, RunFolder(folder), Dataset.open(data)) as run:
        with run.techniques.verified(run):
            losses = [take_step(run)["loss"]]
        return losses + [take_step(run)["loss"] for _ in range(steps - 1)]


def _run_reference(task: _ReferenceTask) -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses = train_steps(Config.from_dict(task.config), Path(task.data), task.steps, Path(folder, "run"))
    print(msgspec.json.encode(losses).decode())


# Several ranks


def run_on_ranks(job: TrainingJob, ranks: int, folder: Path) -> Outcome:
    """Train a job on so many ranks; return one outcome of all. TensorkeepError if torchrun fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _JOB).write_bytes(msgspec.json.encode(job))
    # --standalone takes a free port, so two runs on one machine do not meet.
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", _MODULE, "rank"]
    # Ranks share the processors; with all threads each, they would wait for each other.
    threads = max(1, torch.get_num_threads() // ranks)
    done = subprocess.run(
        [sys.executable, *command, str(folder)],
        env={**os.environ, THREADS: str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Files, because torchrun mixes the output of its ranks.
    files = [_outcome_file(folder, rank) for rank in range(ranks)]
    if done.returncode or not all(file.exists() for file in files):
        raise errors.TensorkeepError(f"torchrun with {ranks} ranks failed: {last_line(done.stderr)}")
    return joined([msgspec.json.decode(file.read_bytes(), type=prepared(Outcome)) for file in files])


def joined(outcomes: list[Outcome]) -> Outcome:
    failed = [each for each in outcomes if each.status != "ok"]
    if failed:
        # Where one rank fails, the others only report that they lost the connection.
        return min(failed, key=lambda each: _LOST in (each.reason or ""))
    figures = {
        # The rank that needs most memory decides whether the run fits.
        name: max(each.figures[name] for each in outcomes)
        for name in (MEMORY, RESIDENT)
        if all(name in each.figures for each in outcomes)
    }
    return msgspec.structs.replace(outcomes[0], figures={**outcomes[0].figures, **figures})


def _run_rank(folder: Path) -> None:
    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=prepared(TrainingJob))
    try:
        outcome = job.run()
    except Exception as error:
        outcome = failed_outcome(error)
        # Marks the consequence of another rank's failure, see `joined`.
        if isinstance(error, errors.RanksDisagreeError):
            outcome.reason = f"{_LOST}: {outcome.reason}"
    _outcome_file(folder, int(os.environ["RANK"])).write_bytes(msgspec.json.encode(outcome))


def _outcome_file(folder: Path, rank: int) -> Path:
    return folder / f"outcome-{rank}.json"


if __name__ == "__main__":
    # A killed cell must not leave processes that train on.
    end_with_parent()
    _kind, _task = sys.argv[1:]
    if _kind == "reference":
        _run_reference(msgspec.json.decode(_task, type=prepared(_ReferenceTask)))
    elif _kind == "partner":
        _run_partner(msgspec.json.decode(_task, type=prepared(PartnerTask)))
    else:
        _run_rank(Path(_task))
