"""``holdfast train``: train a model, or go on with a run; every checkpoint through a `CheckpointManager`."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from holdfast.checkpoint.triggers import OnSignal
from holdfast.cli.failures import Interrupted
from holdfast.cli.options import Switch
from holdfast.cli.output import DEFAULT, Output
from holdfast.cli.text import Table, printable
from holdfast.errors import NotACheckpointError, UsageError
from holdfast.train.config import Config, flat
from holdfast.train.data.dataset import Dataset
from holdfast.train.data.prepare import prepare
from holdfast.train.loop import Listener, Summary
from holdfast.train.loop import train as run_loop
from holdfast.train.recipes import RECIPES, get_recipe
from holdfast.train.run import METRIC, Run, open_run
from holdfast.train.run_folder import RunFolder
from holdfast.train.settings import resolve
from holdfast.units import format_seconds


def train(
    *recipe: Annotated[str, Parameter(allow_leading_hyphen=True)],
    data: str | None = None,
    out: Path | None = None,
    resume: Annotated[bool, Switch] = False,
    list_recipes: Annotated[bool, Switch] = False,
    list_settings: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> int:
    """Train a model, or go on with a run that was stopped or killed.

    It ends where it would have ended without that, bit for bit. Every setting of the recipe is an option: --optim.lr
    3e-4 --loop.steps 500; in a file of -C they stand in tables, [train.optim] and [train.loop]. Ctrl-C saves and stops;
    a second one stops at once.

    Parameters
    ----------
    recipe
        What to train, see --list-recipes; and settings of it.
    data
        A folder of holdfast data prepare, or what that command takes; it is then prepared in the run's folder.
    out
        The run's folder; runs/RECIPE unless given.
    resume
        Go on with the run in that folder after its last whole checkpoint, with its settings.
    list_recipes
        Show the recipes.
    list_settings
        Show the recipe's settings.
    """
    if list_recipes:
        return _show_recipes(output)
    # The first word, unless that is a setting already; when a run goes on, its recipe is known.
    name = recipe[0] if recipe and not recipe[0].startswith("-") else None
    folder = RunFolder(out or Path("runs") / (name or ""))
    config = resolve(
        _base(name, folder, resume=resume),
        recipe[1:] if name else recipe,
        file=Path(output.config) if output.config else None,
    )
    if data is not None:
        # A run is gone on with from wherever.
        config = config.changed({"data.source": os.path.abspath(data) if os.path.exists(data) else data})
    if list_settings:
        return _show_settings(config, output)
    if not resume:
        folder.check_new()
    dataset = _open_data(config, folder, output, resume=resume)
    with OnSignal(signal.SIGINT, signal.SIGTERM) as signals, open_run(config, folder, dataset, resume=resume) as run:
        _say_beginning(run, output)
        with _listener(run, output) as listener:
            summary = run_loop(run, listener, stop=lambda: signals.came)
    if summary.reason == "stopped":
        raise Interrupted(
            f"stopped after step {summary.step}, which is saved", remedy=f"go on: {_again(config, folder)}"
        )
    output.show(_document(run, summary), lambda: _print_summary(run, summary))
    return 0


def _base(recipe: str | None, folder: RunFolder, *, resume: bool) -> Config:
    if resume and folder.exists():
        config = folder.config()
        if recipe is not None and recipe != config.recipe:
            raise UsageError(
                f"is a run of {config.recipe!r}, not of {recipe!r}",
                path=folder.path,
                remedy="leave the recipe out, or choose another --out",
            )
        return config
    if recipe is None and resume:
        raise NotACheckpointError("holds no run to go on with", path=folder.path, remedy="give its folder as --out")
    if recipe is None:
        raise UsageError("no recipe is given", remedy=f"recipes: {', '.join(RECIPES)}")
    return get_recipe(recipe)


def _again(config: Config, folder: RunFolder) -> str:
    return f"holdfast train {config.recipe} --out {folder.path} --resume"


def _open_data(config: Config, folder: RunFolder, output: Output, *, resume: bool) -> Dataset:
    """Open the data of a run, after preparing it in the run's folder where that is still to be done."""
    place = Path(config.data.source)
    if not (place / "data.json").exists():
        place = folder.data
        _prepare(config, folder, output, resume=resume)
    with output.meter(f"checking {place}") as progress:
        return Dataset.open(place, verify=True, progress=progress)


def _prepare(config: Config, folder: RunFolder, output: Output, *, resume: bool) -> None:
    source = config.data.source
    if not (resume and folder.exists() and folder.data.exists()):
        with output.meter(f"preparing {source}") as progress:
            prepare(
                source,
                folder.data,
                tokenizer=config.data.tokenizer,
                vocab_size=config.data.vocab_size,
                validation=config.data.validation,
                overwrite=not folder.exists(),
                progress=progress,
            )


class _Quiet:
    def happened(self, step: int, kind: str, values: dict[str, Any]) -> None: ...


class _Lines:
    """Prints what happens, a line each."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def happened(self, step: int, kind: str, values: dict[str, Any]) -> None:
        text = _in_words(kind, values)
        if text:
            self.show(step, f"step {step:>{len(str(self._steps))}}/{self._steps}  {text}")

    def show(self, step: int, text: str) -> None:
        print(text, file=sys.stderr)


class _Bar(_Lines):
    """Prints what matters above a bar, which shows the rest."""

    def __init__(self, steps: int, bar: Any, task: Any) -> None:
        super().__init__(steps)
        self._bar = bar
        self._task = task

    def happened(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "train":
            self._bar.update(self._task, completed=step, description=_in_words(kind, values))
        else:
            super().happened(step, kind, values)

    def show(self, step: int, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def _in_words(kind: str, values: dict[str, Any]) -> str:
    if kind == "train":
        rates = ""
        if "tokens_per_second" in values:
            rates = f"  {values['tokens_per_second']:,.0f} tokens/s  MFU {values['mfu']:.0%}"
        return f"loss {values['loss']:.4f}{rates}"
    if kind == "evaluate":
        return f"validation loss {values[METRIC]:.4f} (best {values['best']:.4f})"
    if kind == "sample":
        return "sample:\n" + "\n".join(f"    {printable(line)}" for line in values["text"].splitlines())
    return ""


@contextmanager
def _listener(run: Run, output: Output) -> Iterator[Listener]:
    steps = run.config.loop.steps
    if output.quiet or not output.progress:
        yield _Quiet()
    elif not sys.stderr.isatty():
        yield _Lines(steps)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=steps, completed=run.progress.step)
            yield _Bar(steps, bar, task)


def _say_beginning(run: Run, output: Output) -> None:
    model, config = run.config.model, run.config
    output.note(
        f"{config.recipe}: {model.parameter_count():,} parameters on {run.device}; {len(run.dataset.train):,} tokens "
        f"in {run.dataset.path}; the run is in {run.folder.path}"
    )
    if run.progress.step:
        output.note(f"goes on after step {run.progress.step}")


def _document(run: Run, summary: Summary) -> dict[str, Any]:
    return {
        "run": str(run.folder.path),
        **asdict(summary),
        "skipped": run.progress.skipped,
        "peak_flops": run.speed.peak,
    }


def _print_summary(run: Run, summary: Summary) -> None:
    total = sum(summary.seconds.values()) or math.nan
    spent = sorted(summary.seconds.items(), key=lambda item: -item[1])
    rows = [
        ("ended", f"{summary.reason}, after step {summary.step}"),
        ("validation loss", f"{summary.loss:.4f}, best {summary.best:.4f}"),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s, MFU {summary.mfu:.0%} of measured peak"),
        ("time", ", ".join(f"{name} {format_seconds(each)} ({each / total:.0%})" for name, each in spent)),
        ("run", str(run.folder.path)),
    ]
    if run.progress.skipped:
        rows.insert(1, ("skipped updates", str(run.progress.skipped)))
    Table(("", ""), rows).show()
    print(printable(f"next: holdfast generate {run.folder.path} --prompt TEXT"))


def _show_recipes(output: Output) -> int:
    about = {name: (make.__doc__ or "").split("\n", 1)[0] for name, make in RECIPES.items()}
    output.show({"recipes": about}, lambda: Table(("recipe", "what it trains"), list(about.items())).show())
    return 0


def _show_settings(config: Config, output: Output) -> int:
    rows = [(name, "none" if value is None else str(value)) for name, value in flat(config.as_dict()).items()]
    output.show(config.as_dict(), lambda: Table(("setting", "value"), rows).show())
    return 0
