"""``holdfast bench``: measure the ways of doing a thing on this machine, and say which is best here, by how much."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from holdfast.bench import document as documents
from holdfast.bench import workload
from holdfast.bench.experiment import Experiment, Limits, read_experiment, shipped
from holdfast.bench.runner import Listener, execute
from holdfast.cli.options import SIZE, Switch
from holdfast.cli.output import DEFAULT, Output
from holdfast.cli.report import deliver
from holdfast.cli.text import Table, printable
from holdfast.errors import DestinationExistsError, UsageError
from holdfast.units import format_seconds

DEFAULT_EXPERIMENT = "peers"

Runs = Annotated[int | None, Parameter(validator=Number(gte=1))]
Seconds = Annotated[int | None, Parameter(validator=Number(gte=1), metavar="SECONDS")]


def checkpoint(
    *,
    experiment: str | None = None,
    model: Annotated[str | None, Parameter(metavar="SPEC")] = None,
    source: Annotated[Path | None, Parameter(name="--from", metavar="CHECKPOINT")] = None,
    slow_model: Annotated[str | None, Parameter(metavar="SPEC")] = None,
    with_optimizer: str | None = None,
    runs: Runs = None,
    arms: Annotated[list[str] | None, Parameter(negative="", metavar="ARM")] = None,
    seed: int | None = None,
    time_limit: Seconds = None,
    memory_limit: Annotated[int | None, SIZE] = None,
    directory: Annotated[Path | None, Parameter(name="--dir")] = None,
    out: Path | None = None,
    resume: Annotated[bool, Switch] = False,
    overwrite: Annotated[bool, Switch] = False,
    list_: Annotated[bool, Switch, Parameter(name="--list")] = False,
    output: Output = DEFAULT,
) -> int:
    """Compare ways to save and load a checkpoint.

    Every cell is a fresh process; every load is compared with what was saved, bit for bit, before its time counts.
    Results are kept after each cell; Ctrl-C keeps them, and --resume goes on.

    Parameters
    ----------
    experiment
        What is compared: peers (the default), three-way, six-way, isolated, from-baseline-to-holdfast, factorial,
        claims, or a JSON file; --list shows them.
    model
        What is saved, such as openllama-3b, openllama-3b:first-100:float16 or openllama-3b:scale=0.1.
    source
        A checkpoint of your own to take instead, of any format.
    slow_model
        A smaller model for the arms that are marked slow (chunks of 64 elements, for one); they say so.
    with_optimizer
        adamw: add the optimizer's state, twice the weights.
    runs
        How often each arm is run.
    arms
        Only these; the baseline is always measured.
    seed
        Of the random order.
    time_limit
        A cell that takes longer is ended and told.
    memory_limit
        A cell that holds more memory is ended and told.
    directory
        A folder on the disk to measure; the folder of --out by default. What is written there is removed.
    out
        The folder of results.json and report.html; bench-EXPERIMENT by default.
    resume
        Go on with an interrupted run in --out.
    overwrite
        Replace the results in --out.
    list_
        Show the experiments that come with Holdfast.
    """
    if list_:
        return _list(output)
    home = workload.get("checkpoint")
    if resume:
        changed: dict[str, Any] = {
            "--model": model,
            "--from": source,
            "--slow-model": slow_model,
            "--with-optimizer": with_optimizer,
        }
        changed |= {"--runs": runs, "--arms": arms, "--seed": seed}
        changed |= {"--time-limit": time_limit, "--memory-limit": memory_limit}
        _refuse_changes(changed)
        return _resume(experiment, out, directory, output)
    chosen = read_experiment(experiment or DEFAULT_EXPERIMENT, check_settings=lambda given: home.check(given))
    chosen = _on_subject(chosen, model, source, slow_model, with_optimizer)
    chosen = _changed(chosen, runs, arms, seed, time_limit, memory_limit)
    return _measure(chosen, home, out, directory, overwrite, output)


def _on_subject(
    chosen: Experiment, model: str | None, source: Path | None, slow_model: str | None, with_optimizer: str | None
) -> Experiment:
    if source is not None and model is not None:
        raise UsageError("--from and --model exclude each other", remedy="give one of them")
    chosen = chosen.with_model(model, slow_model)
    if source is not None:
        chosen = chosen.with_source(str(source))
    if with_optimizer is not None:
        chosen = chosen.with_settings(with_optimizer=with_optimizer)
    return chosen


def _changed(
    chosen: Experiment,
    runs: int | None,
    arms: list[str] | None,
    seed: int | None,
    time_limit: int | None,
    memory_limit: int | None,
) -> Experiment:
    if runs is not None:
        chosen = chosen.with_runs(runs)
    if arms is not None:
        chosen = chosen.only(arms)
    if seed is not None:
        chosen = chosen.with_seed(seed)
    seconds = chosen.limits.seconds if time_limit is None else time_limit
    memory = chosen.limits.memory_bytes if memory_limit is None else memory_limit
    return chosen.with_limits(Limits(seconds, memory))


def claims(
    *,
    model: Annotated[str | None, Parameter(metavar="SPEC")] = None,
    runs: Runs = None,
    directory: Annotated[Path | None, Parameter(name="--dir")] = None,
    out: Path | None = None,
    resume: Annotated[bool, Switch] = False,
    overwrite: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> int:
    """Check what is often said of these ways against this machine.

    Each claim is reproduced, not reproduced, or confounded: then the arms that isolate its cause say something else.

    Parameters
    ----------
    model
        What is saved; a small OpenLLaMA by default, because chunks of 64 elements are slow.
    runs
        How often each arm is run.
    directory
        A folder on the disk to measure; the folder of --out by default.
    out
        The folder of results.json and report.html; bench-claims by default.
    resume
        Go on with an interrupted run in --out.
    overwrite
        Replace the results in --out.
    """
    return checkpoint(
        experiment="claims",
        model=model,
        runs=runs,
        directory=directory,
        out=out,
        resume=resume,
        overwrite=overwrite,
        output=output,
    )


def _list(output: Output) -> int:
    found = shipped()
    rows = [(name, title) for name, title in found.items()]
    output.show({"experiments": found}, lambda: Table(("experiment", "what it compares"), rows).show())
    return 0


def _refuse_changes(changed: dict[str, Any]) -> None:
    for flag, value in changed.items():
        if value is not None:
            raise UsageError(
                f"{flag} cannot be changed in a run that goes on", remedy="leave it out, or give another --out"
            )


def _measure(
    chosen: Experiment,
    home: workload.Workload,
    out: Path | None,
    directory: Path | None,
    overwrite: bool,
    output: Output,
) -> int:
    folder = out or Path(chosen.settings.get("save_dir") or f"bench-{chosen.name}")
    results = folder / documents.FILE_NAME
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
    return _run(documents.plan(chosen, home, _command()), folder, output)


def _resume(experiment: str | None, out: Path | None, directory: Path | None, output: Output) -> int:
    folder = out or Path(f"bench-{Path(experiment or DEFAULT_EXPERIMENT).stem}")
    document = documents.read(folder / documents.FILE_NAME)
    found = document["experiment"]["name"]
    if experiment is not None and not experiment.endswith(".json") and experiment != found:
        raise UsageError(f"holds results of {found!r}, not of {experiment!r}", path=folder, remedy="give another --out")
    measured = _place(document, folder)
    if directory is not None and directory.absolute() != measured.absolute():
        raise UsageError(f"this run measures in {measured}", remedy="leave out --dir, or start anew with another --out")
    return _run(document, folder, output)


def _place(document: dict[str, Any], folder: Path) -> Path:
    """Return the folder on the disk that is measured."""
    return Path(document["experiment"]["settings"].get("save_dir") or folder)


def _run(document: dict[str, Any], folder: Path, output: Output) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / documents.FILE_NAME
    try:
        with _ended_cleanly(), _listener(document, output) as listener:
            execute(document, results, _place(document, folder), listener)
    except KeyboardInterrupt:
        if any(cell["status"] == "ok" for cell in document["cells"]):
            deliver(results, folder / "report.html", output)
        output.note(
            f"what was measured is kept; to go on: holdfast bench checkpoint --resume --out {shlex.quote(str(folder))}"
        )
        raise
    deliver(results, folder / "report.html", output)
    statuses = {cell["status"] for cell in document["cells"]}
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
    return shlex.join(["holdfast", *sys.argv[1:]])


@contextmanager
def _listener(document: dict[str, Any], output: Output) -> Iterator[Listener]:
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
        yield _Bar(bar, len(document["cells"]))


class _Silent:
    """Says nothing."""

    def preparing(self) -> None: ...

    def begins(self, cell: dict[str, Any], done: int, total: int, seconds_left: float | None) -> None: ...

    def ended(self, cell: dict[str, Any]) -> None: ...


class _Bar:
    """A progress bar with the arm that runs, and the time left as far as it is known."""

    def __init__(self, bar: Any, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, left="")

    def preparing(self) -> None:
        self._bar.update(self._task, description="making what is measured", refresh=True)

    def begins(self, cell: dict[str, Any], done: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"about {format_seconds(seconds_left)} left"
        text = printable(f"block {cell['block'] + 1}: {cell['arm']}")
        self._bar.update(self._task, description=text, completed=done, total=total, left=left, refresh=True)

    def ended(self, cell: dict[str, Any]) -> None:
        if cell["status"] not in ("ok", "not-run"):
            self._bar.console.print(printable(f"{cell['arm']}: {cell['status']}: {cell['reason']}"), markup=False)
