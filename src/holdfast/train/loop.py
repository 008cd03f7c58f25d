"""The training loop. `take_step` is the step; `train` is what goes on around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from holdfast.train.data.batches import windows
from holdfast.train.evaluate import evaluate
from holdfast.train.generate import generate, prompt_ids
from holdfast.train.guard import check_finite
from holdfast.train.optimizers import set_learning_rate
from holdfast.train.run import METRIC, Run
from holdfast.train.schedules import share

_EVALUATED_AT_ONCE = 16384
_LOGITS_AT_ONCE = 2**26


class Listener(Protocol):
    """Is told what happens in a run."""

    def happened(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Learn of a step (``"train"``), an evaluation (``"evaluate"``), a sample or a save."""


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended.

    Attributes
    ----------
    step : int
        The last step that was done.
    reason : str
        ``"done"``, ``"early stop"`` or ``"stopped"``, for a signal.
    loss, best : float
        The last validation loss and the best one.
    tokens_per_second, mfu : float
        Of training alone; NaN if no step was timed.
    seconds : dict of str to float
        What the time was spent on.
    """

    step: int
    reason: str
    loss: float
    best: float
    tokens_per_second: float
    mfu: float
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
        If the loss or a gradient is not finite, and the run is not to skip such updates.
    StoreError
        If a checkpoint or the log cannot be written.
    """
    config = run.config
    reason = "early stop" if _waited_enough(run) else "done"
    last = reason == "early stop" or run.progress.step >= config.loop.steps
    while not last:
        with _timed(run):
            record = take_step(run)
        step = run.progress.step
        last = step == config.loop.steps
        if last or step % config.log.every == 0:
            _tell(run, listener, "train", record | run.speed.lap())
        metrics: dict[str, float] = {}
        if last or _due(config.eval.every, step):
            metrics[METRIC] = _evaluate(run, listener)
            if _waited_enough(run):
                reason, last = "early stop", True
        if _due(config.sample.every, step):
            _sample(run, listener)
        if not last and stop():
            reason, last = "stopped", True
        if last or _due(config.checkpoint.every, step):
            _save(run, listener, metrics)
    with run.clock.spent_on("checkpoint"):
        run.manager.wait()
    return _summary(run, reason)


def take_step(run: Run) -> dict[str, float]:
    """Make one update of the weights: gradients of some batches, clipped, applied.

    Returns
    -------
    dict of str to float
        The mean loss of the batches, the norm of the gradient before clipping, and the learning rate of AdamW.
    """
    settings, model = run.config.loop, run.model
    run.progress.step += 1
    rate = share(run.config.schedule, run.progress.step, settings.steps) * run.plateau.share
    set_learning_rate(run.optimizers, rate)
    total = torch.zeros((), device=run.device)
    for _ in range(settings.accumulate):
        inputs, targets = next(run.batches)
        loss = model.loss(inputs.to(run.device), targets.to(run.device)) / settings.accumulate
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    norm = _clip(model, run.config.optim.clip)
    if check_finite(run, total, norm):
        for optimizer in run.optimizers.values():
            optimizer.step()
        run.average.update(run.progress.step)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad()
    return {"loss": total.item(), "gradient_norm": norm.item(), "learning_rate": rate * run.config.optim.lr}


def _clip(model: torch.nn.Module, most: float) -> torch.Tensor:
    """Scale the gradient down to a norm, unless that is 0; return the norm that it had."""
    parameters = list(model.parameters())
    if most:
        return torch.nn.utils.clip_grad_norm_(parameters, most)
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


@contextmanager
def _timed(run: Run) -> Iterator[None]:
    """Time a step. The first one of a process loads and compiles, and is not counted as training."""
    first = "first step" not in run.clock.seconds
    before = run.clock.seconds.get("train", 0.0)
    with run.clock.spent_on("first step" if first else "train"):
        yield
    if not first:
        settings, length = run.config.loop, run.config.model.context_length
        run.speed.add(settings.batch_size * settings.accumulate * length, run.clock.seconds["train"] - before)


def _waited_enough(run: Run) -> bool:
    patience = run.config.eval.patience
    return patience is not None and run.progress.waited >= patience


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _tell(run: Run, listener: Listener, kind: str, values: dict[str, Any]) -> None:
    run.log.write(run.progress.step, kind, **values)
    listener.happened(run.progress.step, kind, values)


def _evaluate(run: Run, listener: Listener) -> float:
    config, progress = run.config, run.progress
    length = config.model.context_length
    # As many tokens at once as leave the logits small, whatever the vocabulary.
    tokens = min(_EVALUATED_AT_ONCE, _LOGITS_AT_ONCE // config.model.vocab_size)
    batches = windows(run.dataset.validation, length, batch_size=max(1, tokens // length), most=config.eval.batches)
    with run.clock.spent_on("evaluate"), run.average.in_place():
        loss = evaluate(run.model, batches)
    run.plateau.evaluated(loss)
    progress.loss = loss
    better = loss < progress.best
    progress.best, progress.waited = (loss, 0) if better else (progress.best, progress.waited + 1)
    _tell(run, listener, "evaluate", {METRIC: loss, "best": progress.best})
    return loss


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


def _save(run: Run, listener: Listener, metrics: dict[str, float]) -> None:
    with run.clock.spent_on("checkpoint"):
        # A step that was damaged and passed over is done again.
        pending = run.manager.save(run.progress.step, run.state(), metrics, overwrite=True)
    _tell(run, listener, "save", {"path": pending.path})


def _summary(run: Run, reason: str) -> Summary:
    total = run.speed.total()
    return Summary(
        step=run.progress.step,
        reason=reason,
        loss=run.progress.loss,
        best=run.progress.best,
        tokens_per_second=total.get("tokens_per_second", math.nan),
        mfu=total.get("mfu", math.nan),
        seconds=dict(run.clock.seconds),
    )
