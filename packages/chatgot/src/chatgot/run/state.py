"""An open run as the loop sees it: its folder, checkpoints and log, and how its time and speed are measured."""

import random
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from chatgot.data.batches import EvaluationWindows
from chatgot.run.folder import RunFolder
from chatgot.run.log import TrainingLog
from chatgot.step.state import StepState, UncheckedStep
from chatgot.step.world import World
from chatgot.techniques.stack import Stack
from tensorkeep import CheckpointManager, RandomState
from tensorkeep.errors import DivergedError, TensorkeepError


class ActivityTimer:
    """Adds up seconds by activity: ``"train"``, ``"evaluate"``, ``"checkpoint"``, ``"sample"``, ``"first step"``."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.seconds: dict[str, float] = {}
        # Of the last block.
        self.last = 0.0

    @contextmanager
    def spent_on(self, activity: str) -> Iterator[None]:
        """Add the duration of the block to an activity. Blocks must not be nested."""
        begin = self._now()
        try:
            yield
        finally:
            self.last = self._now() - begin
            self.seconds[activity] = self.seconds.get(activity, 0.0) + self.last


class Speedometer:
    # MFU (model FLOP utilisation; Chowdhery et al., arXiv 2204.02311) is the FLOP/s of the model as a fraction of
    # `peak`, the fastest rate that the machine reaches.

    def __init__(self, peak: float, data_sheet: float | None = None) -> None:
        self.peak = peak
        # Whether training was faster than the peak that was measured: other work slowed the measurement down.
        self.outran = False
        self.data_sheet = data_sheet
        self.tokens = 0
        self.flops = 0
        self.seconds = 0.0
        self._lap_start = (0, 0, 0.0)

    def add(self, tokens: int, flops: int, seconds: float) -> None:
        self.tokens += tokens
        self.flops += flops
        self.seconds += seconds

    def lap(self) -> dict[str, float]:
        """Return ``tokens_per_second`` and ``mfu`` since the last lap; an empty dict if no step was counted."""
        now = (self.tokens, self.flops, self.seconds)
        tokens, flops, seconds = (after - before for after, before in zip(now, self._lap_start, strict=True))
        self._lap_start = now
        return self._rates(int(tokens), int(flops), seconds)

    def total(self) -> dict[str, float]:
        return self._rates(self.tokens, self.flops, self.seconds)

    def _rates(self, tokens: int, flops: int, seconds: float) -> dict[str, float]:
        if not seconds:
            return {}
        if flops / seconds > self.peak:
            # The true peak is not known; it is at least the rate reached in training, so that MFU is at most this.
            self.peak, self.outran = flops / seconds, True
        rates = {"tokens_per_second": tokens / seconds, "mfu": flops / seconds / self.peak}
        # On a known card: the figure that other trainers report.
        if self.data_sheet is not None:
            rates["mfu_of_data_sheet"] = flops / seconds / self.data_sheet
        return rates


class SlowdownDetector:
    """Notices when training has become five times slower: it compares a window with the median of all before."""

    STEPS = 10
    SECONDS = 5.0
    # Windows that must have passed before one can be slow.
    LEAST_BEFORE = 3
    RATIO = 5.0

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._steps = 0
        self._flops = 0
        self._seconds = 0.0
        self._reported = False

    def add(self, flops: int, seconds: float, *, steps: int = 1) -> float | None:
        """Add a step, or with 0 steps the time that a GPU still took for earlier ones; return the slowdown, once."""
        self._steps, self._flops, self._seconds = self._steps + steps, self._flops + flops, self._seconds + seconds
        if self._reported or self._steps < self.STEPS or self._seconds < self.SECONDS:
            return None
        # In FLOP/s, because techniques may change the length of sequences.
        rate = self._flops / self._seconds
        # The median: a few slow windows must not lower what is expected.
        earlier = statistics.median(self._rates) if len(self._rates) >= self.LEAST_BEFORE else 0.0
        self._rates.append(rate)
        self._steps, self._flops, self._seconds = 0, 0, 0.0
        self._reported = rate * self.RATIO <= earlier
        return earlier / rate if self._reported else None


@dataclass(kw_only=True)
class OpenRun(StepState):
    """A run of training, ready for its next step; see `chatgot.run.setup.open_run`."""

    folder: RunFolder
    manager: CheckpointManager
    log: TrainingLog
    # What the validation loss is computed on.
    validation: EvaluationWindows
    techniques: Stack
    speed: Speedometer = field(init=False)
    clock: ActivityTimer = field(default_factory=ActivityTimer)
    slowdown: SlowdownDetector = field(default_factory=SlowdownDetector)
    # Warnings for the user, known when the run was opened.
    notes: tuple[str, ...] = ()
    # The norms of the gradient by layer in the last step, if it is to be logged.
    gradient_norms: dict[str, float] = field(default_factory=dict, init=False)

    def state(self) -> dict[str, Any]:
        own = {
            "model": self.model,
            "average": self.average.state_dict(),
            "optimizers": dict(self.optimizers),
            "plateau": self.plateau,
            "batches": self.batches,
            "progress": self.progress,
            "techniques": self.techniques,
            "rng": RunRandomState(self.world),
        }
        return own | {name: part() for name, part in self.in_checkpoint.items()}

    def diverged(self, step: UncheckedStep, figures: str, *, skipped: int = 0) -> DivergedError:
        """Return the error that stops the run; its remedy names the checkpoint to resume from."""
        # A save that is not finished may be the one to resume from.
        unsaved: TensorkeepError | None = None
        try:
            self.manager.wait()
        except TensorkeepError as error:
            unsaved = error
        if skipped:
            steps = [each.number for each in self.manager.steps()]
            first = step.number - skipped + 1
            message = f"{figures}, and {skipped} updates in a row, since step {first}, were skipped"
            remedy = "start a new run with a lower learning rate (--optim.lr)"
            if steps:
                command = f"tensorkeep train --out {shlex.quote(str(self.folder.path))} --resume"
                remedy += f"; or fix the cause and resume from step {steps[-1]}{_relation(steps, first)}: {command}"
        else:
            message = f"{figures}, on batches {step.drawn.start} to {step.drawn.stop - 1} of the data"
            last = self.manager.latest()
            begin = f"resume from step {last.number}" if last else "start again from the beginning"
            remedy = f"{begin} with --resume --loop.on_divergence skip, or start a new run with a lower learning rate"
        diverged = DivergedError(f"step {step.number}: {message}", path=self.folder.path, remedy=remedy)
        if unsaved is not None:
            diverged.add_note(f"a checkpoint was not saved: {unsaved}")
        return diverged


def _relation(steps: list[int], first_skipped: int) -> str:
    before = [number for number in steps if number < first_skipped]
    if steps[-1] < first_skipped:
        return ", the last checkpoint before them"
    earlier = f"; the last checkpoint before them is step {before[-1]}" if before else ""
    return f", saved while updates were skipped, with the same weights as before them{earlier}"


def seed_random_states(seed: int) -> None:
    """Seed the global random states of Python, numpy and torch: equal runs have equal checkpoints in any process."""
    random.seed(seed)
    # numpy takes seeds of 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class RunRandomState(RandomState):
    """The random states of rank 0, and under ``"others"`` the states of torch on the other ranks."""

    def __init__(self, world: World) -> None:
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        own = super().state_dict()
        if self._world.is_main:
            return own
        return {"others": {str(self._world.rank): {"torch": own["torch"], "cuda": own.get("cuda", [])}}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        super().check_state_dict(_for_these_gpus(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        others = state.get("others", {})
        if self._world.is_main:
            super().load_state_dict(_for_these_gpus(state))
        # On another number of ranks, rank 0 alone restores its states.
        elif len(others) + 1 == self._world.size:
            super().load_state_dict(_for_these_gpus({**state, **others[str(self._world.rank)]}))


def _for_these_gpus(state: Mapping[str, Any]) -> dict[str, Any]:
    # The states of GPUs can only be restored on as many GPUs.
    fits = len(state.get("cuda", ())) == torch.cuda.device_count()
    return {name: each for name, each in state.items() if name != "cuda" or fits}
