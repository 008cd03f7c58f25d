"""The training loop: steps, and what is due after a step. Read this file first.

`chatgot.run.setup.open_run` builds an `OpenRun` from a configuration, a folder and data::

    with open_run(config, RunFolder("runs/mine"), Dataset.open("data")) as run:
        summary = train(run, listener)

`chatgot.step.train_step.train_step` is one step. Techniques change a step: they replace the functions of
`chatgot.step.state.Operations`.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from chatgot.data.tokenizers.base import prompt_ids
from chatgot.generate import generate
from chatgot.memory import activations_of, evaluation_rows
from chatgot.run.folder import METRIC
from chatgot.run.monitor import profiled, settle, timed_step
from chatgot.run.state import OpenRun
from chatgot.step.device import peak_memory
from chatgot.step.train_step import StepResult, evaluate, train_step
from tensorkeep import PendingSave


class EventListener(Protocol):
    """Receives the events of a run as they happen, on rank 0."""

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Receive one event of a step; the values are its figures, as in ``log.jsonl``.

        The kind is ``"train"``, ``"evaluate"``, ``"sample"``, ``"technique"`` (a technique was verified to be active),
        ``"save"`` (a checkpoint is durable, perhaps some steps after the step that it holds), ``"suggestion"`` (the
        result of a range test), or ``"profile"`` (a profile was written).
        """


class Silent:
    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """How a run ended."""

    step: int
    # Steps done by this call; 0 if the run had ended before.
    steps: int
    # ``"done"``, ``"early stop"``, or ``"stopped"`` on request.
    reason: str
    # The last validation loss and the best one, in nats per token.
    loss: float
    best: float
    # Of training alone; NaN if no step was timed. The same holds for MFU.
    tokens_per_second: float
    mfu: float
    peak_memory_bytes: int
    # The result of a range test.
    suggested_learning_rate: float | None
    # The time spent, by activity.
    seconds: dict[str, float]
    # MFU against the peak in the data sheet of the GPU, if that is known.
    mfu_of_data_sheet: float | None = None
    # Whether training was faster than the measured peak, which other work had slowed down: MFU is at most ``mfu`` then.
    outran_peak: bool = False


def train(
    run: OpenRun, listener: EventListener, *, stop: Callable[[], bool] = lambda: False, profile: int = 0
) -> TrainingSummary:
    """Train until the last step or an early end, save, and wait until the last checkpoint is durable.

    Parameters
    ----------
    run : OpenRun
    listener : EventListener
    stop : callable
        Called after each step; when it returns true, the run is saved and ends.
    profile : int
        Profile this many steps, from the fourth on, and write a Chrome trace into the run's folder.

    Returns
    -------
    TrainingSummary

    Raises
    ------
    DivergedError
        If the loss or a gradient is not finite, and the run does not skip such updates or has skipped too many.
    StoreError
        If a checkpoint or the log cannot be written.
    TechniqueNotActiveError
        If a technique is on and has no effect.
    """
    return _Loop(run, listener, stop).train(profile)


def validation_loss(run: OpenRun) -> float:
    """Return the validation loss, of averaged weights if the run averages them; a collective, equal on all ranks."""
    activations = activations_of(
        run.config.model,
        rows=max(1, run.config.loop.batch_size // run.micro_batches),
        on_cuda=run.device.type == "cuda",
        effects=run.techniques.memory_effects(),
    )
    # In the precision of the run, and by compiled code if the loss is compiled, like the losses of training.
    batches = run.validation.batches(evaluation_rows(activations), part=run.replica, parts=run.replicas)
    with run.average.in_place():
        loss = evaluate(run.model, batches, loss=run.operations.evaluate, world=run.world)
    # Sums on different ranks may differ in the last bits, and early stopping depends on this loss.
    return run.world.broadcast(loss)


class _Loop:
    def __init__(self, run: OpenRun, listener: EventListener, stop: Callable[[], bool]) -> None:
        self.run, self.progress, self.config = run, run.progress, run.config
        self.listener = listener
        self.stop = stop
        self.saves: deque[tuple[int, PendingSave]] = deque()
        # Proofs of techniques that have been reported.
        self.proofs = len(run.techniques.proofs)

    def train(self, profile: int) -> TrainingSummary:
        run, first, reason = self.run, self.progress.step, self.end_reason()

        def written(path: Path, steps: int) -> None:
            self.report("profile", {"path": str(path), "steps": steps})

        # The profiler counts steps by calls of `profile_next_step`: every step makes one, profiled or not.
        with profiled(run, profile, written) as profile_next_step:
            while reason is None:
                with timed_step(run), run.techniques.verified(run):
                    result = train_step(run)
                self.report_proofs()
                reason = self.follow_up(result)
                profile_next_step()
        # A run has ended when its last checkpoint is durable.
        with run.clock.spent_on("checkpoint"):
            run.manager.wait()
        self.report_saves()
        return self.summary(reason, steps=self.progress.step - first)

    def follow_up(self, result: StepResult) -> str | None:
        """Do what is due after a step; return the reason to end, if there is one."""
        config, step = self.config, self.progress.step
        # Before `end_reason`: this step may end the range test.
        if config.schedule.name == "range":
            self.update_range_test(result.read())
        last = self.end_reason() is not None
        if last or _due(config.log.every, step):
            self.report_step(result)
        metrics = self.evaluate() if last or _due(config.eval.every, step) else {}
        if _due(config.sample.every, step):
            self.sample()
        # A collective: all ranks stop after the same step, whichever received the signal.
        reason = self.end_reason() or ("stopped" if self.run.world.any(self.stop()) else None)
        # `evaluate` sets `waited` to 0 if the loss is the best so far.
        is_best = bool(metrics) and self.progress.waited == 0 and config.checkpoint.keep_best > 0
        if reason or is_best or _due(config.checkpoint.every, step):
            self.save(metrics)
        self.report_saves()
        return reason

    def end_reason(self) -> str | None:
        progress, patience = self.progress, self.config.eval.patience
        if progress.range_test.over or (patience is not None and progress.waited >= patience):
            return "early stop"
        return "done" if progress.step >= self.config.loop.steps else None

    def report(self, kind: str, values: dict[str, Any], *, step: int | None = None) -> None:
        if self.run.world.is_main:
            step = self.progress.step if step is None else step
            self.run.log.write(step, kind, **values)
            self.listener.on_event(step, kind, values)

    def report_step(self, result: StepResult) -> None:
        run = self.run
        # First: a step that has diverged raises here, and its figures are not logged.
        settle(run)
        others: dict[str, Any] = {"peak_memory_bytes": peak_memory(run.device)}
        if run.gradient_norms:
            others["gradient_norms"] = run.gradient_norms
        rates = run.speed.lap()
        if rates and run.speed.outran:
            others["outran_peak"] = True
        self.report("train", result.read() | rates | others)

    def report_proofs(self) -> None:
        # Techniques add their proofs in order, so the new ones are the last.
        for name, proof in islice(self.run.techniques.proofs.items(), self.proofs, None):
            self.report("technique", {"name": name, "seen": proof.summary, **proof.figures})
        self.proofs = len(self.run.techniques.proofs)

    def update_range_test(self, figures: dict[str, float]) -> None:
        test = self.progress.range_test
        steps = self.config.loop.steps - self.config.schedule.start
        test.add(figures["learning_rate"], figures["loss"], steps=steps)
        if self.end_reason():
            found = {"learning_rate": test.suggestion(), "lowest_loss": test.lowest, "diverged": test.over}
            self.report("suggestion", found)

    def evaluate(self) -> dict[str, float]:
        run, progress = self.run, self.progress
        # Weights that have diverged end the run here, and are not evaluated.
        settle(run)
        with run.clock.spent_on("evaluate"):
            loss = validation_loss(run)
        if progress.evaluated != run.validation.targets:
            # A resume has changed the windows. The best loss on other windows would end the run, or lower its rate.
            progress.best, progress.waited = math.inf, 0
            run.plateau.forget_losses()
        run.plateau.add(loss)
        progress.loss, progress.evaluated = loss, run.validation.targets
        better = loss < progress.best
        progress.best, progress.waited = (loss, 0) if better else (progress.best, progress.waited + 1)
        self.report("evaluate", {METRIC: loss, "best": progress.best, "tokens": run.validation.targets})
        return {METRIC: loss}

    def sample(self) -> None:
        run, config, tokenizer = self.run, self.config.sample, self.run.dataset.tokenizer
        settle(run)
        with run.clock.spent_on("sample"), run.average.in_place():
            ids = generate(
                run.model,
                prompt_ids(tokenizer, config.prompt),
                max_new_tokens=config.tokens,
                temperature=config.temperature,
                top_k=config.top_k,
                # Another seed at each sample, and the same one if a resumed run repeats the step.
                seed=self.config.loop.seed + self.progress.step,
                stop=tokenizer.end_of_document,
                vocab_size=tokenizer.vocab_size,
            )
        text = [id for id in ids.tolist() if id != tokenizer.begin_of_document]
        self.report("sample", {"text": tokenizer.decode(text)})

    def save(self, metrics: dict[str, float]) -> None:
        """Begin to save a checkpoint of the step. `report_saves` reports it once it is durable."""
        run, step = self.run, self.progress.step
        # Steps are checked first, so that no checkpoint has weights that are not finite.
        settle(run)
        with run.clock.spent_on("checkpoint"):
            # A resumed run repeats the steps after its last undamaged checkpoint, and replaces damaged ones.
            self.saves.append((step, run.manager.save(step, run.state(), metrics, overwrite=True)))

    def report_saves(self) -> None:
        # From the oldest on, so that the log has the saves in the order of their steps.
        while self.saves and self.saves[0][1].done():
            step, pending = self.saves.popleft()
            report = pending.wait()
            values = {
                "path": report.path,
                "stall_seconds": report.stall_seconds,
                "durable_seconds": report.durable_seconds,
                "new_bytes": report.new_bytes,
            }
            self.report("save", values, step=step)

    def summary(self, reason: str, *, steps: int) -> TrainingSummary:
        run, progress, rates = self.run, self.progress, self.run.speed.total()
        return TrainingSummary(
            step=progress.step,
            steps=steps,
            reason=reason,
            loss=progress.loss,
            best=progress.best,
            tokens_per_second=rates.get("tokens_per_second", math.nan),
            mfu=rates.get("mfu", math.nan),
            peak_memory_bytes=peak_memory(run.device),
            suggested_learning_rate=progress.range_test.suggestion(),
            seconds=dict(run.clock.seconds),
            mfu_of_data_sheet=rates.get("mfu_of_data_sheet"),
            outran_peak=run.speed.outran,
        )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
