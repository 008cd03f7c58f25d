"""``tensorkeep prune``: delete the steps of a run that no retention rule keeps."""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorkeep.checkpoint.manager.address import run_root
from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.manager.metrics import ranked
from tensorkeep.checkpoint.manager.retention import KeepBest, KeepThinned, unwanted
from tensorkeep.checkpoint.manager.steps import Step, StepListing, check_removable, list_steps, step_path
from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UsageError
from tensorkeep.formats.native.directory import freed_bytes
from tensorkeep.paths import checked_path
from tensorkeep.units import counted, format_age, format_bytes

_RULES = (
    "give --keep-last 3, --keep-every 1000, --keep-best 2 (by --metric NAME), --keep-thinned 1h:0 1d:1h, or several; "
    "--broken for damaged steps only; and --dry-run to see first what they delete"
)

_SHOWN = 20
"""The most steps that are listed before the question."""


def prune(
    root: str,
    /,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    keep_thinned: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=(), show_default=False)] = (),
    broken: Annotated[bool, Switch] = False,
    dry_run: Annotated[bool, Switch] = False,
    yes: Annotated[bool, Switch, Parameter(name=["--yes", "-y"])] = False,
    output: Output = DEFAULT,
) -> int:
    """Delete old steps of a training run.

    All steps that no rule keeps are deleted, but never the last one, nor a step whose folder contains other files. On a
    terminal they are listed first, and you are asked; in a script, and with --json, they are deleted without a
    question.

    Parameters
    ----------
    root
        The folder of a run: step-000100, step-000200, ...
    keep_last
        Keep this many of the last steps.
    keep_every
        Keep the steps whose number is a multiple of this.
    keep_best
        Keep this many of the best steps.
    metric
        The metric of --keep-best; may be omitted if the steps have only one.
    mode
        Whether the smallest (min) or the largest (max) value of the metric is best; by default known from its name.
    keep_thinned
        Keep fewer of the older steps: AGE:DISTANCE pairs such as 1h:0 1d:1h 30d:1d.
    broken
        Also delete damaged steps: files that are missing or have another size, an unreadable manifest. (`verify` also
        finds changed bytes.) Folders that are not checkpoints, could not be read or were written by a later
        version are kept.
    dry_run
        Delete nothing; print what would be deleted.
    yes
        Delete without asking; a script, or --json, is not asked anyway.
    """
    if keep_last is None and keep_every is None and keep_best is None and not keep_thinned and not broken:
        raise UsageError("no rule says which steps to keep", remedy=_RULES)
    folder = run_root(checked_path(root))
    found = list_steps(folder)
    if not found.steps and not found.broken:
        raise NotACheckpointError("contains no steps", path=root, remedy="give the folder that contains step-000100")
    best = None if keep_best is None else _best(found, keep_best, metric, mode)
    thinned = KeepThinned(tuple(map(_interval, keep_thinned))) if keep_thinned else None
    with CheckpointManager(
        folder, keep_last=keep_last, keep_every=keep_every, keep_best=best, keep=thinned, asynchronous=False
    ) as manager:
        plan = _plan(manager, found, broken=broken)
        document = plan.as_dict(str(manager.root), dry_run=dry_run)
        asks = not (dry_run or yes or output.json) and sys.stdin.isatty() and sys.stderr.isatty()
        if dry_run or asks:
            output.show(document, lambda: _print(document, limit=_SHOWN if asks else None))
        if dry_run or (asks and not (plan.gone and _confirmed(plan, output))):
            return 1 if asks and plan.gone else 0
        for number in sorted(plan.gone):
            manager.delete(number)
    output.show(document, lambda: print_lines(_summary(document)) if asks else _print(document))
    return 0


@dataclass(frozen=True)
class _Plan:
    """The steps that are deleted, and those that stay although no rule keeps them."""

    found: StepListing
    gone: set[int]
    left: dict[int, TensorkeepError]
    freed: int

    def as_dict(self, root: str, *, dry_run: bool) -> dict[str, Any]:
        """Return the plan as plain values, as ``--json`` prints it."""
        steps, broken, gone = self.found.steps, self.found.broken, self.gone
        return {
            "root": root,
            "dry_run": dry_run,
            "freed_bytes": self.freed,
            "deleted": [_describe(step) for step in steps if step.number in gone],
            "deleted_broken": [number for number in broken if number in gone],
            "kept": [_describe(step) for step in steps if step.number not in gone],
            "broken": {str(number): str(error) for number, error in broken.items() if number not in gone},
            "left": {str(number): str(error) for number, error in self.left.items()},
        }


def _best(found: StepListing, count: int, metric: str | None, mode: str | None) -> KeepBest:
    """Return the rule of the best steps; UsageError if no step has a value of the metric."""
    if metric is not None:
        ranked(found.steps, metric, mode)  # A mistyped name is reported as such, not as one of unknown mode.
    rule = KeepBest(count, metric, mode)
    if found.steps and not rule.ranked(found.steps):
        raise UsageError("no step has a value of a metric, so none is the best", remedy="omit --keep-best")
    return rule


def _plan(manager: CheckpointManager, found: StepListing, *, broken: bool) -> _Plan:
    """Apply the rules of a manager; with ``broken`` damaged steps go as well."""
    # A step that could not be read, or of a later version, may be intact; other folders belong to the user.
    damage = {number for number, error in found.broken.items() if isinstance(error, CorruptCheckpointError)}
    candidates = {step.number for step in unwanted(manager.keep, found.steps)} | (damage if broken else set())
    left = _not_removable(manager, sorted(candidates))
    gone = candidates - left.keys()
    return _Plan(found, gone, left, freed_bytes(step_path(manager.root, number) for number in gone))


def _confirmed(plan: _Plan, output: Output) -> bool:
    """Ask on stderr whether to delete; only "y" or "yes" is a yes."""
    question = f"Delete {counted(len(plan.gone), 'step')} and free {format_bytes(plan.freed)}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    output.note("nothing was deleted")
    return False


def _not_removable(manager: CheckpointManager, numbers: list[int]) -> dict[int, TensorkeepError]:
    """Return the steps whose folders contain something else, with the reason."""
    left: dict[int, TensorkeepError] = {}
    for number in numbers:
        try:
            check_removable(step_path(manager.root, number))
        except (UsageError, NotACheckpointError) as error:
            left[number] = error
    return left


def _interval(text: str) -> tuple[str, str]:
    age, colon, distance = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} is not a pair", remedy="write AGE:DISTANCE, for example 1d:1h")
    return age, distance


def _describe(step: Step) -> dict[str, Any]:
    return {
        "step": step.number,
        "path": step.path,
        "bytes": step.nbytes,
        "own_bytes": step.own_bytes,
        "saved_at": step.saved_at,
        "metrics": dict(step.metrics),
    }


def _print(document: dict[str, Any], limit: int | None = None) -> None:
    verb = "would delete" if document["dry_run"] else "delete" if limit else "deleted"
    rows = [_row(step) for step in document["deleted"]]
    rows += [(str(number), "", "", "damaged") for number in document["deleted_broken"]]
    if rows:
        hidden = len(rows) - limit if limit and len(rows) > limit + 1 else 0
        print_lines(f"{verb}:")
        Table((">step", ">age", ">frees", "metrics"), rows[: len(rows) - hidden]).show()
        print_lines(*([f"... and {hidden:,} more, which --dry-run lists"] if hidden else []))
    kept = [str(step["step"]) for step in document["kept"]]
    shown = kept if len(kept) <= _SHOWN else [*kept[: _SHOWN // 2], "...", *kept[-_SHOWN // 2 :]]
    print_lines(*([f"kept: {', '.join(shown)}"] if kept else []))
    reasons = {**document["broken"], **document["left"]}
    print_lines(*(f"kept: step {number}: {'; '.join(reason.splitlines())}" for number, reason in reasons.items()))
    print_lines(*([] if limit else [_summary(document)]))


def _row(step: dict[str, Any]) -> tuple[str, str, str, str]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in step["metrics"].items())
    return f"{step['step']}", format_age(time.time() - step["saved_at"]), format_bytes(step["own_bytes"]), metrics


def _summary(document: dict[str, Any]) -> str:
    verb, frees = ("would delete", "would free") if document["dry_run"] else ("deleted", "freed")
    steps = counted(len(document["deleted"]) + len(document["deleted_broken"]), "step")
    return f"{verb} {steps}, kept {len(document['kept'])}; {frees} {format_bytes(document['freed_bytes'])}"
