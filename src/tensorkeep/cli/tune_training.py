"""``tensorkeep tune training``: techniques and batch size for a memory limit."""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec

from tensorkeep.bench.tune.training import Tuned, tune
from tensorkeep.cli.list_techniques import names_in
from tensorkeep.cli.options import SIZE, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.errors import DestinationExistsError, StoreError, UsageError
from tensorkeep.train.config.config import TECHNIQUES, Config, flat
from tensorkeep.train.config.recipes import RECIPES, get_recipe
from tensorkeep.train.run.data import open_data
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.units import format_bytes

_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "average": "average of the weights",
    "copies": "16-bit copies of the weights",
    "activations": "activations kept for the backward pass",
    "recomputed": "activations of the recomputed block",
    "logits": "logits and their gradients",
    "update": "temporary memory of the optimizer step",
    "peak_of_steps": "peak of a training step",
    "evaluation": "temporary memory of an evaluation",
    "peak": "peak",
}


def training(
    recipe: str | None = None,
    /,
    *,
    memory: Annotated[int, SIZE],
    run: Path | None = None,
    data: str | None = None,
    technique: str | None = None,
    largest: Annotated[bool, Switch] = False,
    predict_only: Annotated[bool, Switch] = False,
    out: Path | None = None,
    output: Output = DEFAULT,
) -> int:
    """Find the techniques and the batch size that fit into a memory limit.

    The memory of weights, gradients, optimizer states and activations is predicted from their shapes. The cheapest set
    of techniques that is predicted to fit is then tried: a separate process trains for some steps and evaluates. The
    number of sequences per step does not change: a smaller batch accumulates gradients. Only --out writes a file.

    Parameters
    ----------
    recipe
        The recipe to train; tensorkeep train --list-recipes shows them.
    memory
        The limit: of the GPU's memory, or on a CPU of the memory that training adds to an idle process.
    run
        Use the configuration of the run in this folder instead of a recipe.
    data
        A folder of tensorkeep data prepare, or a source that this command takes; the recipe's source by default.
    technique
        Techniques that must be on: names separated by commas.
    largest
        Find the largest batch that fits, with several trials.
    predict_only
        Predict only, without a trial.
    out
        Write the settings to this TOML file, for tensorkeep train -C.
    """
    if out is not None and out.exists():
        raise DestinationExistsError("the file exists already", path=out, remedy="choose another --out")
    with tempfile.TemporaryDirectory(prefix="tensorkeep-tune-") as folder:
        given = _base(recipe, run, data, technique)
        dataset = open_data(given, RunFolder(Path(folder) / "run"), meter=output.meter)
        config = msgspec.structs.replace(given, model=given.model.with_tokens(dataset.vocab_size))
        tuned = tune(config, dataset.path, memory, run_trials=not predict_only, largest=largest)
    if out is not None and tuned.fits:
        _write(out, tuned)
    what = recipe or f"the run in {run}"
    command = _command(recipe, data, technique)
    output.show(tuned.as_dict(), lambda: _print(what, command, tuned, out if tuned.fits else None))
    return 0 if tuned.fits else 1


def _base(recipe: str | None, run: Path | None, data: str | None, technique: str | None) -> Config:
    if (recipe is None) == (run is None):
        problem = "neither a recipe nor a run is given" if recipe is None else "both a recipe and a run are given"
        raise UsageError(problem, remedy=f"give a recipe ({', '.join(RECIPES)}) or --run FOLDER")
    config = get_recipe(recipe) if recipe is not None else RunFolder(str(run)).record().config
    settings: dict[str, object] = {} if data is None else {"data.source": data}
    return config.changed(settings | {f"{TECHNIQUES}{name}": "on" for name in names_in(technique)})


def _command(recipe: str | None, data: str | None, technique: str | None) -> str:
    """Return the command that trains with these options, without the settings found; ``...`` instead of --run."""
    given = {"--data": data, "--technique": technique}
    words = [word for name, value in given.items() if value is not None for word in (name, shlex.quote(value))]
    return " ".join(["tensorkeep train", recipe or "...", *words])


def _print(what: str, command: str, tuned: Tuned, out: Path | None) -> None:
    before, after = tuned.before.ledger.as_dict(), tuned.chosen.ledger.as_dict()
    print_lines(f"{what}, in {format_bytes(tuned.memory)}")
    rows = [
        (words, format_bytes(before[name]), format_bytes(after[name]))
        for name, words in _ROWS.items()
        if before[name] or after[name]
    ]
    Table(("predicted memory", ">now", ">chosen"), rows).show()
    for name in tuned.chosen.ledger.unknown:
        print(f"The effect of {name} on memory is not predicted.")
    if tuned.trials:
        print()
        rows = [(f"{one.batch_size}", "fits" if one.fits else "does not fit", one.reason) for one in tuned.trials]
        Table((">batch size", "=trial", "reason"), rows).show()
    settings = " ".join(f"--{name} {value}" for name, value in flat(tuned.chosen.settings()).items())
    lines = _verdict(tuned), _measured(tuned), f"{command} {settings}" if tuned.fits else ""
    print_lines("", *filter(None, lines))
    if out is not None:
        print_lines(f"Written to {out}: {command} -C {shlex.quote(str(out))}")


def _verdict(tuned: Tuned) -> str:
    if not tuned.predicted_to_fit:
        return (
            "No choice is predicted to fit. The one with the least memory is shown: it needs "
            f"{format_bytes(tuned.chosen.ledger.peak)}. Use a smaller model or a shorter context."
        )
    if tuned.before.settings() == tuned.chosen.settings():
        return "It is predicted to fit without a change."
    return f"A step is expected to take {tuned.chosen.cost:.2f} times as long as it does now."


def _measured(tuned: Tuned) -> str:
    if not tuned.tried:
        return ""
    predicted = f"the prediction was {format_bytes(tuned.chosen.ledger.peak)}"
    if tuned.measured is None:
        return f"The trial needed more than {format_bytes(tuned.memory)} and was ended; {predicted}."
    word = "fits" if tuned.fits else "does not fit"
    return f"It {word}: the trial used {format_bytes(tuned.measured)}; {predicted}."


def _write(path: Path, tuned: Tuned) -> None:
    """Write the settings as ``tensorkeep train -C`` reads them."""
    loop = tuned.chosen.config.loop
    lines = ["[train.loop]", f"batch_size = {loop.batch_size}", f"accumulate = {loop.accumulate}"]
    added = tuned.chosen.added
    lines += ["", "[train.techniques]", *(f'{name} = "on"' for name, settings in added.items() if not settings)]
    for name, settings in added.items():
        if settings:
            lines += ["", f"[train.techniques.{name}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    try:
        path.write_text("\n".join(lines) + "\n")
    except OSError as error:
        raise StoreError(f"cannot write the settings: {error.strerror}", path=path) from error
