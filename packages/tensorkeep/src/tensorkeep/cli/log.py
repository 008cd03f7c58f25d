"""``tensorkeep log``: the steps of a run. ``tensorkeep info RUN`` prints the summary."""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

from tensorkeep.checkpoint.log import RECORD, RUN_RECORDS, LoggedStep, RunLog
from tensorkeep.checkpoint.log import log as read_log
from tensorkeep.cli.commands import TRAINER
from tensorkeep.cli.options import STORE, AtLeastOne, StoreOptions, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines, ratio
from tensorkeep.errors import CorruptCheckpointError, MissingExtraError, TensorkeepError
from tensorkeep.paths import StorePath, as_path
from tensorkeep.units import counted, format_age, format_bytes, format_moment

_ON_A_TERMINAL = 20
_WHICH = {"min": "smallest", "max": "largest"}


def log(
    run: str,
    /,
    *,
    last: Annotated[int | None, AtLeastOne] = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    verify: Annotated[bool, Switch] = False,
    store: StoreOptions = STORE,
    output: Output = DEFAULT,
) -> int:
    """List the steps and segments of a training run, the newest step first.

    Damaged and incomplete steps are named. Without --verify, tensorkeep log reads manifests only, and compares the
    sizes of files. A run of tensorkeep train has a new segment wherever its settings changed.

    Parameters
    ----------
    run
        The folder of the run.
    last
        Show this many of the last steps; by default 20 on a terminal, else all.
    metric
        Show only this metric, and star the best step by it; by default all metrics, and the best step by the
        validation loss, the loss or the only metric.
    mode
        Whether the smallest (min) or the largest (max) value of the metric is best; by default known from its name.
    verify
        Read every byte of every step; the exit code is 4 if a step is damaged.
    """
    with output.meter(f"verifying {run}") if verify else nullcontext() as progress:
        found = read_log(run, metric=metric, mode=mode, verify=verify, progress=progress)
    # A pipe gets all: `tensorkeep log run | grep`.
    count = last or (_ON_A_TERMINAL if sys.stdout.isatty() else len(found.steps))
    names = [metric] if metric else _metrics(found)
    document, lines = _segments(Path(found.path))

    def text() -> None:
        _print_log(found, found.steps[-count:][::-1], names)
        print_lines(*lines)

    output.show(found.as_dict(last=last) | document, text)
    return CorruptCheckpointError.exit_code if verify and any(step.problem for step in found.steps) else 0


def _segments(root: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the segments and the origin of a run of ``tensorkeep train``, as JSON and as text."""
    # The steps are in a subfolder of the run, and either folder may be given.
    folder = next((place for place in (root, root.parent) if (place / RECORD).is_file()), None)
    if folder is None:
        return {}, []
    try:
        return RUN_RECORDS.get(RECORD)(folder)
    # The steps can be listed without the record.
    except MissingExtraError as error:
        lines = [f"the segments of the run are not known, because {TRAINER} is not installed", str(error.remedy)]
        return {"record": "\n".join(lines)}, lines
    except TensorkeepError as error:
        return {"record": str(error)}, [f"the segments of the run are not known: {error}"]


def print_summary(found: RunLog) -> None:
    total = found.summary()
    first, last = found.steps[0], found.steps[-1]
    numbers = f"{first.number} to {last.number}" if first is not last else f"{first.number}"
    print_lines(f"{found.path}: {counted(len(found.steps), 'step')}, {numbers}")
    times = [step.saved_at for step in found.steps if step.saved_at is not None]
    if times:
        print_lines("saved " + " to ".join(dict.fromkeys((format_moment(times[0]), format_moment(times[-1])))))
    # `new_bytes` counts a file that steps share once.
    shared = total["nbytes"] - total["new_bytes"]
    sharing = f"; files shared between steps, {format_bytes(shared)}, count once" if shared else ""
    where = "in the store" if isinstance(as_path(found.path), StorePath) else "on the disk"
    print_lines(f"occupies {format_bytes(total['occupied_bytes'])} {where}{sharing}")
    if total["incremental_steps"]:
        adds = format_bytes(total["median_incremental_bytes"])
        print_lines(f"{counted(total['incremental_steps'], 'incremental step')}: each adds {adds} (median)")
    if found.best:
        print_lines(f"best: step {found.best.number}, {_reason(found)}")
    if found.pruned:
        print_lines(_pruned(found))
    print_lines(*(f"step {number}: {problem}" for number, problem in total["problems"].items()))
    if total["metrics"]:
        print()
        ranges = [(name, total["metrics"][name]) for name in _metrics(found)]
        rows = [(name, *(f"{of[key]:.5g}" for key in ("first", "last", "min", "max"))) for name, of in ranges]
        Table(("metric", ">first", ">last", ">smallest", ">largest"), rows).show()


def _print_log(found: RunLog, shown: list[LoggedStep], names: list[str]) -> None:
    now = time.time()
    # Columns only where they say something.
    coded = any(step.compression not in (None, "none") for step in shown)
    damaged = any(step.problem for step in shown)
    headings = ["", ">step", ">age", *(f">{name}" for name in names), ">size", ">new"]
    headings += [">ratio"] * coded + ["problem"] * damaged
    rows = []
    for step in shown:
        metrics = step.metrics or {}
        row = ["*" if step.best else "", f"{step.number}"]
        row.append("-" if step.saved_at is None else format_age(now - step.saved_at))
        row += [f"{metrics[name]:.5g}" if name in metrics else "-" for name in names]
        row += [format_bytes(step.nbytes), format_bytes(step.new_bytes)]
        row += [ratio(step.state_bytes, step.nbytes)] * coded + [step.problem or ""] * damaged
        rows.append(row)
    Table(tuple(headings), rows, spare=tuple(names[1:])).show()
    if found.best:
        print_lines(f"* best: step {found.best.number}, {_reason(found)}")
    if len(shown) < len(found.steps):
        more = counted(len(found.steps) - len(shown), "earlier step")
        print_lines(f"and {more} (--last {len(found.steps)} shows all)")
    if found.pruned:
        print_lines(_pruned(found))


def _pruned(found: RunLog) -> str:
    first, last = found.pruned[0].number, found.pruned[-1].number
    numbers = f"{first} to {last}" if first < last else f"{first}"
    return f"the metrics of {counted(len(found.pruned), 'deleted step')} ({numbers}) are in --json and tensorkeep show"


def _metrics(found: RunLog) -> list[str]:
    names = dict.fromkeys(name for step in found.steps for name in step.metrics or {})
    # First the metric of the best step, which a narrow terminal keeps.
    return sorted(names, key=lambda name: name != found.metric)


def _reason(found: RunLog) -> str:
    assert found.best and found.best.metrics and found.metric and found.mode
    return f"{found.metric} {found.best.metrics[found.metric]:.5g} ({_WHICH[found.mode]})"
