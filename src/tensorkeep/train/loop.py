"""The training loop. Read this file first: `make_step` is one step of training, `train` is the loop around it.

Everything that a step needs lies in a `tensorkeep.train.run.state.Run`, which `tensorkeep.train.run.setup.open_run`
builds from a configuration, a folder and data::

    with open_run(config, RunFolder("runs/mine"), Dataset.open("data")) as run:
        summary = train(run, listener)

What a step does can be changed by techniques, which replace the functions of `tensorkeep.train.operations.Operations`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tensorkeep.checkpoint.background import PendingSave
from tensorkeep.train.generate import generate, prompt_ids
from tensorkeep.train.guard import check_steps
from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.monitor.profile import profiled
from tensorkeep.train.monitor.timing import settle, timed_step
from tensorkeep.train.optim.optimizers import set_learning_rate
from tensorkeep.train.optim.schedules import learning_rate_factor
from tensorkeep.train.run.device import peak_memory
from tensorkeep.train.run.setup import OpenRun
from tensorkeep.train.run.state import METRIC, Run
from tensorkeep.train.run.validation import validation_loss


class Listener(Protocol):
    """Receives the events of a run as they happen, on rank 0."""

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Receive one event of a step; the values are its figures, as in ``log.jsonl``.

        The kind is ``"train"``, ``"evaluate"``, ``"sample"``, ``"technique"`` (a technique was verified to be active),
        ``"save"`` (a checkpoint is durable, which may be some steps after its own), ``"suggestion"`` (the result of a
        range test), or ``"profile"`` (a profile was written).
        """


class Silent:
    """A listener that ignores the events."""

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended.

    Attributes
    ----------
    step : int
        The last step.
    steps : int
        Steps done by this call; 0 if the run had ended before.
    reason : str
        ``"done"``, ``"early stop"``, or ``"stopped"`` on request.
    loss, best : float
        The last validation loss and the best one, in nats per token.
    tokens_per_second, mfu : float
        Of training alone; NaN if no step was timed.
    peak_memory_bytes : int
        See `tensorkeep.train.run.device.peak_memory`.
    suggested_learning_rate : float or None
        The result of a range test.
    seconds : dict of str to float
        The time spent, by activity.
    mfu_of_data_sheet : float or None
        MFU against the peak in the data sheet of the GPU, if that is known.
    """

    step: int
    steps: int
    reason: str
    loss: float
    best: float
    tokens_per_second: float
    mfu: float
    peak_memory_bytes: int
    suggested_learning_rate: float | None
    seconds: dict[str, float]
    mfu_of_data_sheet: float | None = None


@dataclass(frozen=True, slots=True)
class MadeStep:
    """The figures of a step. Those that a GPU computes stay there until they are read, which waits for the GPU."""

    loss: Tensor
    gradient_norm: Tensor
    learning_rate: float

    def read(self) -> dict[str, float]:
        """Return the figures by name."""
        figures = {"loss": self.loss.item(), "gradient_norm": self.gradient_norm.item()}
        return figures | {"learning_rate": self.learning_rate}


def train(run: OpenRun, listener: Listener, *, stop: Callable[[], bool] = lambda: False, profile: int = 0) -> Summary:
    """Train until the last step or an early end, save, and wait until the last checkpoint is durable.

    Parameters
    ----------
    run : OpenRun
    listener : Listener
    stop : callable
        Called after each step; when it returns true, the run is saved and ends.
    profile : int
        Profile this many steps, from the fourth on, and write a Chrome trace into the run's folder.

    Returns
    -------
    Summary

    Raises
    ------
    DivergedError
        If the loss or a gradient is not finite, and the run does not skip such updates or has skipped too many.
    StoreError
        If a checkpoint or the log cannot be written.
    TechniqueNotActiveError
        If a technique is on and has no effect.
    """
    first, saves = run.progress.step, deque[tuple[int, PendingSave]]()
    reason = _end_reason(run)

    def written(path: Path, steps: int) -> None:
        _report(run, listener, "profile", {"path": str(path), "steps": steps})

    with profiled(run, profile, written) as profile_next_step:
        while reason is None:
            with timed_step(run), _verified_techniques(run, listener):
                made = make_step(run)
            reason = _follow_up(run, listener, made, saves, stop)
            profile_next_step()
    with run.clock.spent_on("checkpoint"):
        run.manager.wait()
    _report_saves(run, listener, saves)
    return _summary(run, reason, steps=run.progress.step - first)


def _follow_up(
    run: OpenRun,
    listener: Listener,
    made: MadeStep,
    saves: deque[tuple[int, PendingSave]],
    stop: Callable[[], bool],
) -> str | None:
    """Do what is due after a step: report, evaluate, sample, save; return the reason to end, if there is one."""
    config = run.config
    if config.schedule.name == "range":
        _update_range_test(run, listener, made.read())
    step = run.progress.step
    last = _end_reason(run) is not None
    if last or _due(config.log.every, step):
        settle(run)
        others: dict[str, Any] = {"peak_memory_bytes": peak_memory(run.device)}
        if run.gradient_norms:
            others["gradient_norms"] = run.gradient_norms
        _report(run, listener, "train", made.read() | run.speed.lap() | others)
    metrics = _evaluate(run, listener) if last or _due(config.eval.every, step) else {}
    if _due(config.sample.every, step):
        _sample(run, listener)
    reason = _end_reason(run) or ("stopped" if run.world.any(stop()) else None)
    is_best = bool(metrics) and run.progress.waited == 0 and config.checkpoint.keep_best > 0
    if reason or is_best or _due(config.checkpoint.every, step):
        _save(run, saves, metrics)
    _report_saves(run, listener, saves)
    return reason


def take_step(run: Run) -> dict[str, float]:
    """Make one update of the weights, and wait for it; see `make_step`.

    Returns ``loss``, the mean loss of the batches, ``gradient_norm`` before clipping, and ``learning_rate`` of AdamW.
    """
    made = make_step(run)
    check_steps(run)
    return made.read()


def make_step(run: Run) -> MadeStep:
    """Make one update of the weights: add up the gradients of its batches, clip them, step the optimizers."""
    settings, operations = run.config.loop, run.operations
    run.progress.step += 1
    factor = learning_rate_factor(run.config.schedule, run.progress.step, settings.steps) * run.plateau.factor
    set_learning_rate(run.optimizers, factor)
    total = torch.zeros((), device=run.device)
    before = run.batches.state_dict()["position"]
    batches = [next(run.batches) for _ in range(settings.accumulate)]
    run.drawn = range(before, run.batches.state_dict()["position"])
    counts = [int(np.count_nonzero(targets.numpy() != IGNORED)) for _, targets in batches]
    counted = _mean_count(run, sum(counts))
    for (inputs, targets), count in zip(batches, counts, strict=True):
        if count:
            # The mean over all targets of the step: each target has the same weight, whichever batch it is in.
            loss = operations.loss(*run.move(inputs, targets)) / (counted / count)
            operations.backward(loss)
            total += loss.detach()
    run.progress.tokens += round(counted * run.replicas)
    run.positions = run.replicas * sum(
        inputs.numel() for (inputs, _), count in zip(batches, counts, strict=True) if count
    )
    total = run.world.mean(total)
    norm = operations.clip()
    if operations.accepts(total, norm):
        operations.update()
        run.average.update(run.progress.step)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
    return MadeStep(total, norm, factor * run.config.optim.lr)


def _mean_count(run: Run, count: int) -> float:
    """Return the mean number of targets of a rank, by which each target has the same weight, whichever rank has it."""
    if run.world.size == 1 or run.dataset.chat_tokenizer is None:
        return count
    return run.world.mean(torch.tensor(count, dtype=torch.float64)).item()


@contextmanager
def _verified_techniques(run: OpenRun, listener: Listener) -> Iterator[None]:
    """Verify in the first steps of a process that each technique has its effect, and report the proofs."""
    proofs = run.techniques.proofs
    known = len(proofs)
    with run.techniques.verified(run):
        yield
    for name, proof in islice(proofs.items(), known, None):
        _report(run, listener, "technique", {"name": name, "seen": proof.summary, **proof.figures})


def _update_range_test(run: Run, listener: Listener, record: dict[str, float]) -> None:
    """Add a step to the range test; report the suggestion after the last one."""
    test = run.progress.range_test
    test.add(record["learning_rate"], record["loss"], steps=run.config.loop.steps - run.config.schedule.start)
    if _end_reason(run):
        _report(run, listener, "suggestion", {"learning_rate": test.suggestion(), "lowest_loss": test.lowest})


def _end_reason(run: Run) -> str | None:
    """Return the reason why training has ended, or None if it continues."""
    progress, patience = run.progress, run.config.eval.patience
    if progress.range_test.over or (patience is not None and progress.waited >= patience):
        return "early stop"
    return "done" if progress.step >= run.config.loop.steps else None


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _report(run: Run, listener: Listener, kind: str, values: dict[str, Any], *, step: int | None = None) -> None:
    """Write an event to the log and pass it to the listener, on rank 0."""
    if run.world.is_main:
        step = run.progress.step if step is None else step
        run.log.write(step, kind, **values)
        listener.on_event(step, kind, values)


def _evaluate(run: Run, listener: Listener) -> dict[str, float]:
    """Compute the validation loss, of the averaged weights if the run averages them; return the metrics."""
    settle(run)
    progress = run.progress
    with run.clock.spent_on("evaluate"):
        loss = validation_loss(run)
    if progress.evaluated != run.validation.targets:
        # A resume has changed the windows. What was best on the others would end the run, or lower its rate.
        progress.best, progress.waited = math.inf, 0
        run.plateau.forget_losses()
    run.plateau.add(loss)
    progress.loss, progress.evaluated = loss, run.validation.targets
    better = loss < progress.best
    progress.best, progress.waited = (loss, 0) if better else (progress.best, progress.waited + 1)
    _report(run, listener, "evaluate", {METRIC: loss, "best": progress.best, "tokens": run.validation.targets})
    return {METRIC: loss}


def _sample(run: Run, listener: Listener) -> None:
    settle(run)
    config = run.config.sample
    tokenizer = run.dataset.tokenizer
    with run.clock.spent_on("sample"), run.average.in_place():
        ids = generate(
            run.model,
            prompt_ids(tokenizer, config.prompt),
            max_new_tokens=config.tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            seed=run.config.loop.seed + run.progress.step,
            stop=tokenizer.end_of_document,
            vocab_size=tokenizer.vocab_size,
        )
    text = [id for id in ids.tolist() if id != tokenizer.begin_of_document]
    _report(run, listener, "sample", {"text": tokenizer.decode(text)})


def _save(run: OpenRun, saves: deque[tuple[int, PendingSave]], metrics: dict[str, float]) -> None:
    """Begin to save a checkpoint of the step; it does not wait: `_report_saves` reports the finished saves."""
    settle(run)
    with run.clock.spent_on("checkpoint"):
        # A resumed run repeats the steps after its last undamaged checkpoint, and replaces damaged ones.
        step = run.progress.step
        saves.append((step, run.manager.save(step, run.state(), metrics, overwrite=True)))


def _report_saves(run: Run, listener: Listener, saves: deque[tuple[int, PendingSave]]) -> None:
    """Report the checkpoints that have become durable, in the order of their steps."""
    while saves and saves[0][1].done():
        step, pending = saves.popleft()
        report = pending.wait()
        values = {
            "path": report.path,
            "stall_seconds": report.stall_seconds,
            "durable_seconds": report.durable_seconds,
            "new_bytes": report.new_bytes,
        }
        _report(run, listener, "save", values, step=step)


def _summary(run: Run, reason: str, *, steps: int) -> Summary:
    total = run.speed.total()
    return Summary(
        step=run.progress.step,
        steps=steps,
        reason=reason,
        loss=run.progress.loss,
        best=run.progress.best,
        tokens_per_second=total.get("tokens_per_second", math.nan),
        mfu=total.get("mfu", math.nan),
        peak_memory_bytes=peak_memory(run.device),
        suggested_learning_rate=run.progress.range_test.suggestion(),
        seconds=dict(run.clock.seconds),
        mfu_of_data_sheet=total.get("mfu_of_data_sheet"),
    )
