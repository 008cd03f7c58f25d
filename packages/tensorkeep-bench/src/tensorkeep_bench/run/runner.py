"""The runner: measures the cells of an experiment in randomised complete blocks."""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict, replace

from tensorkeep import __version__
from tensorkeep.errors import BusyError, StoreError, UsageError
from tensorkeep.ext import machine
from tensorkeep.ext.formats import coder
from tensorkeep.ext.storage import FolderLock, store_errors
from tensorkeep_bench.analysis.samples import Samples
from tensorkeep_bench.analysis.summary import summarise
from tensorkeep_bench.checkpoint.files import remove
from tensorkeep_bench.experiment import ExperimentPlan
from tensorkeep_bench.results import Arm, CellRecord, Experiment, Limits, Results, Status, write_results
from tensorkeep_bench.run.cell import command_of, run_cell
from tensorkeep_bench.workload import Outcome, Task, get_workload

# Statuses that a second attempt would have again.
FINAL: tuple[Status, ...] = ("gate", "failed", "timeout", "memory", "not-run")

_PENDING: tuple[Status, ...] = ("planned", "disk")
_FEWEST_BLOCKS = 3  # blocks before an arm counts as precise: two may agree by chance
SCRATCH = ".tensorkeep-bench"


Measurement = Callable[[], Outcome]  # measures one arm once, in this process


# Is called when a cell starts, with the status "planned", and when it has ended: the cell, how many cells are done, how
# many there are, and the seconds that are left, or None while they cannot be estimated.
CellProgress = Callable[[CellRecord, int, int, float | None], None]


def schedule(experiment: Experiment, arms: Sequence[Arm]) -> list[CellRecord]:
    cells: list[CellRecord] = []
    for block in range(experiment.runs or 0):
        names = [arm.name for arm in arms]
        # Seeded block by block, so that the order of a block does not depend on how many there are.
        # Every arm runs once in each block, in random order, so that a drift of the machine affects all arms alike.
        random.Random(f"{experiment.seed}:{block}").shuffle(names)
        cells += [CellRecord(name, block, "planned", len(cells) + place) for place, name in enumerate(names)]
    return cells


def plan_results(plan: ExperimentPlan, command: str) -> Results:
    """Return the results of a run that has not started: every cell is planned."""
    workload = get_workload(plan.experiment.workload)
    settings = plan.experiment.settings
    names = workload.measures_of(workload.parse_settings(settings))
    return Results(
        tensorkeep=__version__,
        command=command,
        started=_now(),
        experiment=plan.experiment,
        measures=tuple(measure for measure in workload.measures if measure.name in names),
        arms=tuple(replace(arm, use=workload.use(settings, arm.settings)) for arm in plan.arms),
        cells=tuple(schedule(plan.experiment, plan.arms)),
    )


class CellRunner:
    """Runs the pending cells of some results, block by block; each arm is measured by a function in this process."""

    directory: Path | None = None  # the folder on the disk that is measured

    def __init__(self, results: Results, measurements: Mapping[str, Measurement]) -> None:
        self.results = results
        self._measurements = measurements

    def begun(self, cell: CellRecord) -> CellRecord:
        return replace(cell, status="planned", started=_now(), amount=self.results.subject.bytes)

    def measure(self, cell: CellRecord) -> Outcome:
        begin = time.perf_counter()
        # In this process, where a process per cell would take too long.
        outcome = self._measurements[cell.arm]()
        return replace(outcome, seconds=time.perf_counter() - begin)

    def update(self, **changes: Any) -> None:
        self.results = replace(self.results, **changes)

    def run_cells(self, progress: CellProgress) -> None:
        """Run every pending cell that has to be measured; StoreError if the disk is full."""
        while (index := self._next()) is not None:
            cell, total = self.begun(self.results.cells[index]), len(self.results.cells)
            done, seconds_left = total - len(self._pending()), self._seconds_left()
            progress(cell, done, total, seconds_left)
            cell = replace(cell, **asdict(self._repeated_failure(cell) or self.measure(cell)))
            # Only now: beginning and measuring a cell may have changed the results.
            cells = self.results.cells
            self.update(cells=(*cells[:index], cell, *cells[index + 1 :]))
            progress(cell, done + 1, total, seconds_left)
            if cell.status == "disk":
                remedy = "free some space or choose a smaller model, then use --resume"
                raise StoreError(f"the disk was full in arm {cell.arm!r}", path=self.directory, remedy=remedy)

    def _next(self) -> int | None:
        cells = self.results.cells
        pending = self._pending()
        # Only before a block begins: a block with a part of its arms would not be complete.
        if pending and not any(cell.block == cells[pending[0]].block and cell.seconds for cell in cells):
            # All arms if the budget is spent, or arms that are precise enough.
            left_out = arms_left_out(self.results, cells[pending[0]].block)
            if left_out:
                self.update(cells=tuple(cell for cell in cells if cell.status != "planned" or cell.arm not in left_out))
                pending = self._pending()
        return pending[0] if pending else None

    def _pending(self) -> list[int]:
        cells = self.results.cells
        pending = [index for index, cell in enumerate(cells) if cell.status in _PENDING]
        # A resumed run first repeats cells that met a full disk.
        return sorted(pending, key=lambda index: cells[index].order)

    def _repeated_failure(self, cell: CellRecord) -> Outcome | None:
        for other in self.results.cells:
            if other.arm == cell.arm and other.order != cell.order and other.status in FINAL and other.seconds:
                verb = "was not run" if other.status == "not-run" else "failed"
                # A second attempt would fail again, and may take the whole time limit.
                return Outcome("not-run", f"not repeated: in block {other.block + 1} it {verb} ({other.reason})")
        return None

    def _seconds_left(self) -> float | None:
        # Arms differ by orders of magnitude, so each has its own mean.
        known: dict[str, list[float]] = {}
        for cell in self.results.cells:
            if cell.status not in _PENDING and cell.seconds:
                known.setdefault(cell.arm, []).append(cell.seconds)
        slow = {arm.name for arm in self.results.arms if arm.slow}

        def estimate(arm: str) -> float:
            # An arm that has not run yet is likely to take as long as the arms of its kind, fast or slow.
            alike = [each for name, own in known.items() if (name in slow) == (arm in slow) for each in own]
            usual = alike or [each for own in known.values() for each in own]
            return statistics.fmean(known[arm]) if arm in known else statistics.median(usual)

        pending = [self.results.cells[index].arm for index in self._pending()]
        return sum(map(estimate, pending)) if known else None


class ExperimentRun(CellRunner):
    """A run of an experiment, new or resumed, with each cell in a process of its own."""

    def __init__(
        self, results: Results, file: Path, directory: Path, measure: Callable[[Task, Limits], Outcome] | None = None
    ) -> None:
        super().__init__(results, {})
        self.directory = directory
        self._file = file
        self._run_task = measure or run_cell
        self._arms = {arm.name: arm for arm in results.arms}

    def execute(self, progress: CellProgress) -> None:
        """Run the cells that have no outcome yet, and write the results after each.

        Raises StoreError if the disk is full: the files of the cell are removed, earlier figures are kept. Raises
        BusyError if another run uses the folder; UsageError if the results were measured on another machine.
        """
        workload = get_workload(self.results.experiment.workload)
        settings = workload.parse_settings(self.results.experiment.settings)
        parsed = [workload.parse_arm(arm.settings) for arm in self.results.arms]
        with scratch_folder(self.directory or Path()) as scratch:
            # Before anything is written: figures of two machines must not be mixed in one file.
            self._check_machine(scratch)
            self._scratch, self._prepared = scratch, workload.prepare(settings, parsed, scratch)
            # Only from here on, earlier results in the file are replaced.
            self.update(subject=self._prepared[0].subject)
            try:
                self.run_cells(progress)
            finally:
                # Also after an error: earlier figures are kept and summarised.
                complete = not self._pending()
                self.update(complete=complete, finished=_now() if complete else None, summary=summarise(self.results))

    def update(self, **changes: Any) -> None:
        super().update(**changes)
        # After each cell, so that an interrupted run can resume.
        write_results(self.results, self._file)

    def begun(self, cell: CellRecord) -> CellRecord:
        subject, command = self._prepared[self._arms[cell.arm].slow].subject, command_of(self._task(cell))
        cell = replace(cell, status="planned", amount=subject.bytes, subject=subject.description)
        return replace(cell, command=command, started=_now())

    def measure(self, cell: CellRecord) -> Outcome:
        return self._run_task(self._task(cell), self.results.experiment.limits)

    def _task(self, cell: CellRecord) -> Task:
        arm = self._arms[cell.arm]
        # Cells of all other arms may compare themselves with the baseline while they run.
        baselines = (one.settings for one in self._arms.values() if one.role == "baseline" and one is not arm)
        return Task(
            workload=self.results.experiment.workload,
            arm=arm.name,
            settings=arm.settings,
            input=to_builtins(self._prepared[arm.slow].input),
            measures=[measure.name for measure in self.results.measures],
            # A folder per cell: a killed cell cannot leave files for the next one.
            directory=str(self._scratch / f"cell-{cell.order}"),
            block=cell.block,
            baseline=next(baselines, None),
        )

    def _check_machine(self, scratch: Path) -> None:
        found: dict[str, Any] = to_builtins(machine.describe(scratch))
        # The path as it was given: a results file is passed on, and must not show where a user's folders are.
        found["storage"]["path"] = str(scratch)
        found["coder"] = coder.describe()
        before = self.results.environment
        # Results of earlier versions lack some keys.
        if any(before.get(key, found[key]) != found[key] for key in ("versions", "processor", "coder")):
            message = "the machine or its software has changed since this run began"
            raise UsageError(message, remedy="begin again with another --out")
        self.results = replace(self.results, environment=found)


def run_rounds(
    measurements: Mapping[str, Measurement],
    rounds: int,
    *,
    seed: int = 0,
    seconds: float | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Results:
    """Measure every arm once a round in this process, at most ``seconds`` long; the first arm is the baseline."""
    names = list(measurements)
    # The first round always runs. A later one starts only if it would end in time, were it as long as the one before.
    arms = tuple(Arm(name, "arm" if place else "baseline") for place, name in enumerate(names))
    experiment = Experiment("rounds", "", baseline=names[0], runs=rounds, seed=seed, budget=seconds)
    cells = tuple(schedule(experiment, arms))
    run = CellRunner(Results(experiment=experiment, measures=(), arms=arms, cells=cells), measurements)

    def report(cell: CellRecord, done: int, total: int, seconds_left: float | None) -> None:
        if progress is not None and cell.status == "planned":
            progress(done, cell.arm)

    run.run_cells(report)
    return run.results


def arms_left_out(results: Results, block: int) -> set[str]:
    """Return the arms that need no cell in a block that has not begun."""
    every = {arm.name for arm in results.arms}
    # A block that would exceed the budget does not begin, because a part of a block is of little use.
    if _exceeds_budget(results, block):
        return every
    if results.experiment.precision is None:
        return set()
    samples = Samples(results)
    # An arm is not measured again once the interval of its gain is narrow enough (a sequential interval of fixed width;
    # Chow and Robbins, 1965). Stopping depends on the width of the interval only, never on where it lies, so it favours
    # neither outcome.
    enough = {arm.name for arm in results.arms if arm.role != "baseline" and _is_precise(samples, arm.name)}
    failed = {cell.arm for cell in results.cells if cell.status in FINAL}
    wanted = {arm.name for arm in results.arms if arm.role == "arm"} - enough - failed
    # Baseline and control alone are not worth a block.
    return enough if wanted else every


def _is_precise(samples: Samples, arm: str) -> bool:
    precision = samples.experiment.precision
    found = samples.compare(arm, samples.baseline, samples.primary[0])
    if precision is None or found is None or found.low is None or found.high is None or found.n < _FEWEST_BLOCKS:
        return False
    return found.high <= precision * found.low


def _exceeds_budget(results: Results, block: int) -> bool:
    budget = results.experiment.budget
    if budget is None or block == 0:
        return False
    planned = {cell.arm for cell in results.cells if cell.block == block}
    # The best estimate of a block is the one before, with the arms that are still planned.
    before = [cell for cell in results.cells if cell.block == block - 1 and cell.arm in planned]
    spent = sum(cell.seconds or 0.0 for cell in results.cells)
    return spent + sum(cell.seconds or 0.0 for cell in before) > budget


@contextmanager
def scratch_folder(directory: Path) -> Iterator[Path]:
    """Yield an empty, locked folder on the measured disk; BusyError if another run uses it, else StoreError."""
    # On the measured disk: a system's temporary folder may be in memory.
    path = directory / SCRATCH
    try:
        lock = FolderLock(path)
    except BusyError as error:
        remedy = "wait for it, or give --dir"
        raise BusyError("another bench is running in this folder", path=path, remedy=remedy) from error
    # Under the lock: what lies there belongs to runs that were killed.
    with store_errors(path, "use this folder"):
        _clear(path)
    try:
        yield path
    finally:
        _clear(path)
        path.rmdir()
        lock.release()


def _clear(path: Path) -> None:
    for found in path.iterdir():
        remove(found)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
