"""``tensorkeep bench``: compare checkpoint tools or training techniques on this machine."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tensorkeep.cli.bench_run import DEFAULT_OPTIONS, Overwrite, Resume, RunOptions, Runs, Seconds, run_experiment
from tensorkeep.cli.options import AtLeastOne
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.errors import UsageError

Model = Annotated[str | None, Parameter(metavar="SPEC")]
_MEASURED = "A folder on the disk to measure; the folder of --out by default. What is written there is removed."
Directory = Annotated[Path | None, Parameter(name="--dir", help=_MEASURED)]


def checkpoint(
    *,
    model: Model = None,
    source: Annotated[Path | None, Parameter(name="--from", metavar="CHECKPOINT")] = None,
    slow_model: Model = None,
    with_optimizer: str | None = None,
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
        A smaller state for arms that are marked slow (such as chunks of 64 elements); the report names them.
    with_optimizer
        adamw: add the state of the optimizer, twice the size of the weights.
    """
    if source is not None and model is not None:
        raise UsageError("--from and --model exclude each other", remedy="give one of them")
    settings = _given(slow_model=slow_model, with_optimizer=with_optimizer)
    if model is not None or source is not None:
        # Either one replaces all three settings of the experiment.
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

    The same as tensorkeep bench checkpoint --experiment claims. Each claim is reproduced, not reproduced, or
    confounded: the arms that isolate its cause contradict it.

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
