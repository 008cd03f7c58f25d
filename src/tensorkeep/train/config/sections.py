"""The sections of a run's configuration: what can be set, and within which bounds."""

from __future__ import annotations

from typing import Literal

import msgspec

from tensorkeep.errors import UsageError
from tensorkeep.train.config.bounds import check_bounds


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings."""


class DataConfig(Section, frozen=True):
    """What is trained on.

    Attributes
    ----------
    source : str
        A prepared folder, or whatever ``tensorkeep data prepare`` takes.
    tokenizer, vocab_size, validation : str, int, float
        How a source that is not prepared yet is prepared; otherwise how it was. The size is for ``"bpe"`` only.
    order : str
        ``"shuffled"``: every window of an epoch once; ``"random"``: windows at random places.
    """

    source: str = "stdlib"
    tokenizer: str = "char"
    vocab_size: int | None = None
    validation: float = 0.1
    order: Literal["shuffled", "random"] = "shuffled"

    def __post_init__(self) -> None:
        check_bounds("data.validation", self.validation, above=0, below=1)


class OptimConfig(Section, frozen=True):
    """How weights are updated; see `tensorkeep.train.optim.optimizers`.

    Attributes
    ----------
    name : str
        ``"adamw"``, or ``"muon"`` for the matrices of the blocks and AdamW for the rest.
    lr : float
        The peak learning rate of AdamW.
    muon_lr, muon_momentum : float
        Muon's.
    muon_steps : int
        Newton-Schulz steps, by which Muon makes an update orthogonal: fewer take less time, and come less close.
    weight_decay : float
        Of matrices; vectors have none.
    beta1, beta2, eps : float
        AdamW's.
    clip : float
        The largest norm of the gradient; a longer one is scaled down. 0 for no limit.
    implementation : str
        Which of torch's AdamW: ``"default"``, ``"foreach"`` or ``"fused"``.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-3
    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    muon_steps: int = 5
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    implementation: Literal["default", "foreach", "fused"] = "default"

    def __post_init__(self) -> None:
        for name in ("lr", "muon_lr", "eps"):
            check_bounds(f"optim.{name}", getattr(self, name), above=0)
        for name in ("beta1", "beta2", "muon_momentum"):
            check_bounds(f"optim.{name}", getattr(self, name), least=0, below=1)
        for name in ("weight_decay", "clip"):
            check_bounds(f"optim.{name}", getattr(self, name), least=0)
        # torch takes no more.
        check_bounds("optim.muon_steps", self.muon_steps, least=1, most=99)


class ScheduleConfig(Section, frozen=True):
    """How the learning rate changes; see `tensorkeep.train.optim.schedules`.

    Attributes
    ----------
    name : str
        ``"cosine"``, ``"linear"``, ``"wsd"`` (warm-up, stable, decay), ``"constant"``, ``"plateau"``, or ``"range"``, a
        test that rises from ``final`` to the peak, ends early when the loss runs away, and suggests a tenth of the rate
        at which the smoothed loss was lowest.
    warmup_steps : int
        Steps in which it rises from 0.
    final : float
        What is left of it in the last step, as a share of the peak; for ``"range"`` the share in the first.
    decay : float
        ``"wsd"``: the share of the steps in which it decays.
    patience, factor : int, float
        ``"plateau"``: after so many evaluations without a better loss it is multiplied by the factor.
    """

    name: Literal["cosine", "linear", "wsd", "constant", "plateau", "range"] = "cosine"
    warmup_steps: int = 0
    final: float = 0.1
    decay: float = 0.2
    patience: int = 3
    factor: float = 0.5

    def __post_init__(self) -> None:
        check_bounds("schedule.warmup_steps", self.warmup_steps, least=0)
        check_bounds("schedule.final", self.final, least=0, most=1)
        check_bounds("schedule.decay", self.decay, above=0, most=1)
        check_bounds("schedule.patience", self.patience, least=1)
        check_bounds("schedule.factor", self.factor, above=0, below=1)
        if self.name == "range":
            self._check_range()

    def _check_range(self) -> None:
        if not self.final:
            raise UsageError("schedule.final is 0", remedy="a range test begins above 0: give 0.001, for example")
        if self.warmup_steps:
            raise UsageError(
                f"schedule.warmup_steps is {self.warmup_steps}, and a range test rises by itself",
                remedy="give schedule.warmup_steps 0",
            )


class LoopConfig(Section, frozen=True):
    """How long, on what, and how much at a time.

    Attributes
    ----------
    steps : int
        Updates of the weights.
    batch_size : int
        Sequences that are computed at once, by all processes together.
    accumulate : int
        Batches whose gradients make one step.
    seed : int
        Of the initial weights, the order of the data, and dropout.
    device : str
        ``"auto"``: the GPU where there is one, else the CPU.
    threads : int, optional
        CPU threads of torch; its own choice by default.
    on_divergence : str
        ``"stop"`` at a loss or gradient that is not finite, or ``"skip"`` that update.
    """

    steps: int = 1000
    batch_size: int = 12
    accumulate: int = 1
    seed: int = 1337
    device: str = "auto"
    threads: int | None = None
    on_divergence: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate"):
            check_bounds(f"loop.{name}", getattr(self, name), least=1)
        check_bounds("loop.seed", self.seed, least=0, below=2**63)
        if self.threads is not None:
            check_bounds("loop.threads", self.threads, least=1, most=1024)


class EvalConfig(Section, frozen=True):
    """When and on what the validation loss is measured.

    Attributes
    ----------
    every : int
        Steps from one evaluation to the next; 0 for one at the end only.
    batches : int, optional
        Evaluate on so many batches of up to 16,384 tokens, always the same, spread evenly over the validation split; by
        default on all of it.
    patience : int, optional
        Stop early after so many evaluations without a better loss.
    """

    every: int = 250
    batches: int | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        check_bounds("eval.every", self.every, least=0)
        for name in ("batches", "patience"):
            if getattr(self, name) is not None:
                check_bounds(f"eval.{name}", getattr(self, name), least=1)


class SampleConfig(Section, frozen=True):
    """Text that is generated while training: never with ``every=0``, and a new document or line without a prompt."""

    every: int = 0
    prompt: str | None = None
    tokens: int = 200
    temperature: float = 0.8
    top_k: int | None = None

    def __post_init__(self) -> None:
        check_bounds("sample.every", self.every, least=0)
        check_bounds("sample.tokens", self.tokens, least=1, most=1_000_000)
        check_bounds("sample.temperature", self.temperature, least=0)
        if self.top_k is not None:
            check_bounds("sample.top_k", self.top_k, least=1)


class CheckpointConfig(Section, frozen=True):
    """When and how the run is saved; see `tensorkeep.CheckpointManager`.

    The last step is always saved, and so is, unless ``keep_best`` is 0, every step with a new best validation loss.
    """

    every: int = 250
    keep_last: int = 2
    keep_best: int = 1
    compression: str | None = None
    incremental: bool | Literal["delta"] = True
    asynchronous: bool = True
    memory_budget: int | str | None = None

    def __post_init__(self) -> None:
        check_bounds("checkpoint.every", self.every, least=0)
        check_bounds("checkpoint.keep_last", self.keep_last, least=1)
        check_bounds("checkpoint.keep_best", self.keep_best, least=0)


class AverageConfig(Section, frozen=True):
    """An exponential moving average of the weights, which is evaluated and saved beside them; ``decay=0`` for none."""

    decay: float = 0.0

    def __post_init__(self) -> None:
        check_bounds("ema.decay", self.decay, least=0, below=1)


class LogConfig(Section, frozen=True):
    """How often a line is written to ``log.jsonl``, and whether TensorBoard gets it, too."""

    every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_bounds("log.every", self.every, least=1)
