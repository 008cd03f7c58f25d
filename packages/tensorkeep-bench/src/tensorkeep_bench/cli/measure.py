"""``tensorkeep bench``: compare checkpoint tools or training techniques; progress, interrupts, resumption, report."""

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tensorkeep.errors import DestinationExistsError, TensorkeepError, UsageError
from tensorkeep.ext import format_seconds
from tensorkeep.ext.cli import DEFAULT, SIZE, AtLeastOne, Checkpoint, Counter, Output, Switch, Table, printable
from tensorkeep_bench.checkpoint.files import KEPT, remove
from tensorkeep_bench.cli.report import remove_report, report
from tensorkeep_bench.experiment import ExperimentPlan, read_experiment, shipped
from tensorkeep_bench.results import FILE_NAME, CellRecord, Limits, Results, read_results
from tensorkeep_bench.run.runner import ExperimentRun, plan_results

Model = Annotated[str | None, Parameter(metavar="SPEC")]
_MEASURED = "A folder on the disk to measure; the folder of --out by default. What is written there is removed."
Directory = Annotated[Path | None, Parameter(name="--dir", help=_MEASURED)]
Runs = Annotated[int | None, AtLeastOne, Parameter(help="Number of runs of each arm.")]
Resume = Annotated[bool, Switch, Parameter(help="Continue an interrupted run in --out.")]
Overwrite = Annotated[bool, Switch, Parameter(help="Replace the results in --out.")]
Seconds = Annotated[int | None, AtLeastOne, Parameter(metavar="SECONDS")]

# The flags that are not named like their setting.
_FLAGS = {"seconds": "--equal-time"}


@Parameter(name="*")
@dataclass(frozen=True)
class RunOptions:
    """The options that ``bench checkpoint`` and ``bench training`` share.

    Attributes
    ----------
    experiment : str or None
        What to compare: the name of an experiment or a JSON file; --list shows the names.
    arms : list of str or None
        Run only these arms, and the baseline; may be repeated.
    seed : int or None
        Seed of the random order.
    budget : int or None
        Seconds of the whole experiment: a block begins only if it can end in time. At least one block is measured.
    time_limit : int or None
        Seconds of a cell. A cell that takes longer is ended and reported.
    memory_limit : int or None
        Memory of a cell. A cell that uses more memory is ended and reported.
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


def checkpoint(
    *,
    model: Model = None,
    source: Checkpoint = None,
    slow_model: Model = None,
    with_optimizer: str | None = None,
    keep: Annotated[bool, Switch] = False,
    directory: Directory = None,
    options: RunOptions = DEFAULT_OPTIONS,
    output: Output = DEFAULT,
) -> int:
    """Compare ways to save and load a checkpoint.

    The experiment is peers by default. Every cell is a fresh process. A loaded state is compared with the saved one,
    bit for bit, before its time counts. Results are written after each cell; Ctrl-C keeps them, and --resume continues.

    Parameters
    ----------
    model
        The state to save, such as openllama-3b, openllama-3b:first-100:float16 or openllama-3b:scale=0.1.
    source
        Save the state of this checkpoint instead, of any format.
    slow_model
        A smaller state for the slow arms of an experiment (such as chunks of 64 elements); the report names them.
    with_optimizer
        adamw: add the state of the optimizer, which is twice as large as the weights.
    keep
        Keep the last checkpoint of each arm, in the folder bench-checkpoints of the measured disk.
    """
    if source is not None and model is not None:
        raise UsageError("--from and --model exclude each other", remedy="give only one")
    settings = _given(slow_model=slow_model, with_optimizer=with_optimizer, keep=keep or None)
    if model is not None or source is not None:
        # A state of the user replaces all settings of the experiment that describe a state.
        chosen = {"model": model, "from": None if source is None else str(source)}
        settings = {"slow_model": None, **settings, **chosen}
    return run_experiment("checkpoint", "peers", settings, options, output, directory)


def claims(
    *,
    model: Model = None,
    runs: Runs = None,
    directory: Directory = None,
    out: Path | None = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    output: Output = DEFAULT,
) -> int:
    """Check published claims about checkpoint formats on this machine.

    The same as tensorkeep bench checkpoint --experiment claims. Each claim is reproduced, true in direction only,
    confounded (the arms that isolate its cause contradict it), undecided, or not reproduced.

    Parameters
    ----------
    model
        The state to save; a small OpenLLaMA by default, because chunks of 64 elements are slow.
    out
        The folder of results.json and report.html; bench-claims by default.
    """
    options = RunOptions(experiment="claims", runs=runs, out=out, resume=resume, overwrite=overwrite)
    return checkpoint(model=model, directory=directory, options=options, output=output)


def training(
    *,
    recipe: str | None = None,
    data: str | None = None,
    steps: Annotated[int | None, AtLeastOne] = None,
    equal_time: Seconds = None,
    options: RunOptions = DEFAULT_OPTIONS,
    output: Output = DEFAULT,
) -> int:
    """Compare training techniques and settings of a recipe.

    The experiment is techniques by default. Every cell is a fresh process; each run of an arm has its own seed. A
    technique that was not observed as active, or that changed losses which it must not change, gets no time. Results
    are written after each cell; Ctrl-C keeps them, and --resume continues.

    Parameters
    ----------
    recipe
        The recipe to train; tensorkeep train --list-recipes shows them.
    data
        A folder of tensorkeep data prepare, or a source that this command takes.
    steps
        Number of training steps of each cell.
    equal_time
        Also measure the validation loss after this many seconds of training.
    """
    settings = _given(recipe=recipe, data=data, steps=steps, seconds=equal_time)
    return run_experiment("training", "techniques", settings, options, output)


def _given(**settings: object) -> dict[str, object]:
    return {name: value for name, value in settings.items() if value is not None}


def run_experiment(
    workload: str,
    default: str,
    settings: Mapping[str, object],
    options: RunOptions,
    output: Output,
    directory: Path | None = None,
) -> int:
    """List the experiments of a workload, or run or resume one; return the exit code.

    ``default`` runs if the options name no experiment. ``settings`` replace settings of the experiment.
    """
    if options.list_:
        experiments = shipped(workload)
        rows = list(experiments.items())
        output.show({"experiments": experiments}, Table(("experiment", "what it compares"), rows).show)
        return 0
    if options.resume:
        # All cells of a run need one design and the same settings: otherwise they could not be compared.
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


def _start(plan: ExperimentPlan, options: RunOptions, directory: Path | None, output: Output) -> int:
    folder = options.out or Path(plan.experiment.settings.get("save_dir") or f"bench-{plan.experiment.name}")
    # Hours of measurements are not replaced by accident.
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
    # The results name the command that repeats them.
    planned = plan_results(plan, shlex.join(["tensorkeep", *sys.argv[1:]]))
    kept = _measured_folder(planned, folder).absolute() / KEPT
    replaced = options.overwrite and kept == _kept_by(folder)
    if plan.experiment.settings.get("keep") and kept.exists() and not replaced:
        remedy = f"move {KEPT} away, or measure in another --dir"
        raise DestinationExistsError("another run may have kept these checkpoints", path=kept, remedy=remedy)
    # A page of another kind is found now, not after the measurement.
    remove_report(folder)
    if replaced:
        remove(kept)
    return _run_in(folder, planned, output)


def _resume(workload: str, default: str, options: RunOptions, directory: Path | None, output: Output) -> int:
    asked = options.experiment
    folder = options.out or Path(f"bench-{Path(asked or default).stem}")
    # Texts as the file has them: a setting may name an odd path.
    results = read_results(folder / FILE_NAME, printable=False)
    # The file knows its experiment: only --out is needed to resume.
    found = results.experiment
    if found.workload != workload:
        raise UsageError(
            f"holds results of the workload {found.workload!r}", path=folder, remedy=_resume_command(results, folder)
        )
    # The name of an experiment file need not be the name of the experiment in it.
    if asked is not None and not asked.endswith(".json") and asked != found.name:
        remedy = "choose another --out"
        raise UsageError(f"holds results of {found.name!r}, not of {asked!r}", path=folder, remedy=remedy)
    # Cells of two disks cannot be compared.
    measured = _measured_folder(results, folder)
    if directory is not None and directory.absolute() != measured.absolute():
        remedy = "omit --dir, or start a new run with another --out"
        raise UsageError(f"the interrupted run measures in {measured}", remedy=remedy)
    return _run_in(folder, results, output)


def _measured_folder(results: Results, folder: Path) -> Path:
    return Path(results.experiment.settings.get("save_dir") or folder)


def _kept_by(folder: Path) -> Path | None:
    """Return where the run with results in a folder kept its checkpoints; None if it kept none."""
    # Runs on one disk share the place, so that a run may only remove its own.
    with suppress(TensorkeepError):
        found = read_results(folder, printable=False)
        return _measured_folder(found, folder).absolute() / KEPT if found.experiment.settings.get("keep") else None
    return None


def _resume_command(results: Results, folder: Path) -> str:
    return f"tensorkeep bench {results.experiment.workload} --resume --out {shlex.quote(str(folder))}"


def _run_in(folder: Path, results: Results, output: Output) -> int:
    # An interrupt before the first cell leaves no empty folder.
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    run = ExperimentRun(results, folder / FILE_NAME, _measured_folder(results, folder))
    try:
        with _interrupt_on_signals(), output.counter() as bar:
            bar.update("preparing what is measured")
            run.execute(partial(_show_cell, bar))
    except KeyboardInterrupt:
        # A report of what there is, before the message that ends the command.
        if any(cell.status == "ok" for cell in run.results.cells):
            report(folder, output=output)
        output.note(f"the results so far are kept; to resume: {_resume_command(results, folder)}")
        raise
    finally:
        if is_new:
            with suppress(OSError):  # the folder has files
                folder.rmdir()
    report(folder, output=output)
    # A wrong result fails the command, and so does a run without any result.
    statuses = {cell.status for cell in run.results.cells}
    return 1 if "gate" in statuses or "ok" not in statuses else 0


def _show_cell(bar: Counter, cell: CellRecord, done: int, total: int, seconds_left: float | None) -> None:
    if cell.status == "planned":
        left = "" if seconds_left is None else f", about {format_seconds(seconds_left)} left"
        bar.update(f"block {cell.block + 1}: {cell.arm}{left}", completed=done, total=total)
    elif cell.status not in ("ok", "not-run"):
        bar.print(printable(f"{cell.arm}: {cell.status}: {cell.reason}"))


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # `timeout` sends SIGTERM, and a closed terminal SIGHUP. Unhandled, they would end the process without the report,
    # and leave the cell running.
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
