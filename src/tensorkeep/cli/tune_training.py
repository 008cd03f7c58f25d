"""``tensorkeep tune training``: what training takes of memory, and the techniques and the batch that fit into less."""

from __future__ import annotations

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
from tensorkeep.cli.text import Table, printable
from tensorkeep.errors import DestinationExistsError, StoreError, UsageError
from tensorkeep.train.config.config import TECHNIQUES, Config
from tensorkeep.train.config.recipes import RECIPES, get_recipe
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.run.data import open_data
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.units import format_bytes

_ROWS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "states of the optimizer",
    "average": "average of the weights",
    "copies": "copies of the weights in 16 bits",
    "activations": "activations, kept for the backward pass",
    "recomputed": "activations of the block that is computed again",
    "logits": "logits and their gradients",
    "update": "what an update takes for a while",
    "peak_of_steps": "at the worst moment of a step",
    "evaluation": "what an evaluation takes for a while",
    "peak": "at the worst moment",
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

    What each part of training takes is predicted from its shapes; the cheapest set of techniques that is predicted to
    fit is then trained for some steps and evaluated, in a process of its own. The sequences of a step stay as many:
    what is not computed at once is accumulated. Nothing is written unless --out is given.

    Parameters
    ----------
    recipe
        What is to be trained.
    memory
        What training may take: on a GPU of its memory, on a CPU beyond what the process needs in any case.
    run
        The folder of a run whose configuration is taken instead.
    data
        A folder of tensorkeep data prepare, or what that command takes; the recipe's by default.
    technique
        Techniques that are to be on in any case, with commas between them.
    largest
        Find the largest batch that fits, by trying.
    predict_only
        Try nothing.
    out
        A TOML file for the settings that were found, for tensorkeep train -C.
    """
    if out is not None and out.exists():
        raise DestinationExistsError("there is a file already", path=out, remedy="choose another --out")
    with tempfile.TemporaryDirectory(prefix="tensorkeep-tune-") as folder:
        given = _base(recipe, run, data, technique)
        dataset = open_data(given, RunFolder(Path(folder) / "run"), meter=output.meter)
        config = _with_vocabulary(given, dataset)
        tuned = tune(config, dataset.path, memory, run_trials=not predict_only, largest=largest)
    if out is not None and tuned.fits:
        _write(out, tuned)
    what = recipe or f"the run in {run}"
    command = _command(recipe, data, technique)
    output.show(tuned.as_dict(), lambda: _print(what, command, tuned, out if tuned.fits else None))
    return 0 if tuned.fits else 1


def _base(recipe: str | None, run: Path | None, data: str | None, technique: str | None) -> Config:
    if (recipe is None) == (run is None):
        problem = "neither a recipe nor a run is given" if recipe is None else "a recipe and a run are given"
        raise UsageError(problem, remedy=f"give a recipe ({', '.join(RECIPES)}) or --run FOLDER")
    config = get_recipe(recipe) if recipe is not None else RunFolder(str(run)).record().config
    settings: dict[str, object] = {} if data is None else {"data.source": data}
    return config.changed(settings | {f"{TECHNIQUES}{name}": "on" for name in names_in(technique)})


def _command(recipe: str | None, data: str | None, technique: str | None) -> str:
    """Return the command that trains what was asked for, but for what is found; dots where a run's settings belong."""
    given = {"--data": data, "--technique": technique}
    words = [word for name, value in given.items() if value is not None for word in (name, shlex.quote(value))]
    return " ".join(["tensorkeep train", recipe or "...", *words])


def _with_vocabulary(config: Config, dataset: Dataset) -> Config:
    size = max(config.model.vocab_size, dataset.vocab_size)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, vocab_size=size))


def _print(what: str, command: str, tuned: Tuned, out: Path | None) -> None:
    before, after = tuned.before.ledger.as_dict(), tuned.chosen.ledger.as_dict()
    print(printable(f"{what}, in {format_bytes(tuned.memory)}"))
    rows = [
        (words, format_bytes(before[name]), format_bytes(after[name]))
        for name, words in _ROWS.items()
        if before[name] or after[name]
    ]
    Table(("memory, as predicted", ">as it is", ">as chosen"), rows).show()
    for name in tuned.chosen.ledger.unknown:
        print(f"What {name} takes or spares is not predicted.")
    if tuned.trials:
        print()
        rows = [(f"{one.batch_size}", "fits" if one.fits else "does not fit", one.reason) for one in tuned.trials]
        Table((">batch size", "=trial", "reason"), rows).show()
    print()
    for line in (_verdict(tuned), _measured(tuned), f"{command} {_settings(tuned)}" if tuned.fits else ""):
        if line:
            print(printable(line))
    if out is not None:
        print(printable(f"Written to {out}: {command} -C {shlex.quote(str(out))}"))


def _verdict(tuned: Tuned) -> str:
    if not tuned.predicted_to_fit:
        return (
            "Nothing is predicted to fit. What takes the least is shown: it needs "
            f"{format_bytes(tuned.chosen.ledger.peak)}. Take a smaller model or a shorter context."
        )
    if tuned.before.settings() == tuned.chosen.settings():
        return "It is predicted to fit as it is."
    return f"A step is expected to take {tuned.chosen.cost:.2f} times as long as it does now."


def _measured(tuned: Tuned) -> str:
    if not tuned.tried:
        return ""
    predicted = f"{format_bytes(tuned.chosen.ledger.peak)} were predicted"
    if tuned.measured is None:
        return f"The trial was ended, or refused, beyond {format_bytes(tuned.memory)}; {predicted}."
    word = "fits" if tuned.fits else "does not fit"
    return f"It {word}: the trial took {format_bytes(tuned.measured)}; {predicted}."


def _settings(tuned: Tuned) -> str:
    words = []
    for name, value in tuned.chosen.settings().items():
        each = {f"{name}.{key}": given for key, given in value.items()} if isinstance(value, dict) else {name: value}
        words += [f"--{setting} {given}" for setting, given in each.items()]
    return " ".join(words)


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
