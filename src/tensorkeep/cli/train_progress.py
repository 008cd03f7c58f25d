"""The output of ``tensorkeep train``: lines or a progress bar, and a summary."""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tensorkeep.cli.output import Output
from tensorkeep.cli.text import Table, printable
from tensorkeep.train.loop import Listener, Silent, Summary
from tensorkeep.train.run.setup import OpenRun
from tensorkeep.train.run.state import METRIC, Run
from tensorkeep.units import counted, format_bytes, format_seconds

_SECONDS_BETWEEN = 5.0
"""Seconds between two lines about training steps without a progress bar, so that a log file stays short."""

_LONG_SECONDS = 10.0
"""Seconds of evaluations that may take most of the time of a run without a remark."""


def print_start(run: Run, output: Output) -> None:
    """Print what is trained, on which device and data, and the folder of the run."""
    model, config = run.config.model, run.config
    output.note(
        f"{config.recipe}: {model.parameter_count():,} parameters on {run.device}; {len(run.dataset.train):,} tokens "
        f"in {run.dataset.path}; writing to {run.folder.path}"
    )
    # A note says where a branch begins.
    if run.progress.step and run.folder.record().resumed:
        output.note(f"resumes after step {run.progress.step}")


class Lines:
    """Prints each event on a line of its own; training steps at most once every five seconds of a monotonic clock."""

    def __init__(self, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._now = now
        self._due = -math.inf

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "train":
            now = self._now()
            if now < self._due:
                return
            self._due = now + _SECONDS_BETWEEN
        print(event_line(step, self._steps, kind, values), file=sys.stderr)


class Bar:
    """Shows training steps in a progress bar, and prints all other events above it."""

    def __init__(self, steps: int, progress: Any, task: Any) -> None:
        self._steps = steps
        self._progress = progress
        self._task = task

    def on_event(self, step: int, kind: str, values: dict[str, Any]) -> None:
        if kind == "train":
            self._progress.update(self._task, completed=step, description=_in_words(kind, values))
        else:
            # Without markup, because samples may contain brackets.
            self._progress.console.print(event_line(step, self._steps, kind, values), markup=False, highlight=False)


def event_line(step: int, steps: int, kind: str, values: dict[str, Any]) -> str:
    """Return an event of `tensorkeep.train.loop.Listener` as a line of text."""
    return f"step {step:>{len(str(steps))}}/{steps}  {_in_words(kind, values)}"


def _in_words(kind: str, values: dict[str, Any]) -> str:
    match kind:
        case "train":
            # The first step is not timed.
            timed = "tokens_per_second" in values
            speed = f"  {values['tokens_per_second']:,.0f} tokens/s  {_mfu(values)}" if timed else ""
            return f"loss {values['loss']:.4f}{speed}  {format_bytes(values['peak_memory_bytes'])}"
        case "evaluate":
            return f"validation loss {values[METRIC]:.4f} (best {values['best']:.4f})"
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
            return _suggestion(values["learning_rate"])
        case _:
            raise AssertionError(kind)


def _mfu(values: Mapping[str, Any]) -> str:
    """Return MFU against the measured peak, and that of the data sheet where it is known."""
    of_data_sheet = values.get("mfu_of_data_sheet")
    return f"MFU {values['mfu']:.0%}" + ("" if of_data_sheet is None else f" ({of_data_sheet:.0%} of data sheet)")


def _suggestion(rate: float | None) -> str:
    if rate is None:
        return "no suggestion: the loss did not rise, so try a higher learning rate (--optim.lr)"
    return f"train with a learning rate of about {rate:.1g} (--optim.lr {rate:.1g})"


@contextmanager
def listener(run: Run, output: Output) -> Iterator[Listener]:
    """Yield the listener that the options and the terminal ask for."""
    steps = run.config.loop.steps
    if output.quiet or not output.progress:
        yield Silent()
    elif not sys.stderr.isatty():
        yield Lines(steps)
    else:
        with bar(Console(stderr=True), steps, done=run.progress.step) as shown:
            yield shown


@contextmanager
def bar(console: Console, steps: int, *, done: int = 0) -> Iterator[Bar]:
    """Draw a progress bar, which is removed at the end."""
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(steps, progress, progress.add_task("", total=steps, completed=done))


def document(run: OpenRun, summary: Summary) -> dict[str, Any]:
    """Return the summary of a run as plain values."""
    return {
        "run": str(run.folder.path),
        **asdict(summary),
        "skipped": run.progress.skipped,
        "peak_flops": run.speed.peak,
        "techniques": {name: {"seen": proof.summary, **proof.figures} for name, proof in run.techniques.proofs.items()},
    }


def print_summary(run: Run, summary: Summary) -> None:
    """Print the summary of a run and the next command."""
    ended = f"{summary.reason}, after step {summary.step}"
    rows = [
        ("ended", ended if summary.steps else f"{ended}; no steps were left (more: --resume --loop.steps N)"),
        ("validation loss", f"{summary.loss:.4f}, best {summary.best:.4f}"),
    ]
    if run.progress.skipped:
        rows.append(("skipped updates", str(run.progress.skipped)))
    if run.config.schedule.name == "range":
        rows.append(("range test", _suggestion(summary.suggested_learning_rate)))
    if summary.steps:
        rows += _cost(summary)
        if run.config.eval.batches is None and _evaluates_long(summary):
            tokens = max(1, run.validation.targets // 10)
            rows.append(("advice", f"evaluate fewer tokens, such as --eval.tokens {tokens}"))
    rows.append(("run", str(run.folder.path)))
    Table(("", ""), rows).show()
    # Not wrapped, so that it can be copied.
    folder, talks = shlex.quote(str(run.folder.path)), run.dataset.chat_tokenizer is not None
    print(
        printable(f"next: tensorkeep chat {folder}" if talks else f"next: tensorkeep generate {folder} --prompt TEXT")
    )


def _evaluates_long(summary: Summary) -> bool:
    evaluating = summary.seconds.get("evaluate", 0.0)
    return evaluating > max(_LONG_SECONDS, sum(summary.seconds.values()) / 2)


def _cost(summary: Summary) -> list[tuple[str, str]]:
    total = sum(summary.seconds.values())
    spent = sorted(summary.seconds.items(), key=lambda item: -item[1])
    rows = [("time", ", ".join(f"{name} {format_seconds(each)} ({each / total:.0%})" for name, each in spent))]
    rows.append(("peak memory", format_bytes(summary.peak_memory_bytes)))
    if math.isfinite(summary.tokens_per_second):
        speed = f"{summary.tokens_per_second:,.0f} tokens/s, MFU {summary.mfu:.0%} of measured peak"
        if summary.mfu_of_data_sheet is not None:
            speed += f", {summary.mfu_of_data_sheet:.0%} of the data sheet's"
        rows.insert(0, ("speed", speed))
    return rows
