"""``tensorkeep bench``: measure the ways of doing a thing on this machine, and say which is best here, by how much."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.cli.bench_run import (
    Runs,
    Seconds,
    changed,
    chosen_experiment,
    list_experiments,
    measure,
    refuse_changes,
    resume_run,
)
from tensorkeep.cli.options import SIZE, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.errors import UsageError

DEFAULT_EXPERIMENT = "peers"

WORKLOAD = "checkpoint"


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
        What is compared: peers (the default), three-way, six-way, isolated, from-baseline-to-tensorkeep, factorial,
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
        Show the experiments that come with Tensorkeep.
    """
    if list_:
        return list_experiments(WORKLOAD, output)
    if resume:
        given: dict[str, Any] = {
            "--model": model,
            "--from": source,
            "--slow-model": slow_model,
            "--with-optimizer": with_optimizer,
        }
        given |= {"--runs": runs, "--arms": arms, "--seed": seed}
        given |= {"--time-limit": time_limit, "--memory-limit": memory_limit}
        refuse_changes(given)
        return resume_run(experiment, WORKLOAD, DEFAULT_EXPERIMENT, out, directory, output)
    chosen = chosen_experiment(experiment or DEFAULT_EXPERIMENT, WORKLOAD)
    chosen = _on_subject(chosen, model, source, slow_model, with_optimizer)
    chosen = changed(chosen, runs, arms, seed, time_limit, memory_limit)
    return measure(chosen, out, directory, overwrite, output)


def _on_subject(
    chosen: Plan, model: str | None, source: Path | None, slow_model: str | None, with_optimizer: str | None
) -> Plan:
    if source is not None and model is not None:
        raise UsageError("--from and --model exclude each other", remedy="give one of them")
    settings: dict[str, str | None] = {"slow_model": slow_model, "with_optimizer": with_optimizer}
    settings = {name: value for name, value in settings.items() if value is not None}
    if model is not None or source is not None:
        settings |= {"model": model, "from": None if source is None else str(source)}
    return chosen.with_settings(**settings)


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
    """Check published claims about checkpoint formats on this machine.

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
