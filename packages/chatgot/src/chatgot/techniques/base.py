"""The contract of a training technique: one optimisation, as a switch that proves that it is really on.

A technique that was requested and is not active is an error, never a silent fallback.
"""

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch

from chatgot.config.config import Config, as_option, meanings
from chatgot.settings import Section
from chatgot.step.state import StepState
from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.ext import Registry

# What the file of a technique needs, in one import.
__all__ = ["REPORT", "Config", "Machine", "MemoryEffects", "Proof", "Section", "StepState", "Technique", "Verification"]

Kind = Literal["systems", "algorithmic"]
# What a technique changes. Techniques are applied in this order: each one sees the changes of the earlier ones.
Changed = Literal["process", "model", "loss", "optimizer", "processes", "data", "compilation"]

# The remedy of an error that should not happen.
REPORT = "report it, with the list of techniques that are on"


@dataclass(frozen=True)
class Machine:
    """What this machine has, for a run on a device.

    Examples
    --------
    >>> Machine(torch.device("cpu")).missing_cuda()
    'needs a CUDA device; the run is on cpu'
    """

    device: torch.device

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def capability(self) -> tuple[int, int]:
        # (0, 0) without a CUDA device.
        return torch.cuda.get_device_capability(self.device) if self.on_cuda else (0, 0)

    def missing_cuda(self, *, least: tuple[int, int] = (0, 0)) -> str | None:
        """Return why the run has no CUDA device of at least this compute capability; None if it has one."""
        if not self.on_cuda:
            return f"needs a CUDA device; the run is on {self.device}"
        if self.capability < least:
            needed, found = (".".join(map(str, each)) for each in (least, self.capability))
            return f"needs compute capability {needed}; {torch.cuda.get_device_name(self.device)} has {found}"
        return None

    def missing_package(self, module: str, *, install: str) -> str | None:
        """Return how to install the package of a module; None if it is installed."""
        return None if find_spec(module) else f"needs the package {module!r}, which is missing: pip install {install}"

    def missing_compiler(self) -> str | None:
        """Return what `torch.compile` needs, a C++ compiler on the CPU or Triton on CUDA; None if it is there."""
        # Inductor generates C++ for CPUs and Triton code for GPUs.
        if self.on_cuda:
            return self.missing_package("triton", install="triton")
        found = any(shutil.which(each) for each in ("g++", "clang++", "c++"))
        return None if found else "needs a C++ compiler (g++, clang++, c++), and none was found"


class Proof:
    """What was observed of an active technique.

    Parameters
    ----------
    summary : str
        One sentence with figures.
    **figures
        The same figures as plain values, for the log.

    Examples
    --------
    >>> proof = Proof("2 blocks were recomputed", blocks=2)
    >>> proof.figures
    {'blocks': 2}
    """

    def __init__(self, summary: str, /, **figures: Any) -> None:
        self.summary = summary
        self.figures = figures


@dataclass
class MemoryEffects:
    """What the techniques of a run change of its memory; `chatgot.memory` computes with it."""

    # Of an element of a matmul operand.
    element_bytes: int = 4
    # The kernel that is set for attention. "math" and "matmul" keep the attention scores.
    attention_kernel: str | None = None
    # One of so many blocks is recomputed in the backward pass; whether such a block keeps the results of its matmuls.
    checkpoint_every: int | None = None
    keeps_matmuls: bool = False
    # Whether activations wait in host memory.
    swaps_activations: bool = False
    # In how many chunks logits and loss are computed; None if the logits of a micro-batch exist at once.
    loss_chunks: int | None = None
    # Micro-batches of one batch.
    micro_batches: int = 1
    # Of AdamW: "4", "8" or "fp8" if its states are quantised; whether they lie in host memory; whether one kernel
    # updates a parameter, without temporary memory.
    state_bits: str | None = None
    offloads_states: bool = False
    fuses_update: bool = False


# The return type of `Technique.verify`: a generator that yields once, for the step to run, and returns the proof.
Verification = Generator[None, None, Proof | None]


# A third party adds a technique with one file: a subclass of `Technique`, registered under the entry point group
# `tensorkeep.techniques`, and one subclass of `chatgot.testing.TechniqueSuite` that tests it.
# A run calls, in this order: `missing`, `configure`, `process` (open until the run is closed), `apply`, `warm_up`,
# `verify`.
class Technique(ABC):
    """One technique in one run.

    Parameters
    ----------
    settings : Section
        A technique with settings annotates their type: a frozen `Section` with a documented default for each setting,
        which checks their bounds. The class has this type as `Settings`.

    Attributes
    ----------
    name : str
        The name that ``--technique`` takes: lower case, words joined by hyphens.
    aliases : tuple of str
        Other words for the technique. An error about an unknown word suggests the technique; none of them turns it on.
    kind : str
        ``"systems"``, the default: the losses must not change by more than `tolerance`. ``"algorithmic"``: they may
        change.
    changes : str
        What the technique changes first, one of `Changed`. It decides when the technique is applied.
    tolerance : float
        For a systems technique: the largest relative change of the losses of the first steps. 0: bit-identical.
    summary : str
        What the technique does: a phrase that completes "it ...", without a final period.
    effect : str
        What to expect: a phrase without a final period.
    reference : str
        The paper or the documentation that the technique follows.
    conflicts : mapping of str to str
        Names of techniques that cannot be combined with this one, and why. One technique of a pair declares it.
    after : tuple of str
        Names of the techniques with the same `changes` that must be applied before this one.
    needs_cuda : bool
        Whether the technique runs on CUDA devices only; see `missing` for other requirements.
    predicts_memory : bool
        Whether `affect_memory` describes all that it changes of the memory of training.
    sets : str or None
        The setting that `configure` changes, and that stays changed when a resumed run turns the technique off.
    refuses_conversations, refuses_document_masks : str or None
        Why it cannot train on conversations, or mask documents: a phrase that follows its name.
    depends_on_steps : bool
        Whether a step depends on ``loop.steps``: then a run that is made longer differs from a run that had this
        length from its start.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[Kind] = "systems"
    changes: ClassVar[Changed]
    tolerance: ClassVar[float] = 0.0
    summary: ClassVar[str]
    effect: ClassVar[str]
    reference: ClassVar[str]
    Settings: ClassVar[type[Section]] = Section
    conflicts: ClassVar[Mapping[str, str]] = {}
    after: ClassVar[tuple[str, ...]] = ()
    needs_cuda: ClassVar[bool] = False
    predicts_memory: ClassVar[bool] = False
    sets: ClassVar[str | None] = None
    refuses_conversations: ClassVar[str | None] = None
    refuses_document_masks: ClassVar[str | None] = None
    depends_on_steps: ClassVar[bool] = False
    settings: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kind = cls.__annotations__.get("settings")
        if kind is not None and "Settings" not in vars(cls):
            # With `from __future__ import annotations`, it is the name of the type.
            cls.Settings = getattr(sys.modules[cls.__module__], kind) if isinstance(kind, str) else kind

    def __init__(self, settings: Section) -> None:
        self.settings = settings

    def missing(self, machine: Machine) -> str | None:
        """Return what the technique needs and this machine does not have; None if it can run.

        The text continues a sentence that begins with the name: ``"needs a CUDA device; the run is on cpu"``. Use
        `Machine.missing_package` for a missing package: it names the command that installs it.
        """
        return machine.missing_cuda() if self.needs_cuda else None

    def configure(self, config: Config) -> Config:
        """Return the configuration that the run uses. Called before anything is built, and again for a resumed run.

        Raises
        ------
        UsageError
            If the technique cannot work with this configuration.
        """
        return config

    @property
    def cannot_accumulate(self) -> str | None:
        """When a step can have one batch only, such as ``"in the mode X"``; None if it can have several."""
        return None

    def affect_memory(self, effects: MemoryEffects) -> None:  # noqa: B027  # most techniques change none
        """Record what it changes of the memory of training."""

    def process(self) -> AbstractContextManager[None]:
        """Return a context around the whole run, from building to closing it, for settings of the process."""
        return nullcontext()

    def apply(self, run: StepState) -> None:  # noqa: B027  # a technique may only configure
        """Turn the technique on: change the model, optimizers, batches or operations of a run that is built.

        Called before a checkpoint is restored. The names of the parameters must not change.

        Raises
        ------
        UsageError
            If the technique cannot work with this run.
        """

    def warm_up(self, run: StepState) -> None:  # noqa: B027  # most techniques need none
        """Prepare the first step, for example compile code, before any technique observes that step.

        See `chatgot.techniques.observe.warm_up_loss`.
        """

    @abstractmethod
    def verify(self, run: StepState) -> Verification:
        """Observe the first step of the process, and prove that the technique is active.

        A generator: install hooks, ``yield`` once while the step runs, remove the hooks, and return a `Proof`. The step
        must compute the same bits as an unobserved one. A technique that is visible only in an update of the weights
        returns None if the step made no update, as the first steps in float16 may; it then observes the next step too.

        Raises
        ------
        TechniqueNotActiveError
            After the ``yield``, if the technique was not active; see `not_active`.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that an exact resume needs in a checkpoint; empty if it needs nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # most techniques have no state
        """Restore what `state_dict` returned."""

    def not_active(self, observed: str, remedy: str = REPORT) -> TechniqueNotActiveError:
        """Return the error to raise when the technique was not active."""
        return TechniqueNotActiveError(f"{self.name} was requested and is not active: {observed}", remedy=remedy)


class _Techniques(Registry[type[Technique]]):
    def remedy(self, name: str) -> str:
        near = ", ".join(map(as_option, meanings(name)))
        return f"did you mean {near}?" if near else super().remedy(name)


# All techniques that are installed; an entry point of `tensorkeep.techniques` adds one.
TECHNIQUE_CLASSES: Registry[type[Technique]] = _Techniques("technique", "chatgot")
