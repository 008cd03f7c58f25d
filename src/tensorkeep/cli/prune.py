"""``tensorkeep prune``: delete the steps of a run that no retention rule keeps."""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorkeep.cli.options import Endpoint, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UsageError
from tensorkeep.runs.address import run_root
from tensorkeep.runs.folder import StepFolder
from tensorkeep.runs.metrics import ranked
from tensorkeep.runs.retention import Keep, KeepBest, KeepThinned, keep_rule, unwanted
from tensorkeep.runs.steps import Garbage, Step, StepListing, StepPlace
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
    endpoint: Endpoint = None,
    output: Output = DEFAULT,
) -> int:
    """Delete old steps of a training run.

    All steps that no rule keeps are deleted, but never the last one, nor a step whose folder contains other files. On a
    terminal they are listed first, and you are asked; in a script, and with --json, they are deleted without a
    question. In an object store, the objects of a deleted step remain until the grace period is over (an hour, or
    TENSORKEEP_STORE_GRACE), for those who are reading it; what earlier deletions and failed saves have left is deleted.

    Parameters
    ----------
    root
        The folder of a run, or its URL in an object store: step-000100, step-000200, ...
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
    run = StepFolder(run_root(root))
    place = run.place.snapshot()
    found, garbage = place.listing(), _garbage(place, output)
    if not (found.steps or found.broken or garbage):
        raise NotACheckpointError("contains no steps", path=root, remedy="give the folder that contains step-000100")
    best = None if keep_best is None else _best(found, keep_best, metric, mode)
    thinned = KeepThinned(tuple(map(_interval, keep_thinned))) if keep_thinned else None
    rule = keep_rule(keep_last, keep_every, best, thinned)
    plan = _plan(place, rule, found, garbage, broken=broken)
    document = plan.as_dict(place, dry_run=dry_run)
    asks = not (dry_run or yes or output.json) and sys.stdin.isatty() and sys.stderr.isatty()
    if dry_run or asks:
        output.show(document, lambda: _print(document, limit=_SHOWN if asks else None))
    if dry_run or (asks and not (plan.changes and _confirmed(plan, output))):
        return 1 if asks and plan.changes else 0
    if plan.changes:
        try:
            run.delete(*sorted(plan.gone), seen=place)
        finally:
            run.release()
        run.warn_of_undeleted(stacklevel=1)
    output.show(document, lambda: print_lines(_summary(document)) if asks else _print(document))
    return 0


@dataclass(frozen=True)
class _Plan:
    """The steps that are deleted, those that stay although no rule keeps them, and what no step uses in a store."""

    found: StepListing
    gone: set[int]
    left: dict[int, TensorkeepError]
    freed: int
    garbage: Garbage

    @property
    def changes(self) -> bool:
        """Whether anything is deleted."""
        return bool(self.gone or self.garbage.removable)

    def as_dict(self, place: StepPlace, *, dry_run: bool) -> dict[str, Any]:
        """Return the plan as plain values, as ``--json`` prints it."""
        steps, broken, gone = self.found.steps, self.found.broken, self.gone
        return {
            "root": str(place.root),
            "dry_run": dry_run,
            "freed_bytes": self.freed,
            "deleted": [_describe(step) for step in steps if step.number in gone],
            "deleted_broken": [number for number in broken if number in gone],
            "kept": [_describe(step) for step in steps if step.number not in gone],
            "broken": {str(number): str(error) for number, error in broken.items() if number not in gone},
            "left": {str(number): str(error) for number, error in self.left.items()},
            "grace_seconds": place.grace_seconds,
            "leftovers": _amount(self.garbage.removable),
            "waiting": _amount(self.garbage.waiting),
            "unfinished": _amount(self.garbage.unfinished),
        }


def _garbage(place: StepPlace, output: Output) -> Garbage:
    """Return what deleted steps and failed saves have left in a store; nothing, and a note, if that is not known."""
    try:
        return place.garbage()
    except TensorkeepError as error:
        output.note(f"what deleted steps have left is not deleted: {error}")
        return Garbage()


def _amount(objects: dict[str, int]) -> dict[str, int]:
    return {"objects": len(objects), "bytes": sum(objects.values())}


def _best(found: StepListing, count: int, metric: str | None, mode: str | None) -> KeepBest:
    """Return the rule of the best steps; UsageError if no step has a value of the metric."""
    if metric is not None:
        ranked(found.steps, metric, mode)  # A mistyped name is reported as such, not as one of unknown mode.
    rule = KeepBest(count, metric, mode)
    if found.steps and not rule.ranked(found.steps):
        raise UsageError("no step has a value of a metric, so none is the best", remedy="omit --keep-best")
    return rule


def _plan(place: StepPlace, rule: Keep, found: StepListing, garbage: Garbage, *, broken: bool) -> _Plan:
    """Apply a rule; with ``broken`` damaged steps go as well."""
    # A step that could not be read, or of a later version, may be intact; other folders belong to the user.
    damage = {number for number, error in found.broken.items() if isinstance(error, CorruptCheckpointError)}
    candidates = {step.number for step in unwanted(rule, found.steps)} | (damage if broken else set())
    left = _not_removable(place, sorted(candidates))
    gone = candidates - left.keys()
    freed = place.freed_bytes([place.path_of(number) for number in gone]) if gone else 0
    return _Plan(found, gone, left, freed, garbage)


def _confirmed(plan: _Plan, output: Output) -> bool:
    """Ask on stderr whether to delete; only "y" or "yes" is a yes."""
    removable = plan.garbage.removable
    what = [counted(len(plan.gone), "step")] if plan.gone else []
    what += [counted(len(removable), "leftover object")] if removable else []
    freed = format_bytes(plan.freed + sum(removable.values()))
    print(f"Delete {' and '.join(what)} and free {freed}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    output.note("nothing was deleted")
    return False


def _not_removable(place: StepPlace, numbers: list[int]) -> dict[int, TensorkeepError]:
    """Return the steps whose folders contain something else, with the reason."""
    paths = {place.path_of(number): number for number in numbers}
    return {paths[path]: error for path, error in place.not_removable([*paths]).items()}


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
    print_lines(*_leftovers(document, verb), *([] if limit else [_summary(document)]))


def _row(step: dict[str, Any]) -> tuple[str, str, str, str]:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in step["metrics"].items())
    return f"{step['step']}", format_age(time.time() - step["saved_at"]), format_bytes(step["own_bytes"]), metrics


def _leftovers(document: dict[str, Any], verb: str) -> list[str]:
    """Return lines about objects in a store that no step uses."""
    after = format_age(document["grace_seconds"])
    meanings = {
        "leftovers": f"{verb} leftovers of earlier deletions and failed saves: {{}}",
        "waiting": f"of steps that were deleted less than {after} ago: {{}}, which a later save or prune deletes",
        "unfinished": "of saves that run or have failed: {}, which a save or prune deletes when they are a day old",
    }
    found = {name: document[name] for name in meanings if document[name]["objects"]}
    amounts = {n: f"{counted(of['objects'], 'object')}, {format_bytes(of['bytes'])}" for n, of in found.items()}
    return [meanings[name].format(amount) for name, amount in amounts.items()]


def _summary(document: dict[str, Any]) -> str:
    dry, grace = document["dry_run"], document["grace_seconds"]
    steps = counted(len(document["deleted"]) + len(document["deleted_broken"]), "step")
    frees = "would free" if dry else "frees" if grace else "freed"
    freed = f"{frees} {format_bytes(document['freed_bytes'])}"
    if grace and document["freed_bytes"]:
        freed += f" by the next save or prune after {format_age(grace)}"
    return f"{'would delete' if dry else 'deleted'} {steps}, kept {len(document['kept'])}; {freed}"
