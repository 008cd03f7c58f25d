"""``tensorkeep prune``: delete the steps of a run that no retention rule keeps."""

from typing import Annotated, Any, Literal

from cyclopts import Parameter

from tensorkeep.checkpoint.manager.address import run_root
from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.manager.retention import KeepBest, KeepThinned, best_step
from tensorkeep.checkpoint.manager.steps import Step, check_removable, step_path
from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import print_lines
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UsageError
from tensorkeep.formats.native.directory import freed_bytes
from tensorkeep.units import counted, format_bytes


def prune(
    root: str,
    /,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    keep_thinned: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    broken: Annotated[bool, Switch] = False,
    dry_run: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> None:
    """Delete old steps of a training run.

    All steps that no rule keeps are deleted, but never the last one, nor a step whose folder contains other files.

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
        Also delete damaged steps. Folders that are not checkpoints, could not be read or were written by a later
        version are kept.
    dry_run
        Delete nothing; print what would be deleted.
    """
    if keep_last is None and keep_every is None and keep_best is None and not keep_thinned and not broken:
        raise UsageError("no retention rule is given", remedy="give --keep-last, --keep-every, --keep-best or others")
    root = str(run_root(root))
    best = None if keep_best is None else KeepBest(keep_best, metric, mode)
    thinned = KeepThinned(tuple(map(_interval, keep_thinned))) if keep_thinned else None
    with CheckpointManager(
        root, keep_last=keep_last, keep_every=keep_every, keep_best=best, keep=thinned, asynchronous=False
    ) as manager:
        found = manager.listing()
        if keep_best is not None and found.steps and best_step(found.steps, metric, mode) is None:
            raise UsageError("no step has a metric to find the best by", path=root, remedy="omit --keep-best")
        unwanted = [step.number for step in manager.prune(dry_run=True)]
        # A step that could not be read, or of a later version, may be intact; other folders belong to the user.
        damage = {number for number, error in found.broken.items() if isinstance(error, CorruptCheckpointError)}
        damaged = sorted(damage) if broken else []
        left = _not_removable(manager, [*unwanted, *damaged])
        gone = {*unwanted, *damaged} - left.keys()
        freed = freed_bytes(step_path(manager.root, number) for number in gone)
        if not dry_run:
            for number in sorted(gone):
                manager.delete(number)
    document: dict[str, Any] = {
        "root": root,
        "dry_run": dry_run,
        "freed_bytes": freed,
        "deleted": [_describe(step) for step in found.steps if step.number in gone],
        "deleted_broken": [number for number in damaged if number in gone],
        "kept": [_describe(step) for step in found.steps if step.number not in gone],
        "broken": {str(number): str(error) for number, error in found.broken.items() if number not in gone},
        "left": {str(number): str(error) for number, error in left.items()},
    }
    output.show(document, lambda: _print(document))


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


def _print(document: dict[str, Any]) -> None:
    verb = "would delete" if document["dry_run"] else "deleted"
    for step in document["deleted"]:
        size = format_bytes(step["own_bytes"])
        print_lines(f"{verb} step {step['step']}: frees {size} (not shared with other steps)")
    print_lines(*(f"{verb} step {number}: broken" for number in document["deleted_broken"]))
    kept = {**document["broken"], **document["left"]}
    print_lines(*(f"kept: step {number}: {reason}" for number, reason in kept.items()))
    counts = f"{counted(len(document['deleted']), 'step')}, kept {len(document['kept'])}"
    frees = "would free" if document["dry_run"] else "freed"
    print_lines(f"{verb} {counts}; {frees} {format_bytes(document['freed_bytes'])}")
