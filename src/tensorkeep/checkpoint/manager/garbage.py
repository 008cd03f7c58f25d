"""Which objects of a run in a store nobody needs: a decision from one listing and what its manifests name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tensorkeep.checkpoint.manager.steps import Garbage
from tensorkeep.formats.native.directory import is_ours
from tensorkeep.io.objects.store_commit import LEFTOVER_AGE, save_of
from tensorkeep.io.objects.stores import ObjectStatus


@dataclass(frozen=True, slots=True)
class Namer:
    """The manifest of a step, or the tombstone of a deleted one.

    ``prefix`` is that of the step, with a slash at its end. ``keys`` are those of all objects that it names, its own
    included; None if it is damaged, so that they are not known.
    """

    status: ObjectStatus
    prefix: str
    keys: frozenset[str] | None

    def among(self, objects: Mapping[str, ObjectStatus]) -> set[str]:
        """Return the keys of the objects that it names, or may name."""
        if self.keys is not None:
            return {key for key in self.keys if key in objects}
        return {key for key in objects if key.startswith(self.prefix) and is_ours(key.removeprefix(self.prefix))}


def find_garbage(
    objects: Mapping[str, ObjectStatus],
    manifests: Sequence[Namer],
    tombstones: Sequence[Namer],
    *,
    now: datetime,
    grace: timedelta,
) -> Garbage:
    """Return what can be deleted of the objects below the steps of a run, by key.

    An object that a manifest names remains. So does one that a tombstone younger than the grace period names: whoever
    opened the step before it was deleted may read it still. Of the others, those go that an older tombstone names, and
    those of saves that failed. A tombstone goes when the objects of its step are gone.
    """
    used = _named(manifests, objects)
    # Another save may have given an object this name since.
    named = {each.status.key: _older(each.among(objects), each.status, objects) for each in tombstones}
    recent = [each for each in tombstones if now - each.status.modified < grace]
    past = [each for each in tombstones if now - each.status.modified >= grace]
    waiting: set[str] = set().union(*(named[each.status.key] for each in recent)) - used
    removable: set[str] = set().union(*(named[each.status.key] for each in past)) - used - waiting
    marks = {each.status.key for each in tombstones}
    loose = {key for key in objects if save_of(key) and is_ours(key.rpartition("/")[2])}
    loose -= used | marks | set().union(*named.values())
    failed = {key for key in loose if now - objects[key].modified >= LEFTOVER_AGE}
    removable = (removable - marks) | failed
    for each in past:
        own = {key for key in named[each.status.key] if key.startswith(each.prefix)} - {each.status.key}
        if own <= removable:
            removable.add(each.status.key)
    return Garbage(_sizes(removable, objects), _sizes(waiting - marks, objects), _sizes(loose - failed, objects))


def freed_bytes(objects: Mapping[str, ObjectStatus], gone: Sequence[Namer], kept: Sequence[Namer]) -> int:
    """Return the bytes of the objects that only some of the steps name."""
    return sum(_sizes(_named(gone, objects) - _named(kept, objects), objects).values())


def _named(namers: Iterable[Namer], objects: Mapping[str, ObjectStatus]) -> set[str]:
    return set().union(*(each.among(objects) for each in namers))


def _older(keys: set[str], status: ObjectStatus, objects: Mapping[str, ObjectStatus]) -> set[str]:
    return {key for key in keys if objects[key].modified <= status.modified}


def _sizes(keys: Iterable[str], objects: Mapping[str, ObjectStatus]) -> dict[str, int]:
    return {key: objects[key].size for key in sorted(keys)}
