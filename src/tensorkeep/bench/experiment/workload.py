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

WORKLOADS = ("checkpoint", "training")


class GateError(TensorkeepError):
    """A cell gave a wrong result, so that its speed does not count."""

    kind = "gate"


class DoesNotApplyError(TensorkeepError):
    """An arm cannot run on this machine, or with its subject."""


class Task(msgspec.Struct, frozen=True):
    """The task of a cell's process, sent as JSON.

    Attributes
    ----------
    workload, arm : str
    settings : dict
        The arm's.
    input : dict
        What `Workload.prepare` returned for this arm.
    measures : list of str
        The measures to take.
    directory : str
        Where the cell may write. It is empty at the start and removed afterwards.
    block : int
        The number of the block, from 0.
    """

    workload: str
    arm: str
    settings: Settings
    input: Settings
    measures: list[str]
    directory: str
    block: int = 0


class Outcome(msgspec.Struct):
    """The outcome of a cell and its figures; ``docs/reference/results.md`` describes each field.

    Attributes
    ----------
    status : str
    reason : str or None
        None if the status is ``"ok"``.
    seconds : float
        Wall clock of the whole process.
    figures : dict of str to float
        By measure, in its unit.
    clocks : dict of str to float
        Seconds of the stages that are not part of a figure.
    observed : dict of str to str
        By technique: what showed that it was active.
    """

    status: Status = "ok"
    reason: str | None = None
    seconds: float = 0.0
    figures: dict[str, float] = {}
    clocks: dict[str, float] = {}
    observed: dict[str, str] = {}

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the seconds that the ``with`` block takes to a clock."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.clocks[name] = self.clocks.get(name, 0.0) + time.perf_counter() - begin


class Prepared(msgspec.Struct, frozen=True):
    """What the cells work on.

    Attributes
    ----------
    input, slow_input : msgspec.Struct
        The `Task.input` of the arms, and of those that are marked slow.
    subject, slow_subject : Subject
        Their descriptions for the results file; ``bytes`` is the amount of work.
    """

    input: msgspec.Struct
    slow_input: msgspec.Struct
    subject: Subject
    slow_subject: Subject


class Workload(ABC, Generic[SettingsT, ArmT]):
    """One kind of work that the bench measures.

    Attributes
    ----------
    name : str
    measures : tuple of Measure
        In the order of the tables.
    """

    name: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]

    @abstractmethod
    def parse_settings(self, given: Mapping[str, object], path: str | None = None) -> SettingsT:
        """Return an experiment's settings, with defaults for those that are not given.

        Parameters
        ----------
        given : mapping
            As the experiment's file or the command line has them.
        path : str, optional
            The file, for error messages.

        Raises
        ------
        UsageError
            If a setting is unknown, of another type, or out of range.
        """

    @abstractmethod
    def parse_arm(self, given: Mapping[str, object]) -> ArmT:
        """Return the settings of an arm.

        Raises
        ------
        UsageError
            If a setting is unknown, of another type, or out of range.
        """

    @abstractmethod
    def missing(self, arm: ArmT) -> str | None:
        """Return why an arm cannot run on this machine, such as a package that is not installed, or None."""

    @abstractmethod
    def prepare(self, settings: SettingsT, arms: Collection[ArmT], scratch: Path) -> Prepared:
        """Create the subject of the cells, once for all of them.

        Parameters
        ----------
        settings : struct
        arms : collection
            All arms that will run; they decide what disk and memory are needed.
        scratch : Path
            A folder that is removed after the run.

        Raises
        ------
        StoreError
            If disk or memory do not suffice.
        """

    @abstractmethod
    def measures_of(self, settings: SettingsT) -> list[str]:
        """Return the names of the measures that an experiment with these settings takes."""

    @abstractmethod
    def measure(self, task: Task) -> Outcome:
        """Run one cell, in the process that was started for it."""


def get_workload(name: str) -> Workload[Any, Any]:
    """Return a workload by its name, which is among `WORKLOADS`."""
    return cast("Workload[Any, Any]", importlib.import_module(f"tensorkeep.bench.{name}.workload").WORKLOAD)
