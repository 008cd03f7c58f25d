"""``tensorkeep prune``: delete the steps of a run that no rule wants."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from tensorkeep.checkpoint.manager.manager import CheckpointManager
from tensorkeep.checkpoint.manager.retention import KeepBest, KeepThinned
from tensorkeep.checkpoint.manager.steps import Step, check_removable, step_path
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import counted, printable
from tensorkeep.errors import CorruptCheckpointError, NotACheckpointError, TensorkeepError, UsageError
from tensorkeep.formats.native.space import freed_bytes
from tensorkeep.units import format_bytes


def prune(
    root: str,
    /,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    metric: str | None = None,
    mode: str = "min",
    keep_thinned: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    broken: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    output: Output = DEFAULT,
) -> int:
    """Delete the steps of a training run that no rule wants.

    The last step is never deleted, and neither is a step that holds files which are no part of it.

    Parameters
    ----------
    root
        The folder of a run: step-000100, step-000200, ...
    keep_last
        Keep the last so many steps.
    keep_every
        Keep the steps whose number is a multiple of it.
    keep_best
        Keep the so many best steps by their metric.
    metric
        Which metric; may be left out where the steps have only one.
    mode
        Whether a "min" or a "max" of the metric is best.
    keep_thinned
        Keep fewer steps the older they are: AGE:DISTANCE pairs such as 1h:0 1d:1h 30d:1d.
    broken
        Delete steps that are damaged, too; what is no checkpoint, could not be looked at or was written by a later
        version is left as it is.
    dry_run
        Delete nothing, and say what would be.
    """
    if keep_last is None and keep_every is None and keep_best is None and not keep_thinned and not broken:
        raise UsageError("no rule says what to keep", remedy="give --keep-last, --keep-every, --keep-best or others")
    best = None if keep_best is None else KeepBest(keep_best, metric, mode)
    thinned = KeepThinned(tuple(map(_rung, keep_thinned))) if keep_thinned else None
    with CheckpointManager(
        root, keep_last=keep_last, keep_every=keep_every, keep_best=best, keep=thinned, asynchronous=False
    ) as manager:
        found = manager.survey()
        if not found.steps and not found.broken:
            raise NotACheckpointError("holds no step", path=root, remedy="give the folder in which step-000100 lies")
        unwanted = [step.number for step in manager.prune(dry_run=True)]
        damaged = [number for number, error in found.broken.items() if _is_damage(error)] if broken else []
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
    output.show(document, lambda: _print(document, quiet=output.quiet))
    return 0


def _is_damage(error: TensorkeepError) -> bool:
    # What could not be looked at, or is of a later version, may be whole; what is no checkpoint is somebody's.
    return isinstance(error, CorruptCheckpointError)


def _not_removable(manager: CheckpointManager, numbers: list[int]) -> dict[int, TensorkeepError]:
    """Return those of the steps that are not steps and nothing else, and why."""
    left: dict[int, TensorkeepError] = {}
    for number in numbers:
        try:
            check_removable(step_path(manager.root, number))
        except (UsageError, NotACheckpointError) as error:
            left[number] = error
    return left


def _rung(text: str) -> tuple[str, str]:
    age, colon, distance = text.partition(":")
    if not colon:
        raise UsageError(f"{text!r} is no rung", remedy="write AGE:DISTANCE, for example 1d:1h")
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


def _print(document: dict[str, Any], *, quiet: bool) -> None:
    if quiet:
        return
    verb = "would delete" if document["dry_run"] else "deleted"
    for step in document["deleted"]:
        print(printable(f"{verb} step {step['step']}: {format_bytes(step['own_bytes'])} of its own"))
    for number in document["deleted_broken"]:
        print(printable(f"{verb} step {number}: broken"))
    for number, reason in {**document["broken"], **document["left"]}.items():
        print(printable(f"left as it is: step {number}: {reason}"))
    counts = f"{counted(len(document['deleted']), 'step')}, kept {len(document['kept'])}"
    frees = "would free" if document["dry_run"] else "freed"
    print(printable(f"{verb} {counts}; {frees} {format_bytes(document['freed_bytes'])}"))
