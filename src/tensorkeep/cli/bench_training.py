"""``tensorkeep bench training``: what each technique does to the speed, the memory and the loss of training, here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

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

DEFAULT_EXPERIMENT = "techniques"
WORKLOAD = "training"


def training(
    *,
    experiment: str | None = None,
    recipe: str | None = None,
    data: str | None = None,
    steps: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    equal_time: Seconds = None,
    runs: Runs = None,
    arms: Annotated[list[str] | None, Parameter(negative="", metavar="ARM")] = None,
    seed: int | None = None,
    time_limit: Seconds = None,
    memory_limit: Annotated[int | None, SIZE] = None,
    out: Path | None = None,
    resume: Annotated[bool, Switch] = False,
    overwrite: Annotated[bool, Switch] = False,
    list_: Annotated[bool, Switch, Parameter(name="--list")] = False,
    output: Output = DEFAULT,
) -> int:
    """Compare training techniques and settings of a recipe.

    Every cell is a fresh process. A technique that was not seen at work, or that moved losses which it must not move,
    has no time. Results are kept after each cell; Ctrl-C keeps them, and --resume goes on.

    Parameters
    ----------
    experiment
        What is compared: techniques (the default), combinations, best-stack, or a JSON file; --list shows them.
    recipe
        What is trained; tensorkeep train --list-recipes shows them.
    data
        A folder of tensorkeep data prepare, or what that command takes.
    steps
        How long each cell trains.
    equal_time
        Measure the validation loss after so many seconds of training, too.
    runs
        How often each arm is run, each time with another seed.
    arms
        Only these; the baseline is always measured.
    seed
        Of the random order.
    time_limit
        A cell that takes longer is ended and told.
    memory_limit
        A cell that holds more memory is ended and told.
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
    settings = {"recipe": recipe, "data": data, "steps": steps, "seconds": equal_time}
    if resume:
        given: dict[str, Any] = {"--recipe": recipe, "--data": data, "--steps": steps, "--equal-time": equal_time}
        given |= {"--runs": runs, "--arms": arms, "--seed": seed}
        given |= {"--time-limit": time_limit, "--memory-limit": memory_limit}
        refuse_changes(given)
        return resume_run(experiment, WORKLOAD, DEFAULT_EXPERIMENT, out, None, output)
    chosen = chosen_experiment(experiment or DEFAULT_EXPERIMENT, WORKLOAD)
    chosen = chosen.with_settings(**{name: value for name, value in settings.items() if value is not None})
    chosen = changed(chosen, runs, arms, seed, time_limit, memory_limit)
    return measure(chosen, out, None, overwrite, output)
