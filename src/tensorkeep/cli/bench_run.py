"""Running an experiment from the command line: its folder, its progress, its interruption, and its report."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from tensorkeep.bench.experiment.library import read_experiment, shipped
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.results import Cell, Limits, Results
from tensorkeep.bench.results_file import FILE_NAME, read_results
from tensorkeep.bench.run.runner import ExperimentRun, Listener, plan_results
from tensorkeep.cli.output import Output
from tensorkeep.cli.report import deliver
from tensorkeep.cli.text import Table, printable
from tensorkeep.errors import DestinationExistsError, UsageError
from tensorkeep.units import format_seconds

Runs = Annotated[int | None, Parameter(validator=Number(gte=1))]
Seconds = Annotated[int | None, Parameter(validator=Number(gte=1), metavar="SECONDS")]


def chosen_experiment(name: str, workload: str) -> Plan:
    """Return an experiment of a workload, its arms checked.

    Raises UsageError if there is none of that name, it breaks a rule, or is another workload's.
    """
    found = read_experiment(name)
    if (other := found.experiment.workload) != workload:
        raise UsageError(
            f"the experiment {found.experiment.name!r} is one of the workload {other!r}",
            remedy=f"tensorkeep bench {other} --experiment {shlex.quote(name)}",
        )
    return found


def changed(
    chosen: Plan,
    runs: int | None,
    arms: list[str] | None,
    seed: int | None,
    time_limit: int | None,
    memory_limit: int | None,
) -> Plan:
    """Return an experiment with what was asked for instead of what stands in its file."""
    limits = chosen.experiment.limits
    seconds = limits.seconds if time_limit is None else time_limit
    memory = limits.memory_bytes if memory_limit is None else memory_limit
    chosen = chosen.with_design(runs=runs, seed=seed, limits=Limits(seconds, memory))
    return chosen if arms is None else chosen.only(arms)


def list_experiments(workload: str, output: Output) -> int:
    """Show the experiments of a workload."""
    found = shipped(workload)
    rows = [(name, title) for name, title in found.items()]
    output.show({"experiments": found}, lambda: Table(("experiment", "what it compares"), rows).show())
    return 0


def refuse_changes(changed: dict[str, Any]) -> None:
    """Refuse what was asked for differently of a run that goes on."""
    for flag, value in changed.items():
        if value is not None:
            raise UsageError(
                f"{flag} cannot be changed in a run that goes on", remedy="leave it out, or give another --out"
            )


def measure(
    chosen: Plan,
    out: Path | None,
    directory: Path | None,
    overwrite: bool,
    output: Output,
) -> int:
    """Run an experiment from its beginning, and report."""
    folder = out or Path(chosen.experiment.settings.get("save_dir") or f"bench-{chosen.experiment.name}")
    results = folder / FILE_NAME
    if results.exists() and not overwrite:
        raise DestinationExistsError(
            "there are results already",
            path=results,
            remedy="give another --out; --resume goes on with them, --overwrite replaces them",
        )
    if directory is not None:
        chosen = chosen.with_settings(save_dir=str(directory))
    for note in chosen.notes:
        output.note(note)
    return _run(plan_results(chosen, _command()), folder, output)


def resume_run(
    experiment: str | None, workload: str, default: str, out: Path | None, directory: Path | None, output: Output
) -> int:
    """Go on with a run that was interrupted, and report.

    Parameters
    ----------
    experiment : str or None
        That was asked for.
    workload, default : str
        Those of the command: what it measures, and which experiment unless another is asked for.
    """
    folder = out or Path(f"bench-{Path(experiment or default).stem}")
    results = read_results(folder / FILE_NAME, printable=False)
    found = results.experiment.name
    if (other := results.experiment.workload) != workload:
        again = f"tensorkeep bench {other} --resume --out {shlex.quote(str(folder))}"
        raise UsageError(f"holds results of the workload {other!r}", path=folder, remedy=again)
    if experiment is not None and not experiment.endswith(".json") and experiment != found:
        raise UsageError(f"holds results of {found!r}, not of {experiment!r}", path=folder, remedy="give another --out")
    measured = _place(results, folder)
    if directory is not None and directory.absolute() != measured.absolute():
        raise UsageError(f"this run measures in {measured}", remedy="leave out --dir, or start anew with another --out")
    return _run(results, folder, output)


def _place(results: Results, folder: Path) -> Path:
    """Return the folder on the disk that is measured."""
    return Path(results.experiment.settings.get("save_dir") or folder)


def _run(results: Results, folder: Path, output: Output) -> int:
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _measured(results, folder, output)
    finally:
        if made:
            # What was refused before anything came of it leaves nothing behind; a folder that holds something stays.
            with suppress(OSError):
                folder.rmdir()


def _measured(results: Results, folder: Path, output: Output) -> int:
    file = folder / FILE_NAME
    run = ExperimentRun(results, file, _place(results, folder))
    try:
        with _ended_cleanly(), _listener(results, output) as listener:
            run.execute(listener)
    except KeyboardInterrupt:
        if any(cell.status == "ok" for cell in run.results.cells):
            deliver(file, folder / "report.html", output)
        again = f"tensorkeep bench {results.experiment.workload} --resume --out {shlex.quote(str(folder))}"
        output.note(f"the figures so far are kept; to resume: {again}")
        raise
    deliver(file, folder / "report.html", output)
    statuses = {cell.status for cell in run.results.cells}
    return 1 if "gate" in statuses or "ok" not in statuses else 0


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """Let a request to end, as `timeout` and a closed terminal send it, do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _command() -> str:
    return shlex.join(["tensorkeep", *sys.argv[1:]])


@contextmanager
def _listener(results: Results, output: Output) -> Iterator[Listener]:
    if not output.progress or output.quiet or not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        yield _Bar(bar, len(results.cells))


class _Silent:
    """Says nothing."""

    def preparing(self) -> None: ...

    def cell_started(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None: ...

    def cell_ended(self, cell: Cell) -> None: ...


class _Bar:
    """A progress bar with the arm that runs, and the time left as far as it is known."""

    def __init__(self, bar: Any, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, left="")

    def preparing(self) -> None:
        self._bar.update(self._task, description="making what is measured", refresh=True)

    def cell_started(self, cell: Cell, done: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"about {format_seconds(seconds_left)} left"
        text = printable(f"block {cell.block + 1}: {cell.arm}")
        self._bar.update(self._task, description=text, completed=done, total=total, left=left, refresh=True)

    def cell_ended(self, cell: Cell) -> None:
        if cell.status not in ("ok", "not-run"):
            self._bar.console.print(printable(f"{cell.arm}: {cell.status}: {cell.reason}"), markup=False)
