"""The contract of a workload: typed settings of experiments and arms, and measuring a cell.

A workload is one module, ``tensorkeep.bench.NAME.workload``, with an instance of `Workload` called ``WORKLOAD``. The
engine handles settings as JSON objects; only the workload gives them types:

* ``SettingsT``: the settings of an experiment, the same for all arms.
* ``ArmT``: the settings of one arm.
"""

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec

from tensorkeep.bench.results import Measure, Settings, Status, Subject
from tensorkeep.errors import TensorkeepError

SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)
ArmT = TypeVar("ArmT")


class GateError(TensorkeepError):
    """A cell gave a wrong result, so that its speed does not count."""

    kind = "gate"


class DoesNotApplyError(TensorkeepError):
    """An arm cannot run on this machine, or with its subject."""


class Task(msgspec.Struct, frozen=True):
    """The task of a cell's process, sent as JSON."""

    workload: str
    arm: str
    settings: Settings  # the arm's
    input: Settings  # what `Workload.prepare` returned for this arm
    measures: list[str]  # those to take
    directory: str  # where the cell may write; empty at the start and removed afterwards
    block: int = 0
    baseline: Settings | None = None  # the settings of the baseline, if this is a cell of another arm


class Outcome(msgspec.Struct):
    """The outcome of a cell and its figures; ``docs/reference/results.md`` describes each field."""

    status: Status = "ok"
    reason: str | None = None  # None if the status is ``"ok"``
    seconds: float = 0.0  # wall clock of the process
    figures: dict[str, float] = {}  # by measure, in its unit
    clocks: dict[str, float] = {}  # seconds of the stages that are not part of a figure
    observed: dict[str, str] = {}  # by technique: what showed that it was active
    turns: dict[str, tuple[tuple[float, float], ...]] = {}  # by measure: its figure and the baseline's, in each turn
    losses: tuple[tuple[int, float], ...] = ()  # of training: step, and mean loss of the steps since the one before

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the seconds that the ``with`` block takes to a clock."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.clocks[name] = self.clocks.get(name, 0.0) + time.perf_counter() - begin


class Prepared(msgspec.Struct, frozen=True):
    """What the cells work on, and those of the arms that are marked slow: `Task.input`, and its description."""

    input: msgspec.Struct
    slow_input: msgspec.Struct
    subject: Subject
    slow_subject: Subject


class Workload(ABC, Generic[SettingsT, ArmT]):
    """One kind of work that the bench measures; ``measures`` are in the order of the tables."""

    name: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]

    @abstractmethod
    def parse_settings(self, given: Mapping[str, object], path: str | None = None) -> SettingsT:
        """Return an experiment's settings, with defaults for those that its file or the command line does not give.

        Raises UsageError, which names the file ``path``, if a setting is unknown, of another type, or out of range.
        """

    @abstractmethod
    def parse_arm(self, given: Mapping[str, object]) -> ArmT:
        """Return the settings of an arm; UsageError if a setting is unknown, of another type, or out of range."""

    @abstractmethod
    def missing(self, arm: ArmT) -> str | None:
        """Return why an arm cannot run on this machine, such as a package that is not installed, or None."""

    @abstractmethod
    def prepare(self, settings: SettingsT, arms: Collection[ArmT], scratch: Path) -> Prepared:
        """Create the subject of the cells, once for all of them, in a folder that is removed after the run.

        Raises StoreError if disk or memory do not suffice for all the arms that will run.
        """

    @abstractmethod
    def measures_of(self, settings: SettingsT) -> list[str]:
        """Return the names of the measures that an experiment with these settings takes."""

    @abstractmethod
    def measure(self, task: Task) -> Outcome:
        """Run one cell, in the process that was started for it."""


def get_workload(name: str) -> Workload[Any, Any]:
    """Return a workload by its name: ``checkpoint`` or ``training``."""
    return cast("Workload[Any, Any]", importlib.import_module(f"tensorkeep.bench.{name}.workload").WORKLOAD)
