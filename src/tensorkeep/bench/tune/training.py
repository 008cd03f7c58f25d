"""Tuning training: the cheapest techniques that are predicted to fit into some memory, and a trial of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tensorkeep.bench.training.cell import MEMORY
from tensorkeep.bench.tune.batch_trial import Trial, Try, fits, largest_batch
from tensorkeep.bench.tune.memory_choices import Choice, choices
from tensorkeep.machine import resident_bytes
from tensorkeep.train.config.config import Config
from tensorkeep.train.memory.ledger import predict
from tensorkeep.train.run.device import chosen_device
from tensorkeep.train.techniques.requirements import Machine
from tensorkeep.train.techniques.stack import Stack

_MOST_TRIALS = 5
_CLEARLY_LESS = 0.9
_LOADED = 1 << 30
"""What a process may hold for a while in its first step, which loads and compiles, and is no part of training."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was found.

    Attributes
    ----------
    memory : int
        What training may take.
    before : Choice
        The configuration as it was given.
    chosen : Choice
        What fits at the least cost; what takes the least memory, where nothing is predicted to fit.
    predicted_to_fit : bool
    measured : int or None
        The most bytes that were seen in the trial; None without one, or where it was ended beyond the limit.
    tried : bool
        Whether there was one.
    trials : list of (int, bool, str)
        See `tensorkeep.bench.tune.batch_trial.Found`.
    """

    memory: int
    before: Choice
    chosen: Choice
    predicted_to_fit: bool
    measured: int | None = None
    tried: bool = False
    trials: list[tuple[int, bool, str]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether it was seen to fit, or without a trial is predicted to."""
        if not self.tried:
            return self.predicted_to_fit
        return self.measured is not None and self.measured <= self.memory

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "memory": self.memory,
            "before": self.before.ledger.as_dict(),
            "chosen": {
                "settings": dict(self.chosen.settings()),
                "expected_cost": self.chosen.cost,
                "predicted": self.chosen.ledger.as_dict(),
            },
            "fits": self.fits,
            "measured_peak": self.measured,
            "trials": [{"batch_size": size, "fits": fit, "reason": said} for size, fit, said in self.trials],
        }


def tune(config: Config, data: Path, memory: int, *, trying: bool = True, largest: bool = False) -> Tuned:
    """Choose techniques and a batch size.

    Parameters
    ----------
    config : Config
        ``model.vocab_size`` is that of the data.
    data : Path
        Prepared.
    memory : int
        Bytes that training may take: on CUDA of tensors, on the CPU of the process, beyond what it needs in any case.
    trying : bool
        Whether to train what is chosen for some steps.
    largest : bool
        Whether to find the largest batch that fits, by trying.

    Raises
    ------
    UsageError
        If a trial fails for another reason than memory, or techniques cannot be on together.
    UnsupportedError
        If a technique is not known, or this machine lacks what it needs.
    """
    device = chosen_device(config.loop.device)
    Stack.of(config.techniques).check(Machine(device))
    found = list(choices(config))
    before = next(each for each in found if not each.added and each.config.loop == config.loop)
    fitting = [each for each in found if each.ledger.peak <= memory]
    if not fitting:
        least = min(found, key=lambda each: each.ledger.peak)
        return Tuned(memory, before, least, predicted_to_fit=False)
    tuned = Tuned(memory, before, fitting[0], predicted_to_fit=True)
    if not trying:
        return tuned
    trial = Trial(data, memory, 0 if device.type == "cuda" else resident_bytes() + _LOADED)
    tuned = _tried(tuned, fitting, trial)
    if not (largest and tuned.fits):
        return tuned
    best = largest_batch(tuned.chosen.config, memory, trial)
    if best.config is None:
        return tuned
    chosen = replace(tuned.chosen, config=best.config, ledger=predict(best.config, device=device.type))
    return replace(tuned, chosen=chosen, measured=best.peak, trials=best.trials)


def _tried(tuned: Tuned, fitting: Sequence[Choice], trial: Try) -> Tuned:
    """Return the first choice that is seen to fit; else the last one that was tried."""
    limit = tuned.memory
    for _ in range(_MOST_TRIALS):
        choice = next((each for each in fitting if each.ledger.peak <= limit), None)
        if choice is None:
            break
        result = trial(choice.config)
        fitted = fits(result, tuned.memory)
        peak = int(result.figures[MEMORY]) if MEMORY in result.figures else None
        tuned = replace(tuned, chosen=choice, measured=peak, tried=True)
        if fitted:
            break
        # What was predicted to take nearly as much will not fit either.
        limit = round(choice.ledger.peak * _CLEARLY_LESS)
    return tuned
