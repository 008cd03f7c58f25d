"""Run an experiment: the order of its cells, random within blocks, and their limits.

The results are written after each cell, so that an interrupted run can resume.
"""

import random
import statistics
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict, replace

from tensorkeep import machine
from tensorkeep.bench.analysis.summary import summarise
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.experiment.workload import Outcome, Prepared, Task, get_workload
from tensorkeep.bench.results import Arm, Cell, Limits, Results, Settings, Status
from tensorkeep.bench.results_file import write_results
from tensorkeep.bench.run.cell import command_of, run_cell
from tensorkeep.bench.run.enough import FINAL, arms_left_out
from tensorkeep.bench.run.scratch import scratch_folder
from tensorkeep.codecs import coder
from tensorkeep.errors import StoreError, UsageError
from tensorkeep.version import __version__

_PENDING: tuple[Status, ...] = ("planned", "disk")


class Listener:
    """Receives the progress of a run; this one ignores it."""

    def preparing(self) -> None:
        """Report that the subject of the cells is being created."""

    def cell_started(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None:
        """Report that a cell starts; ``seconds_left`` is None while it cannot be estimated."""

    def cell_ended(self, cell: Cell) -> None:
        """Report the outcome of a cell."""


def plan_results(plan: Plan, command: str) -> Results:
    """Return the results of a run that has not started, by a command line: every cell is planned."""
    workload = get_workload(plan.experiment.workload)
    names = workload.measures_of(workload.parse_settings(plan.experiment.settings))
    return Results(
        tensorkeep=__version__,
        command=command,
        started=_now(),
        experiment=plan.experiment,
        measures=tuple(measure for measure in workload.measures if measure.name in names),
        arms=plan.arms,
        cells=tuple(schedule(plan)),
    )


def schedule(plan: Plan) -> list[Cell]:
    """Return the planned cells in their order: randomised complete blocks, every arm once in each.

    A drift of the machine then affects all arms alike. The order within a block depends only on the seed, the block's
    number and the arms: with more runs, the experiment begins with the same blocks.
    """
    cells: list[Cell] = []
    for block in range(plan.experiment.runs or 0):
        names = [arm.name for arm in plan.arms]
        random.Random(f"{plan.experiment.seed}:{block}").shuffle(names)
        cells += [Cell(name, block, "planned", len(cells) + place) for place, name in enumerate(names)]
    return cells


class ExperimentRun:
    """A run of an experiment, new or resumed: ``results`` has what was measured so far, as does the file.

    ``directory`` is a folder on the disk that is measured, ``measure`` runs a cell.
    """

    def __init__(
        self,
        results: Results,
        file: Path,
        directory: Path,
        measure: Callable[[Task, Limits], Outcome] | None = None,
    ) -> None:
        self.results = results
        self._file = file
        self._directory = directory
        self._measure = measure or run_cell

    def execute(self, listener: Listener) -> None:
        """Run the cells that have no outcome yet, and write the results after each.

        Raises StoreError if the disk is full. What the cell wrote is removed, earlier figures are kept; BusyError if
        another run uses the folder; UsageError if the results were measured on another machine.
        """
        workload = get_workload(self.results.experiment.workload)
        settings = workload.parse_settings(self.results.experiment.settings)
        arms = {arm.name: arm for arm in self.results.arms}
        parsed = [workload.parse_arm(arm.settings) for arm in arms.values()]
        with scratch_folder(self._directory) as scratch:
            self._check_machine(scratch)
            listener.preparing()
            prepared = workload.prepare(settings, parsed, scratch)
            # Only from here on, earlier results in the file are replaced.
            self._save(subject=prepared.subject)
            try:
                while (index := self._next()) is not None:
                    self._run(index, arms[self.results.cells[index].arm], prepared, scratch, listener)
            finally:
                complete = not self._pending()
                self._save(complete=complete, finished=_now() if complete else None, summary=summarise(self.results))

    def _check_machine(self, scratch: Path) -> None:
        found: dict[str, Any] = to_builtins(machine.describe(scratch))
        # The path as it was given: a results file is passed on, and must not show where a user's folders are.
        found["storage"]["path"] = str(scratch)
        found["coder"] = coder.describe()
        before = self.results.environment
        # Results of earlier versions do not have all of these.
        if any(before.get(key, found[key]) != found[key] for key in ("versions", "processor", "coder")):
            raise UsageError(
                "the machine or its software has changed since this run began", remedy="begin again with another --out"
            )
        self.results = replace(self.results, environment=found)

    def _run(self, index: int, arm: Arm, prepared: Prepared, scratch: Path, listener: Listener) -> None:
        subject = prepared.slow_subject if arm.slow else prepared.subject
        task = Task(
            workload=self.results.experiment.workload,
            arm=arm.name,
            settings=arm.settings,
            input=to_builtins(prepared.slow_input if arm.slow else prepared.input),
            measures=[measure.name for measure in self.results.measures],
            directory=str(scratch / f"cell-{index}"),
            block=self.results.cells[index].block,
            baseline=self._baseline_settings(arm),
        )
        cell = replace(
            self.results.cells[index],
            amount=subject.bytes,
            subject=subject.description,
            command=command_of(task),
            started=_now(),
        )
        total = len(self.results.cells)
        listener.cell_started(cell, total - len(self._pending()), total, self._seconds_left())
        outcome = self._repeated_failure(cell) or self._measure(task, self.results.experiment.limits)
        cell = replace(cell, **asdict(outcome))
        cells = self.results.cells
        self._save(cells=(*cells[:index], cell, *cells[index + 1 :]))
        listener.cell_ended(cell)
        if cell.status == "disk":
            raise StoreError(
                f"the disk was full in arm {cell.arm!r}",
                path=self._directory,
                remedy="free some space or choose a smaller model, then use --resume",
            )

    def _baseline_settings(self, arm: Arm) -> Settings | None:
        """Return the settings of the baseline, which a cell of any other arm may be compared with while it runs."""
        return next((one.settings for one in self.results.arms if one.role == "baseline" and one is not arm), None)

    def _repeated_failure(self, cell: Cell) -> Outcome | None:
        """Return the outcome of a cell whose arm has already failed in a way that repeats."""
        for other in self.results.cells:
            if other.arm == cell.arm and other.order != cell.order and other.status in FINAL and other.seconds:
                verb = "was not run" if other.status == "not-run" else "failed"
                return Outcome("not-run", f"not repeated: in block {other.block + 1} it {verb} ({other.reason})")
        return None

    def _save(self, **changes: Any) -> None:
        self.results = replace(self.results, **changes)
        write_results(self.results, self._file)

    def _next(self) -> int | None:
        """Return the index of the next cell, or None; before each block, leave out what need not be measured again."""
        cells = self.results.cells
        pending = self._pending()
        if pending and not any(cell.block == cells[pending[0]].block and cell.seconds for cell in cells):
            left_out = arms_left_out(self.results, cells[pending[0]].block)
            if left_out:
                self._save(cells=tuple(cell for cell in cells if cell.status != "planned" or cell.arm not in left_out))
                pending = self._pending()
        return pending[0] if pending else None

    def _pending(self) -> list[int]:
        """Return the indices of the cells that have to run, in their order."""
        cells = self.results.cells
        pending = [index for index, cell in enumerate(cells) if cell.status in _PENDING]
        return sorted(pending, key=lambda index: cells[index].order)

    def _seconds_left(self) -> float | None:
        """Estimate the rest of the run: each cell takes the mean of its arm, or the median of all."""
        known: dict[str, list[float]] = {}
        for cell in self.results.cells:
            if cell.status not in _PENDING and cell.seconds:
                known.setdefault(cell.arm, []).append(cell.seconds)
        if not known:
            return None
        usual = statistics.median([seconds for each in known.values() for seconds in each])
        pending = (self.results.cells[index] for index in self._pending())
        return sum(statistics.fmean(known.get(cell.arm, [usual])) for cell in pending)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
