"""Options of ``tensorkeep bench``, and its runs: progress, interrupts, resumption, report."""

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tensorkeep.bench.experiment.library import read_experiment, shipped
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.results import Cell, Limits, Results
from tensorkeep.bench.results_file import FILE_NAME, read_results
from tensorkeep.bench.run.runner import ExperimentRun, Listener, plan_results
from tensorkeep.cli.options import SIZE, AtLeastOne, Switch
from tensorkeep.cli.output import Output
from tensorkeep.cli.report import report
from tensorkeep.cli.text import Table, printable
from tensorkeep.errors import DestinationExistsError, UsageError
from tensorkeep.units import format_seconds

Runs = Annotated[int | None, AtLeastOne, Parameter(help="Number of runs of each arm.")]
Resume = Annotated[bool, Switch, Parameter(help="Continue an interrupted run in --out.")]
Overwrite = Annotated[bool, Switch, Parameter(help="Replace the results in --out.")]
Seconds = Annotated[int | None, AtLeastOne, Parameter(metavar="SECONDS")]

_FLAGS = {"seconds": "--equal-time"}
"""The flags of settings that are not named as their setting."""


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The options that ``bench checkpoint`` and ``bench training`` share.

    Attributes
    ----------
    experiment : str or None
        What to compare: the name of an experiment or a JSON file; --list shows the names.
    arms : list of str or None
        Run only these arms; the baseline is always measured. The option may be repeated.
    seed : int or None
        Seed of the random order.
    budget : int or None
        Seconds of the whole experiment: no block begins that would end later. At least one block is measured.
    time_limit : int or None
        A cell that takes longer is ended and reported.
    memory_limit : int or None
        A cell that uses more memory is ended and reported.
    out : Path or None
        The folder of results.json and report.html; bench-EXPERIMENT by default.
    list_ : bool
        Show the experiments that come with Tensorkeep.
    """

    experiment: str | None = None
    runs: Runs = None
    arms: Annotated[list[str] | None, Parameter(negative="", metavar="ARM")] = None
    seed: int | None = None
    budget: Seconds = None
    time_limit: Seconds = None
    memory_limit: Annotated[int | None, SIZE] = None
    out: Path | None = None
    resume: Resume = False
    overwrite: Overwrite = False
    list_: Annotated[bool, Switch, Parameter(name="--list")] = False


DEFAULT_OPTIONS = RunOptions()


def run_experiment(
    workload: str,
    default: str,
    settings: Mapping[str, object],
    options: RunOptions,
    output: Output,
    directory: Path | None = None,
) -> int:
    """List the experiments of a workload, or run or resume one; return the exit code.

    ``default`` is the experiment that runs if the options name none. ``settings`` replace those of the experiment, and
    ``directory`` is a folder on the disk to measure.
    """
    if options.list_:
        experiments = shipped(workload)
        rows = list(experiments.items())
        output.show({"experiments": experiments}, Table(("experiment", "what it compares"), rows).show)
        return 0
    if options.resume:
        design = {
            name: getattr(options, name) for name in ("runs", "arms", "seed", "budget", "time_limit", "memory_limit")
        }
        for name, value in {**settings, **design}.items():
            if value is not None:
                flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
                remedy = "omit it, or choose another --out"
                raise UsageError(f"{flag} cannot be changed in a resumed run", remedy=remedy)
        return _resume(workload, default, options, directory, output)
    name = options.experiment or default
    plan = read_experiment(name)
    if (other := plan.experiment.workload) != workload:
        raise UsageError(
            f"the experiment {plan.experiment.name!r} measures the workload {other!r}",
            remedy=f"tensorkeep bench {other} --experiment {shlex.quote(name)}",
        )
    plan = plan.with_settings(**settings)
    limits = plan.experiment.limits
    limits = Limits(
        limits.seconds if options.time_limit is None else options.time_limit,
        limits.memory_bytes if options.memory_limit is None else options.memory_limit,
    )
    plan = plan.with_design(runs=options.runs, seed=options.seed, limits=limits, budget=options.budget)
    if options.arms is not None:
        plan = plan.only(options.arms)
    return _start(plan, options, directory, output)


def _start(plan: Plan, options: RunOptions, directory: Path | None, output: Output) -> int:
    folder = options.out or Path(plan.experiment.settings.get("save_dir") or f"bench-{plan.experiment.name}")
    results = folder / FILE_NAME
    if results.exists() and not options.overwrite:
        raise DestinationExistsError(
            "the results file exists already",
            path=results,
            remedy="choose another --out, continue the run with --resume, or replace its results with --overwrite",
        )
    if directory is not None:
        plan = plan.with_settings(save_dir=str(directory))
    for note in plan.notes:
        output.note(note)
    command = shlex.join(["tensorkeep", *sys.argv[1:]])
    return _run_in(folder, plan_results(plan, command), output)


def _resume(workload: str, default: str, options: RunOptions, directory: Path | None, output: Output) -> int:
    asked = options.experiment
    folder = options.out or Path(f"bench-{Path(asked or default).stem}")
    results = read_results(folder / FILE_NAME, printable=False)
    found = results.experiment
    if found.workload != workload:
        raise UsageError(
            f"holds results of the workload {found.workload!r}", path=folder, remedy=_resume_command(results, folder)
        )
    if asked is not None and not asked.endswith(".json") and asked != found.name:
        remedy = "choose another --out"
        raise UsageError(f"holds results of {found.name!r}, not of {asked!r}", path=folder, remedy=remedy)
    measured = _measured_folder(results, folder)
    if directory is not None and directory.absolute() != measured.absolute():
        remedy = "omit --dir, or start a new run with another --out"
        raise UsageError(f"the interrupted run measures in {measured}", remedy=remedy)
    return _run_in(folder, results, output)


def _measured_folder(results: Results, folder: Path) -> Path:
    """Return the folder on the disk that is measured."""
    return Path(results.experiment.settings.get("save_dir") or folder)


def _resume_command(results: Results, folder: Path) -> str:
    return f"tensorkeep bench {results.experiment.workload} --resume --out {shlex.quote(str(folder))}"


def _run_in(folder: Path, results: Results, output: Output) -> int:
    """Run the remaining cells in a folder, which is removed again if it is new and nothing was written to it."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    run = ExperimentRun(results, folder / FILE_NAME, _measured_folder(results, folder))
    try:
        with _interrupt_on_signals(), _progress(output) as progress:
            run.execute(_Bar(progress))
    except KeyboardInterrupt:
        if any(cell.status == "ok" for cell in run.results.cells):
            report(folder, output=output)
        output.note(f"the results so far are kept; to resume: {_resume_command(results, folder)}")
        raise
    finally:
        if is_new:
            with suppress(OSError):  # A folder that is not empty is kept.
                folder.rmdir()
    report(folder, output=output)
    statuses = {cell.status for cell in run.results.cells}
    return 1 if "gate" in statuses or "ok" not in statuses else 0


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP, which `timeout` and a closed terminal send, as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress(output: Output) -> Progress:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    left = TextColumn("{task.fields[left]}")
    console = Console(stderr=True, quiet=not output.draws_progress)
    return Progress(
        *columns, left, console=console, transient=True, auto_refresh=False, disable=not output.draws_progress
    )


class _Bar(Listener):
    """A progress bar with the current arm, and the time left if it can be estimated."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, left="")

    def preparing(self) -> None:
        self._bar.update(self._task, description="preparing what is measured", refresh=True)

    def cell_started(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"about {format_seconds(seconds_left)} left"
        text = printable(f"block {cell.block + 1}: {cell.arm}")
        self._bar.update(self._task, description=text, completed=done, total=total, left=left, refresh=True)

    def cell_ended(self, cell: Cell) -> None:
        if cell.status not in ("ok", "not-run"):
            self._bar.console.print(printable(f"{cell.arm}: {cell.status}: {cell.reason}"), markup=False)
