"""``tensorkeep tune``: the fastest settings for saves in a folder; techniques and a batch size for a memory limit."""

import json
import shlex
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

from chatgot.cli.train import technique_names
from chatgot.config.config import TECHNIQUES, Config, flat
from chatgot.config.recipes import RECIPES, get_recipe
from chatgot.run.data import open_data
from chatgot.run.folder import RunFolder
from tensorkeep import __version__
from tensorkeep.errors import DestinationExistsError, NotFoundError, UsageError
from tensorkeep.ext import counted, format_bytes, format_rate, machine
from tensorkeep.ext.checkpoint import options
from tensorkeep.ext.cli import DEFAULT, SIZE, Checkpoint, Output, Size, Switch, Table, print_lines, printable, ratio
from tensorkeep.ext.storage import store_errors
from tensorkeep_bench.tune import checkpoint as tune_saves
from tensorkeep_bench.tune import training as tune_memory

# The parts of the memory ledger, in the order of the table.
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


def checkpoint(
    directory: Path = Path(),
    /,
    *,
    seconds: Annotated[float, Parameter(validator=Number(gt=0))] = tune_saves.DEFAULT_SECONDS,
    size: Size = tune_saves.DEFAULT_BYTES,
    source: Checkpoint = None,
    out: Path | None = None,
    dry_run: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Find the settings that save fastest in a folder.

    A state is saved repeatedly: raw and lossless, with direct I/O and through the page cache, then with more and fewer
    threads. Settings that are faster beyond the noise are written to tensorkeep.toml. A save uses that file only if it
    is given: settings= in Python, -C on the command line.

    Parameters
    ----------
    directory
        The folder that you save checkpoints to; after the measurement it has only tensorkeep.toml in addition.
    seconds
        About how long to measure, in seconds.
    size
        The size of the generated state; a smaller one is used on a slow disk.
    source
        Save the state of this checkpoint instead: the gain of lossless compression depends on the values.
    out
        The file to write; tensorkeep.toml in the folder by default. Its other content is kept.
    dry_run
        Show the file, and do not write it.
    """
    if size < tune_saves.FEWEST_BYTES:
        remedy = f"give at least {format_bytes(tune_saves.FEWEST_BYTES)}"
        raise UsageError(f"--size {format_bytes(size)} is too small", remedy=remedy)
    if not directory.is_dir():
        raise NotFoundError("the folder does not exist", path=directory, remedy="give the folder that you save to")
    path = directory / options.FILE_NAME if out is None else out
    # Before the measurement, which takes long: a file that cannot be changed or written is refused.
    tune_saves.with_table(tune_saves.read_text(path), {"compression": "none"}, [], path)
    if not dry_run:
        tune_saves.check_writable(path)
    with output.status("building the state") as status:
        tuned = tune_saves.tune(
            directory,
            seconds=seconds,
            nbytes=size,
            source=source,
            progress=lambda _, name: status(f"measuring: {name}"),
        )
    # The result holds only for this machine, which the file names.
    found = {"processor": machine.processor(), "storage": machine.storage(directory)}
    table, comments = tuned.choice.table(), _comments(tuned, found)
    if dry_run:
        text = tune_saves.with_table(tune_saves.read_text(path), table, comments, path)
    else:
        text = tune_saves.write_tuned(path, table, comments)
    document = {"directory": str(directory), **tuned.as_dict(), "environment": found}
    output.show(
        {**document, "file": str(path), "written": not dry_run, "text": text},
        lambda: _print_rates(tuned, found, path, text if dry_run else None),
    )


def _machine(found: dict[str, Any]) -> str:
    cores = counted(found["processor"]["usable_cores"], "core")
    return f"{cores} of {found['processor']['model']}, {found['storage']['file_system'] or 'unknown file system'}"


def _comments(tuned: tune_saves.TunedSave, found: dict[str, Any]) -> list[str]:
    lines = [
        f"tensorkeep {__version__} tune checkpoint, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {_machine(found)}",
        f"{format_bytes(tuned.nbytes)}: {tuned.subject}",
        "uncompressed bytes per second until durable, median (lowest, highest):",
    ]
    for stage in tuned.stages:
        rows = [stage.row(setting) for setting in stage.settings]
        width = max(len(row["name"]) for row in rows)
        lines += [f"  {row['name'].ljust(width)}  {_rates(row)}  {row['verdict']}" for row in rows]
    return [printable(line) for line in [*lines, tuned.sentence()]]


def _rates(row: dict[str, Any]) -> str:
    if row["rate"] is None:
        return "-"
    return f"{format_rate(row['rate'], 1)} ({format_rate(row['rate_low'], 1)}, {format_rate(row['rate_high'], 1)})"


def _print_rates(tuned: tune_saves.TunedSave, found: dict[str, Any], path: Path, text: str | None) -> None:
    print_lines(f"{format_bytes(tuned.nbytes)}: {tuned.subject}", f"{_machine(found)}: {found['storage']['path']}")
    heads = ("=settings", ">durable save", ">smaller", ">relative to the first", "=verdict")
    for stage in tuned.stages:
        print()
        rows = [_cells(stage.row(setting), stage.nbytes) for setting in stage.settings]
        Table(heads, rows, spare=("smaller",)).show()
        print_lines(f"{counted(stage.rounds.blocks, 'round')}, each in random order: median (lowest, highest)")
    print_lines("", tuned.sentence())
    if text is None:
        print_lines(
            f"Written to {path}. To use it: tensorkeep.save(..., settings={str(path)!r}), and the same",
            f"for save_async and CheckpointManager; -C {path} for tensorkeep convert and train.",
        )
    else:
        print_lines(f"Not written; {path} would contain:", "", *text.splitlines())


def _cells(row: dict[str, Any], nbytes: int) -> tuple[str, ...]:
    found = row["comparison"]
    interval = f" ({found['low']:.2f}, {found['high']:.2f})" if found and found["low"] is not None else ""
    against = f"{found['gain']:.2f}x{interval}" if found else "-"
    return row["name"], _rates(row), ratio(nbytes, int(row["stored_bytes"] or 0)), against, row["verdict"]


@Parameter(name="*")
@dataclass(frozen=True)
class TunedRun:
    """The options that describe the run to tune.

    Attributes
    ----------
    run
        Use the configuration of the run in this folder instead of a recipe.
    data
        A folder of tensorkeep data prepare, or a source that this command takes; the recipe's source by default.
    technique
        Techniques that must be on: names separated by commas.
    """

    run: Path | None = None
    data: str | None = None
    technique: str | None = None

    def config(self, recipe: str | None) -> Config:
        if (recipe is None) == (self.run is None):
            problem = "neither a recipe nor a run is given" if recipe is None else "both a recipe and a run are given"
            raise UsageError(problem, remedy=f"give a recipe ({', '.join(RECIPES)}) or --run FOLDER")
        config = get_recipe(recipe) if recipe is not None else RunFolder(str(self.run)).record().config
        settings: dict[str, object] = {} if self.data is None else {"data.source": self.data}
        return config.changed(settings | {f"{TECHNIQUES}{name}": "on" for name in technique_names(self.technique)})

    def command(self, recipe: str | None) -> str:
        """Return the command that trains with these options; ``...`` stands for the recipe of ``--run``."""
        given = {"--data": self.data, "--technique": self.technique}
        words = [word for name, value in given.items() if value is not None for word in (name, shlex.quote(value))]
        return " ".join(["tensorkeep train", recipe or "...", *words])


NOTHING_GIVEN = TunedRun()


def training(
    recipe: str | None = None,
    /,
    *,
    memory: Annotated[int, SIZE],
    options: TunedRun = NOTHING_GIVEN,
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
        # In a folder that is removed again: the data is for the trials only.
        given = options.config(recipe)
        dataset = open_data(given, RunFolder(Path(folder) / "run"), meter=output.meter)
        # The vocabulary of the data decides the size of the embedding and the logits.
        config = msgspec.structs.replace(given, model=given.model.with_tokens(dataset.vocab_size))
        tuned = tune_memory.tune(config, dataset.path, memory, run_trials=not predict_only, largest=largest)
    if out is not None and tuned.fits:
        _write(out, tuned)
    what = recipe or f"the run in {options.run}"
    command = options.command(recipe)
    output.show(tuned.as_dict(), lambda: _print_memory(what, command, tuned, out if tuned.fits else None))
    return 0 if tuned.fits else 1


def _print_memory(what: str, command: str, tuned: tune_memory.TunedTraining, out: Path | None) -> None:
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


def _verdict(tuned: tune_memory.TunedTraining) -> str:
    if not tuned.predicted_to_fit:
        return (
            "No choice is predicted to fit. The one with the least memory is shown: it needs "
            f"{format_bytes(tuned.chosen.ledger.peak)}. Use a smaller model or a shorter context."
        )
    if tuned.before.settings() == tuned.chosen.settings():
        return "It is predicted to fit without a change."
    return f"A step is expected to take {tuned.chosen.cost:.2f} times as long as it does now."


def _measured(tuned: tune_memory.TunedTraining) -> str:
    if not tuned.tried:
        return ""
    predicted = f"the prediction was {format_bytes(tuned.chosen.ledger.peak)}"
    if tuned.measured is None:
        return f"The trial needed more than {format_bytes(tuned.memory)} and was ended; {predicted}."
    word = "fits" if tuned.fits else "does not fit"
    return f"It {word}: the trial used {format_bytes(tuned.measured)}; {predicted}."


def _write(path: Path, tuned: tune_memory.TunedTraining) -> None:
    # JSON and TOML write numbers, booleans and strings alike.
    lines = [f"{name} = {json.dumps(value)}" for name, value in flat(tuned.chosen.settings()).items()]
    with store_errors(path, "write the settings"):
        path.write_text("\n".join(["[train]", *lines, ""]))
