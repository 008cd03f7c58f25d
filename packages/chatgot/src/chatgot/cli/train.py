"""``tensorkeep train``: train a model, resume a run, or branch from one; its progress and its lists."""

import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from chatgot.config.config import TECHNIQUES, Config, flat, given_settings, ignored_variables, read_words
from chatgot.config.recipes import RECIPES, get_recipe
from chatgot.data.corpus import STDLIB
from chatgot.data.dataset import Dataset
from chatgot.data.prepare import absolute_source
from chatgot.loop import EventListener, Silent, TrainingSummary
from chatgot.loop import train as run_loop
from chatgot.run.data import open_branch_data, open_data
from chatgot.run.folder import METRIC, RunFolder
from chatgot.run.resume import BranchPoint, branch_point, current_config, with_schedule_start
from chatgot.run.setup import manager_of, open_run
from chatgot.run.state import OpenRun
from chatgot.run.weights import InitialWeights, read_initial
from chatgot.step.device import chosen_device
from chatgot.step.world import World
from chatgot.techniques.base import TECHNIQUE_CLASSES, Machine
from chatgot.techniques.stack import COMBINATIONS, expanded
from tensorkeep import OnSignal
from tensorkeep.errors import (
    NotACheckpointError,
    OutOfMemoryError,
    UnsupportedError,
    UsageError,
    first_line,
    is_out_of_memory,
)
from tensorkeep.ext import counted, format_bytes, format_seconds
from tensorkeep.ext.checkpoint import split_address
from tensorkeep.ext.cli import (
    DEFAULT,
    AtLeastZero,
    Counter,
    Interrupted,
    Output,
    Switch,
    Table,
    columns,
    counter,
    print_lines,
    printable,
)

# Seconds between two lines about training steps without a progress bar, so that a log file stays short.
_SECONDS_BETWEEN = 5.0
# The summary advises to evaluate fewer tokens if evaluations took more than half of a run, and at least this long.
_LONG_EVALUATION_SECONDS = 10.0
_INDENT = "    "


@Parameter(name="*")
@dataclass(frozen=True)
class StartOptions:
    """The options that choose where a run begins.

    Attributes
    ----------
    out
        The folder of the run; runs/RECIPE by default.
    resume
        Resume the run in that folder from its last complete checkpoint, with its settings. Given settings that decide
        the result, such as --loop.steps or --schedule.name, begin a new segment of the run.
    branch
        Start a new run in --out from a checkpoint of another run, by default its last one; settings may change.
    init_from
        Start from the weights of another run (RUN, RUN@STEP) or of a Hugging Face folder (GPT-2, LLaMA, Mistral, Qwen 3
        as safetensors), and take over its model settings and tokenizer.
    """

    out: Path | None = None
    resume: Annotated[bool, Switch] = False
    branch: Annotated[str | None, Parameter(metavar="RUN@STEP")] = None
    init_from: str | None = None


NEW_RUN = StartOptions()


def train(
    *recipe: Annotated[str, Parameter(allow_leading_hyphen=True)],
    data: Annotated[list[str] | None, Parameter(negative="", metavar="SOURCE")] = None,
    start: StartOptions = NEW_RUN,
    technique: str | None = None,
    profile: Annotated[int, AtLeastZero] = 0,
    list_recipes: Annotated[bool, Switch] = False,
    list_techniques: Annotated[bool, Switch] = False,
    list_settings: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Train a model, resume a run, or branch from one.

    A resumed run gives the same result as an uninterrupted one: bit for bit on a CPU. On a GPU, fused attention kernels
    add gradients in any order, so the last bits may differ. Every setting of the recipe is an option:
    --optim.lr 3e-4 --loop.steps 500; in the file of -C they are in the tables [train.optim] and [train.loop]. Ctrl-C
    saves and stops, as do SIGTERM and closing the terminal; a second Ctrl-C stops at once.

    Parameters
    ----------
    recipe
        The recipe (see --list-recipes), and its settings.
    data
        A folder of tensorkeep data prepare, or a source that this command takes, which is prepared in the run's folder;
        by default the sources of Python's standard library. Given several times as SOURCE:WEIGHT, a mixture; a weight
        is the fraction of the training windows.
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
        _list_techniques(output, words.get("loop.device", "auto"))
        return
    if data:
        source = ",".join(data)
        if words.get("data.source", source) != source:
            raise UsageError(
                f"--data is {source!r} and --data.source is {words['data.source']!r}, which is the same setting",
                remedy="give only one",
            )
        words["data.source"] = source
    words = {f"{TECHNIQUES}{each}": "on" for each in technique_names(technique)} | words
    training = _training(name, words, start, output)
    if list_settings:
        settings = training.config.as_dict()
        rows = [(setting, "none" if value is None else str(value)) for setting, value in flat(settings).items()]
        output.show(settings, Table(("setting", "value"), rows).show)
    else:
        training.run(profile)


@dataclass(frozen=True)
class _Training:
    config: Config
    folder: RunFolder
    given: Mapping[str, object]
    output: Output
    resume: bool
    point: BranchPoint | None
    initial: InitialWeights | None

    def run(self, profile: int) -> None:
        opened = open_run(
            self.config, self.folder, self._open_data, resume=self.resume, branch=self.point, initial=self.initial
        )
        # Signals are handled only while a run can save.
        with opened as run, stop_on_signals() as stop:
            # Rank 0 prints for all ranks.
            output = self.output if run.world.is_main else replace(self.output, quiet=True, json=False)
            _print_start(run, output)
            for message in ignored_variables():
                output.note(f"warning: {message}")
            for note in run.notes:
                output.note(note)
            remedy = f"resume with: {resume_command(self.folder, processes=run.world.size)}"
            with _listener(run, output) as shown, _errors_explained(self.folder, stop, remedy):
                summary = run_loop(run, shown, stop=stop, profile=profile)
        if summary.reason == "stopped":
            raise Interrupted(f"stopped after step {summary.step}, which is saved", remedy=remedy)
        output.show(document(run, summary), lambda: print_summary(run, summary))

    def _open_data(self, world: World) -> Dataset:
        # The data is prepared once: other ranks wait for the path.
        if not world.is_main:
            return Dataset.open(world.broadcast(""))
        config, given, meter = self.config, self.given, self.output.meter
        if self.point is not None:
            dataset = open_branch_data(config, self.folder, self.point, given, meter)
        else:
            resumes = self.resume and self.folder.exists()
            if config.data.source == STDLIB and "data.source" not in given and not resumes:
                self.output.note(
                    "no --data is given: training on the sources of Python's standard library; "
                    "--data FILE takes your text"
                )
            dataset = open_data(config, self.folder, resume=self.resume, given=given, meter=meter)
        world.broadcast(str(dataset.path))
        return dataset


def _training(recipe: str | None, words: dict[str, str], start: StartOptions, output: Output) -> _Training:
    """Return the run of the options; ``words`` are settings from the command line."""
    # `train RECIPE --resume` finds the folder of the recipe.
    folder = RunFolder(start.out or Path("runs") / (recipe or ""))
    # `--branch --resume` branches at the first call, and resumes when it is repeated.
    resume = start.resume and (folder.exists() or start.branch is None)
    resumes = resume and folder.exists()
    point = initial = None
    if resumes:
        _check_origin(folder, start)
        base = current_config(folder.record())
    elif start.branch is not None:
        if start.out is None:
            raise UsageError("a branch is a new run, and no --out is given", remedy="give its folder: --out NEW")
        if start.init_from is not None:
            raise UsageError(
                "--branch and --init-from are both given",
                remedy="give --branch to continue a run with its optimizer, or --init-from to take the weights only",
            )
        point = branch_point(start.branch)
        base = point.config
    elif recipe is not None:
        base = get_recipe(recipe)
    elif resume:
        raise NotACheckpointError(
            "contains no run to resume", path=folder.path, remedy="give the folder of the run as --out"
        )
    else:
        raise UsageError("no recipe is given", remedy=f"recipes: {', '.join(RECIPES)}")
    if recipe is not None and recipe != base.recipe:
        raise UsageError(
            f"is a run of {base.recipe!r}, not of {recipe!r}",
            path=folder.path if point is None else point.folder.path,
            remedy="leave the recipe out, or choose another --out",
        )
    if start.init_from is not None and not resumes:
        initial = read_initial(start.init_from)
        base = base.changed(initial.model_settings(base))
    # By name, so that later steps know which settings the user chose.
    given = (
        given_settings(words, file=Path(output.config), options=_options()) if output.config else given_settings(words)
    )
    _check_techniques(each.removeprefix(TECHNIQUES).partition(".")[0] for each in given if each.startswith(TECHNIQUES))
    config = base.changed(given)
    if "data.source" in given:
        config = config.changed({"data.source": absolute_source(config.data.source)})
    if initial is not None:
        initial.check_source(config.data.source, given)
    if any(name.startswith("schedule.") for name in given) and (point is not None or resumes):
        # A new schedule begins at the first step of its segment. For the last step, not only the folder is asked: the
        # object store of the run may have steps that the folder has lost.
        last = None if point is not None else manager_of(folder, config).latest()
        step = point.step if point is not None else 0 if last is None else last.number
        config = with_schedule_start(config, base, given, step)
    return _Training(config, folder, given, output, resume, point, initial)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT, SIGTERM or SIGHUP was received.

    A second Ctrl-C or SIGTERM has its usual effect.
    """
    with OnSignal(signal.SIGINT, signal.SIGTERM) as signals:
        before = signal.getsignal(signal.SIGHUP)
        # `nohup` makes the process ignore SIGHUP, which must stay so.
        if before == signal.SIG_IGN:
            yield lambda: signals.received
            return
        # Only terminals: a log file of stdout stays open.
        terminals = [number for number in (1, 2) if os.isatty(number)]
        hangups: list[int] = []

        def hang_up(number: int, _: object) -> None:
            # May be called repeatedly: both the shell and the kernel send SIGHUP.
            hangups.append(number)
            # The terminal is gone. Output to it would fail with EIO, and end the run before it saves.
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
def _errors_explained(folder: RunFolder, was_stopped: Callable[[], bool], remedy: str) -> Iterator[None]:
    """Raise OutOfMemoryError where torch or Python ran out of memory; Interrupted if Ctrl-C ended torch's compiler."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            tune = f"tensorkeep tune training --run {shlex.quote(str(folder.path))} --memory SIZE"
            raise OutOfMemoryError(
                f"out of memory during training: {first_line(error)}",
                path=folder.path,
                remedy="start again with a smaller --loop.batch_size and a larger --loop.gradient_accumulation_steps; "
                f"{tune} finds settings that fit",
            ) from error
        reason: BaseException | None = error
        # The compiler is a process, which Ctrl-C in the terminal ends as well. Its error is recognised by name, because
        # importing the class would import the compiler.
        while reason is not None and type(reason).__name__ != "CppCompileError":
            reason = reason.__cause__ or reason.__context__
        # Without a signal it is an error of the compiler.
        if reason is None or not was_stopped():
            raise
        # The step cannot be completed without the compiled code, so that nothing is saved.
        raise Interrupted("stopped while torch compiled; nothing is saved of this step", remedy=remedy) from error


def resume_command(folder: RunFolder, *, processes: int = 1) -> str:
    start = "tensorkeep" if processes == 1 else f"torchrun --nproc-per-node {processes} -m tensorkeep"
    return f"{start} train --out {shlex.quote(str(folder.path))} --resume"


def _options() -> list[str]:
    arguments = App(default_command=train).assemble_argument_collection()
    return [name for argument in arguments for name in argument.names if name.startswith("--")]


def _check_origin(folder: RunFolder, start: StartOptions) -> None:
    """Raise UsageError if ``--branch`` or ``--init-from`` contradict the run's record."""
    origin, initial, began = folder.record().origin, folder.record().initial, "began with new weights"
    if origin is not None:
        began = f"is a branch of {origin.run}@{origin.step}"
    elif initial is not None:
        began = f"began with the weights of {initial.path}" + ("" if initial.step is None else f"@{initial.step}")
    # The same command line may start a run and resume it, so that both options can be given again.
    for option, address, found in (
        ("branch", start.branch, None if origin is None else (origin.run, origin.step)),
        ("init-from", start.init_from, None if initial is None else (initial.path, initial.step)),
    ):
        if address is None:
            continue
        place, step = split_address(address)
        same = found is not None and os.path.abspath(found[0]) == os.path.abspath(place)
        # RUN@best and RUN@latest fit any step, because they name other steps later.
        if not same or (step is not None and step.isdecimal() and found is not None and int(step) != found[1]):
            raise UsageError(
                f"the run {began}, and --{option} is {address}",
                path=folder.path,
                remedy=f"leave --{option} out to resume the run, or give another --out",
            )


def _print_start(run: OpenRun, output: Output) -> None:
    model, config = run.config.model, run.config
    output.note(
        f"{config.recipe}: {model.parameter_count():,} parameters on {run.device}; {len(run.dataset.train):,} tokens "
        f"in {run.dataset.path}; writing to {run.folder.path}"
    )
    # A branch is announced by a note of the run.
    if run.progress.step and run.folder.record().resumed:
        output.note(f"resumes after step {run.progress.step}")


class ProgressLines:
    """Prints events as lines, on stderr or above a bar, which shows training steps; lines of these are rare."""

    def __init__(self, steps: int, bar: Counter | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._bar = bar
        self._now = now
        self._due = -math.inf

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        words = _in_words(kind, values)
        line = f"step {step:>{len(str(self._steps))}}/{self._steps}  {words}"
        if self._bar is not None:
            if kind == "train":
                self._bar.update(words, completed=step)
            else:
                self._bar.print(line)
            return
        if kind == "train":
            # A monotonic clock: the time of day may be changed while a run lasts days.
            if self._now() < self._due:
                return
            self._due = self._now() + _SECONDS_BETWEEN
        print(line, file=sys.stderr)


@contextmanager
def _listener(run: OpenRun, output: Output) -> Iterator[EventListener]:
    steps = run.config.loop.steps
    if output.quiet or not output.progress:
        yield Silent()
    elif not sys.stderr.isatty():
        yield ProgressLines(steps)
    else:
        with counter(Console(stderr=True), total=steps, done=run.progress.step) as bar:
            yield ProgressLines(steps, bar)


def _in_words(kind: str, values: dict[str, Any]) -> str:
    match kind:
        case "train":
            # The first step is not timed.
            speed = ""
            if "tokens_per_second" in values:
                of_data_sheet = values.get("mfu_of_data_sheet")
                peak = "" if of_data_sheet is None else f" ({of_data_sheet:.0%} of data sheet)"
                mfu = _mfu(values["mfu"], outran="outran_peak" in values)
                speed = f"  {values['tokens_per_second']:,.0f} tokens/s  {mfu}{peak}"
            return f"loss {values['loss']:.4f}{speed}  {format_bytes(values['peak_memory_bytes'])}"
        case "evaluate":
            return f"validation loss {values[METRIC]:.4f} (best {values['best']:.4f})"
        # A text of the model may have any characters.
        case "sample":
            return "sample:\n" + "\n".join(f"    {printable(line)}" for line in values["text"].splitlines())
        case "save":
            times = [format_seconds(values[name]) for name in ("durable_seconds", "stall_seconds")]
            return f"saved in {times[0]}, training waited {times[1]}; {format_bytes(values['new_bytes'])} written"
        case "technique":
            return f"{values['name']}: {values['seen']}"
        case "profile":
            count = counted(values["steps"], "step")
            return f"profile of {count}: {values['path']} (open it in https://ui.perfetto.dev)"
        case "suggestion":
            return _suggestion(values["learning_rate"], diverged=values["diverged"])
        case _:
            # A new kind of event needs a text here.
            raise AssertionError(kind)


def _mfu(value: float, *, outran: bool) -> str:
    return f"MFU {'at most ' if outran else ''}{value:.0%}"


def _suggestion(rate: float | None, *, diverged: bool) -> str:
    if rate is None and diverged:
        return "no suggestion: the loss was not finite from the first step on, so look at the weights and the data"
    if rate is None:
        return "no suggestion: the average loss did not rise, so try a higher learning rate (--optim.lr)"
    return f"train with a learning rate of about {rate:.1g} (--optim.lr {rate:.1g})"


def document(run: OpenRun, summary: TrainingSummary) -> dict[str, Any]:
    return {
        "run": str(run.folder.path),
        **asdict(summary),
        "skipped": run.progress.skipped,
        "peak_flops": run.speed.peak,
        "techniques": {name: {"seen": proof.summary, **proof.figures} for name, proof in run.techniques.proofs.items()},
    }


def print_summary(run: OpenRun, summary: TrainingSummary) -> None:
    ended = f"{summary.reason}, after step {summary.step}"
    rows = [
        ("ended", ended if summary.steps else f"{ended}; no steps were left (more: --resume --loop.steps N)"),
        ("validation loss", f"{summary.loss:.4f}, best {summary.best:.4f}"),
    ]
    if run.progress.skipped:
        rows.append(("skipped updates", str(run.progress.skipped)))
    if run.config.schedule.name == "range":
        rows.append(("range test", _suggestion(summary.suggested_learning_rate, diverged=run.progress.range_test.over)))
    if summary.steps:
        rows += _cost(summary)
        evaluating, total = summary.seconds.get("evaluate", 0.0), sum(summary.seconds.values())
        if run.config.eval.batches is None and evaluating > max(_LONG_EVALUATION_SECONDS, total / 2):
            tokens = max(1, run.validation.targets // 10)
            rows.append(("advice", f"evaluate fewer tokens, such as --eval.tokens {tokens}"))
    rows.append(("run", str(run.folder.path)))
    Table(("", ""), rows).show()
    folder = shlex.quote(str(run.folder.path))
    following = f"generate {folder} --prompt TEXT" if run.dataset.chat_tokenizer is None else f"chat {folder}"
    # Not wrapped, so that it can be copied.
    print(printable(f"next: tensorkeep {following}"))


def _cost(summary: TrainingSummary) -> list[tuple[str, str]]:
    total = sum(summary.seconds.values())
    spent = sorted(summary.seconds.items(), key=lambda item: -item[1])
    rows = [("time", ", ".join(f"{name} {format_seconds(each)} ({each / total:.0%})" for name, each in spent))]
    rows.append(("peak memory", format_bytes(summary.peak_memory_bytes)))
    if math.isfinite(summary.tokens_per_second):
        of_peak = (
            "; training outran the measured peak, which other work slowed down"
            if summary.outran_peak
            else " of measured peak"
        )
        speed = f"{summary.tokens_per_second:,.0f} tokens/s, {_mfu(summary.mfu, outran=summary.outran_peak)}{of_peak}"
        if summary.mfu_of_data_sheet is not None:
            speed += f", {summary.mfu_of_data_sheet:.0%} of the data sheet's"
        rows.insert(0, ("speed", speed))
    return rows


def technique_names(text: str | None) -> list[str]:
    """Return the names in the text of ``--technique``, with combinations expanded.

    Raises UsageError without a name, and UnsupportedError for an unknown name.
    """
    if text is None:
        return []
    found = expanded(name.strip() for name in text.split(",") if name.strip())
    if not found:
        raise UsageError(f"--technique {text!r} names no technique", remedy="omit it, or give a name")
    _check_techniques(found)
    return found


def _check_techniques(names: Iterable[str]) -> None:
    """Raise UnsupportedError for an unknown technique."""
    # Techniques that are turned off as well: a typo must not pass as "off".
    for name in names:
        # Also ``combo-a``.
        letter = re.sub(r"^combo|^combination|[ _-]", "", name.lower()).upper()
        if letter in COMBINATIONS:
            remedy = f"did you mean the combination? --technique {letter}"
            raise UnsupportedError(f"there is no technique named {name!r}", remedy=remedy)
        TECHNIQUE_CLASSES.get(name)


def _list_techniques(output: Output, device: str) -> None:
    found = [described(name, Machine(chosen_device(device))) for name in TECHNIQUE_CLASSES.names()]

    def text() -> None:
        for title, can_run in (("Can run here", True), ("Cannot run here", False)):
            if shown := [each for each in found if (each["missing"] is None) is can_run]:
                print(f"{title}\n")
                for each in shown:
                    print_technique(each)
        combinations = [(name, ", ".join(names)) for name, names in COMBINATIONS.items()]
        Table(("combination", "is"), combinations).show()

    output.show({"techniques": found, "combinations": COMBINATIONS}, text)


def described(name: str, machine: Machine) -> dict[str, Any]:
    """Return the declaration of a technique as JSON; ``missing`` is what the machine lacks for it, or None."""
    technique = TECHNIQUE_CLASSES.get(name)
    settings = technique.Settings()
    missing = technique(settings).missing(machine)
    return {
        "name": name,
        "kind": technique.kind,
        "summary": technique.summary,
        "effect": technique.effect,
        "reference": technique.reference,
        "settings": msgspec.to_builtins(settings),
        "missing": missing,
        "lacks": missing,  # the older name of the key
    }


def print_technique(about: Mapping[str, Any]) -> None:
    print_lines(f"{about['name']} ({about['kind']})")
    settings = ", ".join(f"{name} = {msgspec.json.encode(value).decode()}" for name, value in about["settings"].items())
    # textwrap raises an error for a width of 0 or less.
    width = max(columns() - len(_INDENT), 20)
    texts = about["missing"], about["summary"], f"effect: {about['effect']}", settings and f"settings: {settings}"
    for text in filter(None, texts):
        # In a pipe each text is one line, for grep.
        lines = textwrap.wrap(text, width, break_on_hyphens=False) if sys.stdout.isatty() else [text]
        print_lines(*(_INDENT + line for line in lines))
    print()
