"""The training loop. `take_step` is the step; `train` is what goes on around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch

from tensorkeep.train.data.batches import windows
from tensorkeep.train.evaluate import evaluate, evaluated_at_once
from tensorkeep.train.generate import generate, prompt_ids
from tensorkeep.train.memory.limits import peak_memory
from tensorkeep.train.model.gpt import IGNORED
from tensorkeep.train.optim.optimizers import set_learning_rate
from tensorkeep.train.optim.schedules import share
from tensorkeep.train.run.run import METRIC, Run
from tensorkeep.train.run.saves import Saves


class Listener(Protocol):
    """Is told what happens in a run."""

    def happened(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Learn of a step (``"train"``), an evaluation (``"evaluate"``), or a sample (``"sample"``).

        Also of a checkpoint (``"save"``), once it is durable, which may be some steps after the one that it holds; and
        of what a range test found (``"suggestion"``).
        """


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended.

    Attributes
    ----------
    step : int
        The last step that was done.
    steps : int
        Those that were done now; 0 where the run had ended before.
    reason : str
        ``"done"``, ``"early stop"`` or ``"stopped"``, for a signal.
    loss, best : float
        The last validation loss and the best one.
    tokens_per_second, mfu : float
        Of training alone; NaN if no step was timed.
    peak_memory_bytes : int
        See `tensorkeep.train.memory.limits`.
    suggested_learning_rate : float or None
        What a range test found.
    seconds : dict of str to float
        What the time was spent on.
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


def train(run: Run, listener: Listener, *, stop: Callable[[], bool] = lambda: False) -> Summary:
    """Train until the last step, or until something ends it earlier; save, and wait until that is durable.

    Parameters
    ----------
    run : Run
    listener : Listener
    stop : callable
        Asked after each step whether to save and end.

    Returns
    -------
    Summary

    Raises
    ------
    DivergedError
        If the loss or a gradient is not finite, and the run is not to skip such updates, or has skipped too many.
    StoreError
        If a checkpoint or the log cannot be written.
    """
    config = run.config
    first, saves = run.progress.step, Saves(run.manager)
    reason = _ended(run)
    while reason is None:
        with _timed(run), _proved(run, listener):
            record = take_step(run)
        if config.schedule.name == "range":
            _test_range(run, listener, record)
        step = run.progress.step
        last = _ended(run) is not None
        if last or _due(config.log.every, step):
            _tell(run, listener, "train", record | run.speed.lap() | {"peak_memory_bytes": peak_memory(run.device)})
        metrics = _evaluate(run, listener) if last or _due(config.eval.every, step) else {}
        if _due(config.sample.every, step):
            _sample(run, listener)
        reason = _ended(run) or ("stopped" if run.world.any(stop()) else None)
        is_best = bool(metrics) and run.progress.waited == 0 and config.checkpoint.keep_best > 0
        if reason or is_best or _due(config.checkpoint.every, step):
            _save(run, saves, metrics)
        _tell_saved(run, listener, saves)
    with run.clock.spent_on("checkpoint"):
        run.manager.wait()
    _tell_saved(run, listener, saves)
    return _summary(run, reason, steps=run.progress.step - first)


def take_step(run: Run) -> dict[str, float]:
    """Make one update of the weights: gradients of some batches, clipped, applied.

    Returns
    -------
    dict of str to float
        The mean loss of the batches, the norm of the gradient before clipping, and the learning rate of AdamW.
    """
    settings, operations = run.config.loop, run.operations
    run.progress.step += 1
    rate = share(run.config.schedule, run.progress.step, settings.steps) * run.plateau.share
    set_learning_rate(run.optimizers, rate)
    total = torch.zeros((), device=run.device)
    before = run.batches.state_dict()["position"]
    batches = [next(run.batches) for _ in range(settings.accumulate)]
    run.drawn = range(before, run.batches.state_dict()["position"])
    counts = [int((targets != IGNORED).sum()) for _, targets in batches]
    for (inputs, targets), count in zip(batches, counts, strict=True):
        if count:
            # So that each target counts for as much as any other of the step, in whichever batch it is.
            loss = operations.loss(inputs.to(run.device), targets.to(run.device)) / (sum(counts) / count)
            operations.backward(loss)
            total += loss.detach()
    run.progress.tokens += sum(counts) * run.replicas
    total = run.world.mean(total)
    norm = operations.clip()
    if operations.accepts(total, norm):
        operations.update()
        run.average.update(run.progress.step)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
    return {"loss": total.item(), "gradient_norm": norm.item(), "learning_rate": rate * run.config.optim.lr}


@contextmanager
def _proved(run: Run, listener: Listener) -> Iterator[None]:
    """Watch techniques at work in the first steps of a process, and tell what was seen."""
    proofs = run.techniques.proofs
    known = len(proofs)
    with run.techniques.verified(run):
        yield
    for name, proof in islice(proofs.items(), known, None):
        _tell(run, listener, "technique", {"name": name, "seen": proof.seen, **proof.figures})


@contextmanager
def _timed(run: Run) -> Iterator[None]:
    """Time a step. The first one of a process loads and compiles, and is not counted as training."""
    first = "first step" not in run.clock.seconds
    before, tokens = run.clock.seconds.get("train", 0.0), run.progress.tokens
    with run.clock.spent_on("first step" if first else "train"):
        yield
    if not first:
        trained = run.progress.tokens - tokens
        # By the length that was trained: attention to less takes less.
        flops = trained * run.config.model.flops_per_token(run.batches.context_length)
        run.speed.add(trained, flops, run.clock.seconds["train"] - before)


def _test_range(run: Run, listener: Listener, record: dict[str, float]) -> None:
    """Let the range test see a step; after the last one, tell what it found."""
    test = run.progress.range_test
    test.add(record["learning_rate"], record["loss"], steps=run.config.loop.steps)
    if _ended(run):
        _tell(run, listener, "suggestion", {"learning_rate": test.suggestion(), "lowest_loss": test.lowest})


def _ended(run: Run) -> str | None:
    """Return why there is no further step to do, if so."""
    progress, patience = run.progress, run.config.eval.patience
    if progress.range_test.over or (patience is not None and progress.waited >= patience):
        return "early stop"
    return "done" if progress.step >= run.config.loop.steps else None


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _tell(run: Run, listener: Listener, kind: str, values: dict[str, Any], *, step: int | None = None) -> None:
    if run.world.leads:
        step = run.progress.step if step is None else step
        run.log.write(step, kind, **values)
        listener.happened(step, kind, values)


def _evaluate(run: Run, listener: Listener) -> dict[str, float]:
    config, progress = run.config, run.progress
    length, rows = config.model.context_length, evaluated_at_once(config.model)
    batches = windows(run.dataset.validation, length, batch_size=rows, most=config.eval.batches)
    with run.clock.spent_on("evaluate"), run.average.in_place():
        loss = run.world.of_first(evaluate(run.model, batches))
    run.plateau.evaluated(loss)
    progress.loss = loss
    better = loss < progress.best
    progress.best, progress.waited = (loss, 0) if better else (progress.best, progress.waited + 1)
    _tell(run, listener, "evaluate", {METRIC: loss, "best": progress.best})
    return {METRIC: loss}


def _sample(run: Run, listener: Listener) -> None:
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
    _tell(run, listener, "sample", {"text": tokenizer.decode(ids.tolist())})


def _save(run: Run, saves: Saves, metrics: dict[str, float]) -> None:
    with run.clock.spent_on("checkpoint"):
        state = run.world.collect(run.state())
        if run.world.leads:
            saves.begin(run.progress.step, state, metrics)


def _tell_saved(run: Run, listener: Listener, saves: Saves) -> None:
    """Tell of the checkpoints that are durable by now."""
    for step, report in saves.ended():
        values = {
            "path": report.path,
            "stall_seconds": report.stall_seconds,
            "durable_seconds": report.durable_seconds,
            "new_bytes": report.new_bytes,
        }
        _tell(run, listener, "save", values, step=step)


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
    )
