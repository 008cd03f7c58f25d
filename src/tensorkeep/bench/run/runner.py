"""Running an experiment: cell after cell in random order within blocks, each in a process of its own.

What was measured is on the disk after every cell. An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tensorkeep import machine
from tensorkeep.bench.analysis.statistics import require_scipy
from tensorkeep.bench.experiment import workload
from tensorkeep.bench.experiment.workload import Prepared, Task
from tensorkeep.bench.results import Limits
from tensorkeep.bench.run import document as documents
from tensorkeep.bench.run.cell import CellResult, command_of, run_cell
from tensorkeep.bench.run.scratch import Scratch
from tensorkeep.errors import StoreError, UsageError

Cell = dict[str, Any]

_HOPELESS = ("gate", "failed", "timeout", "memory", "not-run")
"""How a cell ends that would end so again."""


class Listener(Protocol):
    """Who is told how a run goes on."""

    def preparing(self) -> None:
        """What the cells work on is being made."""

    def begins(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None:
        """A cell begins; ``seconds_left`` is None while nothing is known."""

    def ended(self, cell: Cell) -> None:
        """A cell has its outcome."""


def execute(
    document: dict[str, Any],
    results: Path,
    directory: Path,
    listener: Listener,
    run: Callable[[Task, Limits], CellResult] = run_cell,
) -> None:
    """Run the cells that have no outcome yet, and write the results after each.

    Parameters
    ----------
    document : dict
        The results so far; changed in place.
    results : Path
        The file that they are kept in.
    directory : Path
        A folder on the disk that is measured.
    run : callable
        Runs a cell.

    Raises
    ------
    StoreError
        If the disk is full; what the cell wrote is removed, what was measured before is kept.
    BusyError
        If another run works in the folder.
    MissingExtraError
        If scipy, which the statistics need, is not installed.
    """
    require_scipy()
    home = workload.get(document["experiment"]["workload"])
    arms = {arm["name"]: arm for arm in document["arms"]}
    settings = document["experiment"]["settings"]
    begun = False
    try:
        with Scratch(directory) as scratch:
            found = machine.describe(scratch.path)
            # As it was given: a results file is passed on, and says nothing of whose folders lie where.
            found["storage"]["path"] = str(scratch.path)
            document["environment"] = _same_machine(document["environment"], found)
            listener.preparing()
            prepared = home.prepare(settings, [arm["settings"] for arm in arms.values()], scratch.path)
            document["subject"] = prepared.described
            documents.write(document, results)
            begun = True
            runner = _Runner(document, prepared, home.measures_of(settings), scratch.path, run)
            for cell in list(documents.pending(document)):
                left = _seconds_left(document)
                listener.begins(cell, _done(document), len(document["cells"]), left)
                runner.run(cell, arms[cell["arm"]])
                documents.write(document, results)
                listener.ended(cell)
                if cell["status"] == "disk":
                    raise StoreError(
                        f"the disk was full in arm {cell['arm']!r}",
                        path=directory,
                        remedy="free some space or choose a smaller model; --resume goes on",
                    )
    finally:
        # Until then nothing is known that an earlier results file should give way to.
        if begun:
            _finish(document)
            documents.write(document, results)


def _same_machine(before: Mapping[str, Any], now: machine.Description) -> machine.Description:
    if before and (before["versions"], before["processor"]) != (now["versions"], now["processor"]):
        raise UsageError(
            "the machine or its software is not what this run began on", remedy="start anew with another --out"
        )
    return now


def _finish(document: dict[str, Any]) -> None:
    document["complete"] = next(documents.pending(document), None) is None
    document["finished"] = documents.now() if document["complete"] else None
    document["summary"] = documents.summary_of(document)


class _Runner:
    """Runs one cell after the other on what was prepared."""

    def __init__(
        self,
        document: dict[str, Any],
        prepared: Prepared,
        measures: list[str],
        scratch: Path,
        run: Callable[[Task, Limits], CellResult],
    ) -> None:
        self._document = document
        self._prepared = prepared
        self._measures = measures
        self._scratch = scratch
        self._run = run
        self._limits = Limits(**document["experiment"]["limits"])

    def run(self, cell: Cell, arm: Mapping[str, Any]) -> None:
        """Give the cell its outcome."""
        slow = arm.get("slow", False)
        described = self._prepared.slow_described if slow else self._prepared.described
        task = Task(
            workload=self._document["experiment"]["workload"],
            arm=arm["name"],
            settings=arm["settings"],
            subject=self._prepared.slow_subject if slow else self._prepared.subject,
            measures=self._measures,
            # No name from the file: what lies there is removed.
            directory=str(self._scratch / f"cell-{self._document['cells'].index(cell)}"),
            block=cell["block"],
        )
        cell |= {"amount": described["bytes"], "subject": described["description"], "command": command_of(task)}
        cell["started"] = documents.now()
        before = self._hopeless(cell)
        if before is not None:
            reason = f"not repeated: in block {before['block'] + 1} it {_ended(before)}"
            cell |= {"status": "not-run", "reason": reason, "seconds": 0.0}
            return
        cell |= asdict(self._run(task, self._limits))

    def _hopeless(self, cell: Cell) -> Cell | None:
        """Return the cell of the same arm that shows that there is no use in trying again."""
        for other in self._document["cells"]:
            if other["arm"] == cell["arm"] and other["status"] in _HOPELESS and other["seconds"]:
                return other if other is not cell else None
        return None


def _ended(cell: Cell) -> str:
    return f"was not run ({cell['reason']})" if cell["status"] == "not-run" else f"failed ({cell['reason']})"


def _done(document: dict[str, Any]) -> int:
    return sum(cell["status"] not in documents.AGAIN for cell in document["cells"])


def _seconds_left(document: dict[str, Any]) -> float | None:
    """Return how long the pending cells will take, if each takes what its arm took so far, or else what a cell took."""
    known: dict[str, list[float]] = {}
    for cell in document["cells"]:
        if cell["status"] not in documents.AGAIN and cell["seconds"]:
            known.setdefault(cell["arm"], []).append(cell["seconds"])
    if not known:
        return None
    usual = statistics.median([seconds for each in known.values() for seconds in each])
    return sum(statistics.fmean(known.get(cell["arm"], [usual])) for cell in documents.pending(document))
