"""The contract of a technique: one optimisation of training, as a switch that proves that it is on.

A technique is a class, registered under the entry point ``tensorkeep.techniques``. It says what it is and what it
needs, changes a run before its first step, and watches that step for proof that it is at work: asked for but
not active is an error, never a silent fallback. The exam is ``tensorkeep.testing.technique_suite.TechniqueSuite``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tensorkeep.errors import TechniqueNotActiveError
from tensorkeep.plugins import Registry
from tensorkeep.train.config.config import Config
from tensorkeep.train.config.sections import Section
from tensorkeep.train.techniques.machine import Machine

if TYPE_CHECKING:
    from tensorkeep.train.run.state import Run

Kind = Literal["systems", "algorithmic"]
Changed = Literal["process", "model", "loss", "optimizer", "processes", "data", "compilation"]
"""What techniques change, in the order in which they are applied: each finds what those before it have made."""


class NoSettings(Section, frozen=True):
    """The settings of a technique that has none."""


class Technique(ABC):
    """One technique in one run.

    Parameters
    ----------
    settings : Section
        An instance of `Settings`.

    Attributes
    ----------
    name : str
        What ``--technique`` calls it: lower case, words joined by hyphens.
    kind : str
        ``"systems"``: the losses must not move by more than `tolerance`. ``"algorithmic"``: they may.
    changes : str
        What it changes first of all, one of `Changed`, which says when it is applied.
    tolerance : float
        Of a systems technique: how far the losses of the first steps may move, as a share of them. 0: not by a bit.
    summary : str
        What it does, in a sentence.
    effect : str
        What to expect of it, in a sentence.
    reference : str
        The paper, or the page of documentation, that it follows.
    Settings : type
        A frozen `Section` with a default for each setting, which checks their bounds.
    conflicts : mapping of str to str
        Techniques that it cannot be combined with, and why. One side need say it.
    after : tuple of str
        Techniques that change the same, and must have been applied before it, where they are on, too.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    changes: ClassVar[Changed]
    tolerance: ClassVar[float] = 0.0
    summary: ClassVar[str]
    effect: ClassVar[str]
    reference: ClassVar[str]
    Settings: ClassVar[type[Section]] = NoSettings
    conflicts: ClassVar[Mapping[str, str]] = {}
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Section) -> None:
        self.settings: Any = settings

    def lacks(self, machine: Machine) -> str | None:
        """Say what it needs that this machine does not have, and what is there instead; None if it can run.

        A missing package is said by `Machine.lacks_package`, with the command that installs it.
        """
        return None

    def configure(self, config: Config) -> Config:
        """Return the configuration that the run is to have; called before anything is built.

        Raises
        ------
        UsageError
            If it makes no sense with this configuration.
        """
        return config

    def process(self) -> AbstractContextManager[None]:
        """Return a context in which the whole run is built and trained, for what holds for the process as a whole."""
        return nullcontext()

    @abstractmethod
    def apply(self, run: Run) -> None:
        """Turn it on: change the model, the optimizers, the batches or the operations of a run that is built.

        Called before a checkpoint is restored. Names of parameters must stay as they are.

        Raises
        ------
        UsageError
            If it makes no sense with this run.
        """

    def rehearse(self, run: Run) -> None:  # noqa: B027  # most have nothing to prepare
        """Make what the first step of the process needs, such as compiled code, before anything watches that step.

        See `tensorkeep.train.techniques.rehearsal`.
        """

    @abstractmethod
    def verify(self, run: Run) -> AbstractContextManager[Proof]:
        """Return a context around the first step of the process, which watches the step.

        On leaving it says in the proof what was seen. What it installs to watch is gone afterwards, and the step
        computes what it would compute unwatched. A technique that shows in an update leaves the proof empty where the
        step made none, as the first ones in float16 may, and watches the next step, too.

        Raises
        ------
        TechniqueNotActiveError
            On leaving, if the technique was not seen at work.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for the run to go on exactly; empty if that is nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # most have nothing to take
        """Take what `state_dict` gave."""

    def not_active(self, seen: str, remedy: str) -> TechniqueNotActiveError:
        """Return the error of a technique that is not at work."""
        return TechniqueNotActiveError(f"{self.name} was asked for and is not active: {seen}", remedy=remedy)


class Proof:
    """What was seen of a technique in a step.

    Attributes
    ----------
    seen : str
        A sentence with figures; empty where there was nothing to see.
    figures : dict of str to object
        Those, as plain values.
    """

    def __init__(self) -> None:
        self.seen = ""
        self.figures: dict[str, Any] = {}

    def is_that(self, seen: str, **figures: Any) -> None:
        """Say what was seen."""
        self.seen, self.figures = seen, figures


TECHNIQUE_CLASSES: Registry[type[Technique]] = Registry("technique")
"""All techniques that are installed; an entry point of ``tensorkeep.techniques`` adds one."""
