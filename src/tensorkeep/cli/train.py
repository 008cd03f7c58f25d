"""``tensorkeep train``: train a model, resume a run, or branch from one."""

import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from tensorkeep.cli.errors import Interrupted
from tensorkeep.cli.list_techniques import check_names, names_among, names_in
from tensorkeep.cli.list_techniques import list_techniques as show_techniques
from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table
from tensorkeep.cli.train_progress import document, listener, print_start, print_summary
from tensorkeep.errors import NotACheckpointError, OutOfMemoryError, UsageError, is_out_of_memory
from tensorkeep.manager.triggers import OnSignal
from tensorkeep.runs.address import split_address
from tensorkeep.train.config.arguments import given_settings, read_words
from tensorkeep.train.config.config import TECHNIQUES, Config, flat
from tensorkeep.train.config.recipes import RECIPES, get_recipe
from tensorkeep.train.data.corpus import STDLIB
from tensorkeep.train.data.dataset import Dataset
from tensorkeep.train.data.mixture import absolute_source
from tensorkeep.train.initial import InitialWeights, read_initial
from tensorkeep.train.loop import train as run_loop
from tensorkeep.train.run.branch import BranchPoint, branch_point, open_branch_data
from tensorkeep.train.run.data import open_data
from tensorkeep.train.run.folder import RunFolder
from tensorkeep.train.run.resume import current_config, with_schedule_start
from tensorkeep.train.run.setup import manager_of, open_run
from tensorkeep.train.run.world import World


def train(
    *recipe: Annotated[str, Parameter(allow_leading_hyphen=True)],
    data: Annotated[list[str] | None, Parameter(negative="", metavar="SOURCE")] = None,
    out: Path | None = None,
    resume: Annotated[bool, Switch] = False,
    branch: Annotated[str | None, Parameter(metavar="RUN@STEP")] = None,
    init_from: str | None = None,
    technique: str | None = None,
    profile: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    list_recipes: Annotated[bool, Switch] = False,
    list_techniques: Annotated[bool, Switch] = False,
    list_settings: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Train a model, resume a run, or branch from one.

    A resumed run gives the same result as an uninterrupted one, bit for bit. Every setting of the recipe is an option:
    --optim.lr 3e-4 --loop.steps 500; in the file of -C they are in the tables [train.optim] and [train.loop]. Ctrl-C
    saves and stops, as do SIGTERM and closing the terminal; a second Ctrl-C stops at once.

    Parameters
    ----------
    recipe
        The recipe (see --list-recipes), and settings of it.
    data
        A folder of tensorkeep data prepare, or a source that this command takes, which is prepared in the run's folder;
        by default the sources of Python's standard library. Given several times, as SOURCE:WEIGHT, a mixture, of which
        each weight is the fraction of the training windows.
    out
        The folder of the run; runs/RECIPE by default.
    resume
        Resume the run in that folder from its last complete checkpoint, with its settings. Given settings that decide
        the result, such as --loop.steps or --schedule.name, begin a new leg of the run.
    branch
        Start a new run in --out from a checkpoint of another run, by default its last one; settings may change.
    init_from
        Start from the weights of another run (RUN, RUN@STEP) or of a Hugging Face folder (GPT-2, LLaMA, Mistral, Qwen 3
        as safetensors), whose model settings and tokenizer are taken.
    technique
        Techniques to turn on: names separated by commas. Settings of a technique are options of their own:
        --techniques.compile.mode max-autotune.
    profile
        Profile this many steps, from the fourth on, and write a Chrome trace into the folder of the run.
    list_recipes
        Show the recipes.
    list_techniques
        Show the techniques, their expected effect, and whether they can run on this machine.
    list_settings
        Show the settings of the recipe.
    """
    if list_recipes:
        about = {name: (make.__doc__ or "").split("\n", 1)[0].replace("``", "") for name, make in RECIPES.items()}
        output.show({"recipes": about}, Table(("recipe", "what it trains"), list(about.items())).show)
        return
    name, words = read_words(recipe, _options())
    if list_techniques:
        show_techniques(output, words.get("loop.device", "auto"))
        return
    folder = RunFolder(out or Path("runs") / (name or ""))
    resume = resume and (folder.exists() or branch is None)
    point = None if branch is None or resume else _branch_point(branch, out)
    base = _base(name, folder, point, resume=resume)
    if resume:
        _check_origin(folder, branch, init_from)
    initial = None if init_from is None or (resume and folder.exists()) else _initial(init_from, branch)
    if initial is not None:
        base = base.changed(initial.model_settings(base))
    words = {f"{TECHNIQUES}{each}": "on" for each in names_in(technique)} | _with_source(
        words, ",".join(data) if data else None
    )
    given = given_settings(words, file=Path(output.config) if output.config else None)
    check_names(names_among(given))
    config = base.changed(given)
    if "data.source" in given:
        config = config.changed({"data.source": absolute_source(config.data.source)})
    if initial is not None:
        initial.check_source(config.data.source, given)
    if any(name.startswith("schedule.") for name in given) and (point is not None or (resume and folder.exists())):
        step = _last_step(folder, config) if point is None else point.step
        config = with_schedule_start(config, base, given, step)
    if list_settings:
        rows = [(setting, "none" if value is None else str(value)) for setting, value in flat(config.as_dict()).items()]
        output.show(config.as_dict(), Table(("setting", "value"), rows).show)
    else:
        _train(config, folder, given, output, resume=resume, point=point, initial=initial, profile=profile)


def _train(
    config: Config,
    folder: RunFolder,
    given: Mapping[str, object],
    output: Output,
    *,
    resume: bool,
    point: BranchPoint | None,
    initial: InitialWeights | None,
    profile: int,
) -> None:
    def open_on_ranks(world: World) -> Dataset:
        """Return the data of the run; rank 0 prepares it."""
        if not world.is_main:
            return Dataset.open(world.broadcast(""))
        if point is not None:
            dataset = open_branch_data(config, folder, point, given, output.meter)
            world.broadcast(str(dataset.path))
            return dataset
        if config.data.source == STDLIB and "data.source" not in given and not (resume and folder.exists()):
            output.note(
                "no --data is given: training on the sources of Python's standard library; --data FILE takes your text"
            )
        dataset = open_data(config, folder, resume=resume, given=given, meter=output.meter)
        world.broadcast(str(dataset.path))
        return dataset

    opened = open_run(config, folder, open_on_ranks, resume=resume, branch=point, initial=initial)
    with opened as run, stop_on_signals() as stop:
        # Rank 0 prints for all ranks.
        output = output if run.world.is_main else replace(output, quiet=True, json=False)
        print_start(run, output)
        for note in run.notes:
            output.note(note)
        remedy = f"resume with: {resume_command(folder, processes=run.world.size)}"
        with listener(run, output) as shown, _out_of_memory_remedy(folder), _compiler_ended_by_signal(stop, remedy):
            summary = run_loop(run, shown, stop=stop, profile=profile)
    if summary.reason == "stopped":
        raise Interrupted(f"stopped after step {summary.step}, which is saved", remedy=remedy)
    output.show(document(run, summary), lambda: print_summary(run, summary))


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether one of the signals was received.

    A second Ctrl-C or SIGTERM has its usual effect. SIGHUP may be received repeatedly, as both shells and the kernel
    send it; it stays ignored in a process that ignores it (``nohup``).
    """
    with OnSignal(signal.SIGINT, signal.SIGTERM) as signals:
        before = signal.getsignal(signal.SIGHUP)
        if before == signal.SIG_IGN:
            yield lambda: signals.received
            return
        terminals = [number for number in (1, 2) if os.isatty(number)]
        hangups: list[int] = []

        def hang_up(number: int, _: object) -> None:
            hangups.append(number)
            # From now on, output to the terminal would fail.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for terminal in terminals:
                os.dup2(nowhere, terminal)
            os.close(nowhere)

        signal.signal(signal.SIGHUP, hang_up)
        try:
            yield lambda: signals.received or bool(hangups)
        finally:
            signal.signal(signal.SIGHUP, before)


@contextmanager
def _compiler_ended_by_signal(stop: Callable[[], bool], remedy: str) -> Iterator[None]:
    """Raise the end of torch's compiler as an interrupt if a signal was received: Ctrl-C ends every process it starts.

    The step in which it compiled cannot be completed, so that nothing is saved.
    """
    try:
        yield
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and type(reason).__name__ != "CppCompileError":
            reason = reason.__cause__ or reason.__context__
        if reason is None or not stop():
            raise
        raise Interrupted("stopped while torch compiled; nothing is saved of this step", remedy=remedy) from error


@contextmanager
def _out_of_memory_remedy(folder: RunFolder) -> Iterator[None]:
    """Raise running out of memory as an error that names what helps."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        tune = f"tensorkeep tune training --run {shlex.quote(str(folder.path))} --memory SIZE"
        raise OutOfMemoryError(
            f"out of memory during training: {(str(error).splitlines() or ['out of memory'])[0]}",
            path=folder.path,
            remedy="start again with a smaller --loop.batch_size and a larger --loop.accumulate; "
            f"{tune} finds settings that fit",
        ) from error


def resume_command(folder: RunFolder, *, processes: int = 1) -> str:
    """Return the command line that resumes a run."""
    start = "tensorkeep" if processes == 1 else f"torchrun --nproc-per-node {processes} -m tensorkeep"
    return f"{start} train --out {shlex.quote(str(folder.path))} --resume"


def _options() -> list[str]:
    """Return the names of the options of this command."""
    arguments = App(default_command=train).assemble_argument_collection()
    return [name for argument in arguments for name in argument.names if name.startswith("--")]


def _with_source(words: dict[str, str], data: str | None) -> dict[str, str]:
    if data is None:
        return words
    if words.get("data.source", data) != data:
        raise UsageError(
            f"--data is {data!r} and --data.source is {words['data.source']!r}, which is the same setting",
            remedy="give one of them",
        )
    return {**words, "data.source": data}


def _branch_point(address: str, out: Path | None) -> BranchPoint:
    if out is None:
        raise UsageError("a branch is a new run, and no --out is given", remedy="give its folder: --out NEW")
    return branch_point(address)


def _check_origin(folder: RunFolder, branch: str | None, init_from: str | None) -> None:
    """Raise UsageError if a run that exists began otherwise than stated; a step that is not a number may be any."""
    if not folder.exists():
        return
    origin, initial = folder.record().origin, folder.record().initial
    began = "began with new weights"
    if origin is not None:
        began = f"is a branch of {origin.run}@{origin.step}"
    elif initial is not None:
        began = f"began with the weights of {initial.path}" + ("" if initial.step is None else f"@{initial.step}")
    known: dict[str, tuple[str, int | None] | None] = {
        "branch": None if origin is None else (origin.run, origin.step),
        "init-from": None if initial is None else (initial.path, initial.step),
    }
    for option, address in (("branch", branch), ("init-from", init_from)):
        if address is None:
            continue
        place, step = split_address(address)
        found = known[option]
        same = found is not None and os.path.abspath(found[0]) == os.path.abspath(place)
        if not same or (step is not None and step.isdecimal() and found is not None and int(step) != found[1]):
            raise UsageError(
                f"the run {began}, and --{option} is {address}",
                path=folder.path,
                remedy=f"leave --{option} out to resume the run, or give another --out",
            )


def _last_step(folder: RunFolder, config: Config) -> int:
    # The manager of the run: its folder may have lost checkpoints that its object store has.
    last = manager_of(folder, config).latest()
    return 0 if last is None else last.number


def _initial(address: str, branch: str | None) -> InitialWeights:
    if branch is not None:
        raise UsageError(
            "--branch and --init-from are both given",
            remedy="give --branch to continue a run with its optimizer, or --init-from to take the weights only",
        )
    return read_initial(address)


def _base(recipe: str | None, folder: RunFolder, point: BranchPoint | None, *, resume: bool) -> Config:
    if point is not None or (resume and folder.exists()):
        config = current_config(folder.record()) if point is None else point.config
        if recipe is not None and recipe != config.recipe:
            raise UsageError(
                f"is a run of {config.recipe!r}, not of {recipe!r}",
                path=folder.path if point is None else point.folder.path,
                remedy="leave the recipe out, or choose another --out",
            )
        return config
    if recipe is None and resume:
        raise NotACheckpointError(
            "contains no run to resume", path=folder.path, remedy="give the folder of the run as --out"
        )
    if recipe is None:
        raise UsageError("no recipe is given", remedy=f"recipes: {', '.join(RECIPES)}")
    return get_recipe(recipe)
