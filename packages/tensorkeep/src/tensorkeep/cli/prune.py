"""``tensorkeep prune``: delete the steps of a run that no retention rule keeps."""

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorkeep.cli.options import STORE, StoreOptions, Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, print_lines
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UsageError, warn_caller
from tensorkeep.paths import absolute
from tensorkeep.runs.address import backend_of, run_root
from tensorkeep.runs.backends import Garbage, SingleTierBackend
from tensorkeep.runs.retention import Keep, KeepBest, KeepThinned, Retention, unwanted
from tensorkeep.runs.steps import Step, StepListing, ranked
from tensorkeep.units import counted, format_age, format_bytes

_RULES = (
    "give --keep-last 3, --keep-every 1000, --keep-best 2 (by --metric NAME), --keep-thinned 1h:0 1d:1h, or several; "
    "--broken for damaged steps only; and --dry-run to see first what they delete"
)

# The most steps that are listed before the question.
_SHOWN = 20


@Parameter(name="*")
@dataclass(frozen=True)
class KeepOptions:
    """The options that choose the steps to keep.

    Attributes
    ----------
    keep_last
        Keep this many of the last steps.
    keep_every
        Keep the steps with a number that is a multiple of this.
    keep_best
        Keep this many of the best steps.
    metric
        The metric of --keep-best; may be omitted if the steps have only one.
    mode
        Whether the smallest (min) or the largest (max) value of the metric is best; by default known from its name.
    keep_thinned
        Keep fewer of the older steps: AGE:DISTANCE pairs such as 1h:0 1d:1h 30d:1d.
    broken
        Also delete damaged steps: missing files, files of another size, an unreadable manifest. (`verify` also finds
        changed bytes.) Folders that are not checkpoints, could not be read or were written by a later version are kept.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    keep_thinned: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=(), show_default=False)] = ()
    broken: Annotated[bool, Switch] = False

    @property
    def given(self) -> bool:
        counts = self.keep_last, self.keep_every, self.keep_best
        return any(count is not None for count in counts) or bool(self.keep_thinned) or self.broken

    def rule(self, found: StepListing) -> Keep:
        """Return the retention rule; UsageError if it cannot rank the steps."""
        thinned = KeepThinned(tuple(map(_interval, self.keep_thinned))) if self.keep_thinned else None
        return Retention(
            keep_last=self.keep_last, keep_every=self.keep_every, keep_best=self._best(found), keep=thinned
        ).rule

    def _best(self, found: StepListing) -> KeepBest | None:
        if self.keep_best is None:
            return None
        if self.metric is not None:
            # Reports a mistyped name as such, and not as a metric of unknown mode.
            ranked(found.steps, self.metric, self.mode)
        rule = KeepBest(self.keep_best, self.metric, self.mode)
        if found.steps and not rule.ranked(found.steps):
            raise UsageError("no step has a value of a metric, so none is the best", remedy="omit --keep-best")
        return rule


NO_RULES = KeepOptions()


def prune(
    root: str,
    /,
    *,
    keep: KeepOptions = NO_RULES,
    dry_run: Annotated[bool, Switch] = False,
    yes: Annotated[bool, Switch, Parameter(name=["--yes", "-y"])] = False,
    store: StoreOptions = STORE,
    output: Output = DEFAULT,
) -> int:
    """Delete old steps of a training run.

    All steps that no rule keeps are deleted, but never the last one, nor a step with other files in its folder. On a
    terminal they are listed first, and you are asked; in a script, and with --json, they are deleted without a
    question. In an object store, the objects of a deleted step remain for a grace period (an hour, or
    TENSORKEEP_STORE_GRACE), because a reader may use them; prune deletes the objects that earlier deletions and failed
    saves have left.

    Parameters
    ----------
    root
        The folder of a run, or its URL in an object store: step-000100, step-000200, ...
    dry_run
        Delete nothing; print what would be deleted.
    yes
        Delete without asking; a script, or --json, is not asked anyway.
    """
    if not keep.given:
        raise UsageError("no rule says which steps to keep", remedy=_RULES)
    run = backend_of(absolute(run_root(root)))
    # One listing decides what is deleted, shown and counted, even if a training run saves meanwhile.
    backend = run.snapshot()
    found, garbage = backend.listing(), _garbage(backend, output)
    if not (found.steps or found.broken or garbage):
        raise NotACheckpointError("contains no steps", path=root, remedy="give the folder that contains step-000100")
    document = _plan(backend, keep, found, garbage) | {"dry_run": dry_run}
    gone = [*(step["step"] for step in document["deleted"]), *document["deleted_broken"]]
    changes = bool(gone or document["leftovers"]["objects"])
    asks = not (dry_run or yes or output.json) and sys.stdin.isatty() and sys.stderr.isatty()
    if dry_run or asks:
        output.show(document, lambda: _print(document, limit=_SHOWN if asks else None))
    if dry_run or (asks and not (changes and _confirmed(document, len(gone), output))):
        # A refused deletion is a failure for `tensorkeep prune ... && next`.
        return 1 if asks and changes else 0
    if changes:
        try:
            # The snapshot, because a step that was saved meanwhile must not be deleted.
            run.delete([run.path_of(number) for number in sorted(gone)], snapshot=backend)
        finally:
            run.release()
        for message in run.take_warnings():
            warn_caller(message)
    output.show(document, lambda: print_lines(_summary(document)) if asks else _print(document))
    return 0


def _plan(backend: SingleTierBackend, keep: KeepOptions, found: StepListing, garbage: Garbage) -> dict[str, Any]:
    # Damaged steps only: a step of a later version, or one that could not be read, may be intact. Other folders belong
    # to the user.
    damaged = {number for number, error in found.broken.items() if isinstance(error, CorruptCheckpointError)}
    candidates = {step.number for step in unwanted(keep.rule(found), found.steps)} | (damaged if keep.broken else set())
    # A folder with other files than the step's is left.
    paths = {backend.path_of(number): number for number in sorted(candidates)}
    left = {paths[path]: error for path, error in backend.not_removable([*paths]).items()}
    gone = candidates - left.keys()
    return {
        "root": str(backend.root),
        # What the steps to delete share with steps to keep is not freed.
        "freed_bytes": backend.freed_bytes([backend.path_of(number) for number in gone]) if gone else 0,
        "deleted": [_describe(step) for step in found.steps if step.number in gone],
        "deleted_broken": [number for number in found.broken if number in gone],
        "kept": [_describe(step) for step in found.steps if step.number not in gone],
        "broken": {str(number): str(error) for number, error in found.broken.items() if number not in gone},
        "left": {str(number): str(error) for number, error in left.items()},
        "grace_seconds": backend.grace_seconds,
        "leftovers": _amount(garbage.removable),
        "waiting": _amount(garbage.waiting),
        "unfinished": _amount(garbage.unfinished),
    }


def _garbage(backend: SingleTierBackend, output: Output) -> Garbage:
    try:
        return backend.garbage()
    except TensorkeepError as error:
        output.note(f"what deleted steps have left is not deleted: {error}")
        return Garbage()


def _confirmed(document: dict[str, Any], steps: int, output: Output) -> bool:
    leftovers = document["leftovers"]
    what = [counted(steps, "step")] if steps else []
    what += [counted(leftovers["objects"], "leftover object")] if leftovers["objects"] else []
    freed = format_bytes(document["freed_bytes"] + leftovers["bytes"])
    print(f"Delete {' and '.join(what)} and free {freed}? [y/N] ", end="", file=sys.stderr, flush=True)
    # An empty line and the end of the input mean no.
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    output.note("nothing was deleted")
    return False


def _interval(text: str) -> tuple[str, str]:
    age, colon, distance = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} is not a pair", remedy="write AGE:DISTANCE, for example 1d:1h")
    return age, distance


def _amount(objects: dict[str, int]) -> dict[str, int]:
    return {"objects": len(objects), "bytes": sum(objects.values())}


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
    # A damaged step has no readable record of its age.
    rows += [(str(number), "", "", "damaged") for number in document["deleted_broken"]]
    if rows:
        # One row is not worth a line that says it is hidden.
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
