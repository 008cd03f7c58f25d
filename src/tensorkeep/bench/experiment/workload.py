"""The contract of a workload: what an experiment's arms are, and how one of them is measured.

A workload is one module, ``tensorkeep.bench.NAME_workload``, with a `Workload` named ``WORKLOAD``. The engine knows
nothing else about what it measures.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from tensorkeep.bench.results import Measure
from tensorkeep.errors import TensorkeepError


class DoesNotApplyError(TensorkeepError):
    """An arm makes no sense on this machine, or with what it works on."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a process needs to know to run one cell; goes there as JSON.

    Attributes
    ----------
    workload, arm : str
    settings : dict
        The arm's.
    subject : dict
        What to work on, as `Workload.prepare` named it.
    measures : list of str
        Which of the optional measures to take.
    directory : str
        Where the cell may write; empty at the start, removed afterwards.
    block : int
        The number of the block, from 0: a seed of its own for what is random.
    """

    workload: str
    arm: str
    settings: dict[str, Any]
    subject: dict[str, Any]
    measures: list[str]
    directory: str
    block: int = 0


@dataclass(slots=True)
class Outcome:
    """What a cell gave: figures by measure, and the seconds of everything that is part of no figure.

    Attributes
    ----------
    figures, clocks : dict of str to float
    observed : dict of str to str
        Technique to a sentence: what the first step showed of it.
    """

    figures: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, float] = field(default_factory=dict)
    observed: dict[str, str] = field(default_factory=dict)


class Workload(ABC):
    """One kind of work that can be measured.

    Attributes
    ----------
    name : str
    measures : tuple of Measure
        In the order in which tables show them.
    """

    name: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]

    @abstractmethod
    def settings(self, given: object, path: str | None) -> dict[str, Any]:
        """Return an experiment's settings with the defaults of those that are not given.

        Parameters
        ----------
        given : object
            What stands in a file, or was asked for.
        path : str or None
            The file, for messages.

        Raises
        ------
        UsageError
            If one is unknown, of another type, or out of range.
        """

    @abstractmethod
    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise UsageError, in one line, if an arm's settings are wrong."""

    @abstractmethod
    def missing(self, settings: Mapping[str, Any]) -> str | None:
        """Return why an arm cannot run on this machine (a package is not installed), or None."""

    @abstractmethod
    def prepare(self, settings: Mapping[str, Any], arms: Collection[Mapping[str, Any]], scratch: Path) -> Prepared:
        """Make what all cells work on, once, in a folder that is removed when the run is over.

        Parameters
        ----------
        settings : dict
            The experiment's.
        arms : collection of dict
            The settings of the arms that will run, for what disk and memory they need.
        """

    @abstractmethod
    def measures_of(self, settings: Mapping[str, Any]) -> list[str]:
        """Return the names of the measures that an experiment with these settings takes."""

    @abstractmethod
    def measure(self, task: Task) -> Outcome:
        """Run one cell, in the process that was started for it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all cells work on.

    Attributes
    ----------
    subject, slow_subject : dict
        What a `Task` is given, and what arms that are marked slow are given.
    described, slow_described : dict
        Each of them as the ``subject`` of the results file; ``bytes`` is the amount of work.
    """

    subject: dict[str, Any]
    slow_subject: dict[str, Any]
    described: dict[str, Any]
    slow_described: dict[str, Any]


@cache
def names() -> tuple[str, ...]:
    """Return the names of all workloads: a package of the bench each."""
    return ("checkpoint", "training")


def get(name: str) -> Workload:
    """Return the workload of a name that is among `names`."""
    return cast(Workload, importlib.import_module(f"tensorkeep.bench.{name}.workload").WORKLOAD)
