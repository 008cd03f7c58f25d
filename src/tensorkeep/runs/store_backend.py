"""Which objects of a run in a store nobody needs: a decision from one listing and what its manifests name."""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats.native.directory import (
    CheckpointSummary,
    ManifestContents,
    foreign_among,
    is_native,
    is_ours,
    read_contents,
    summarise,
    summarise_contents,
)
from tensorkeep.paths import StorePath
from tensorkeep.runs.steps import Garbage, Step, StepPlace, check_is_step, step_numbers
from tensorkeep.storage import parallel, store_requests
from tensorkeep.storage.base import MANIFEST_NAME
from tensorkeep.storage.object_store import StoreDirectory
from tensorkeep.storage.store_commit import LEFTOVER_AGE, is_tombstone, object_name, put_tombstone, save_of
from tensorkeep.storage.store_requests import ObjectStatus
from tensorkeep.units import format_age, parse_seconds

# Which objects of a run in a store nobody needs: a decision from one listing and what its manifests name.


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


# The objects of a run in a store: found by one listing, and each manifest is read once.

_ATTEMPTS = 5
_KEPT_BYTES = 64 * 1024**2
"""Manifests that a snapshot keeps, to write them as tombstones; others are read twice."""
Objects = Mapping[str, ObjectStatus]
Found = ManifestContents | TensorkeepError


class _Listing(NamedTuple):
    """The objects directly below the steps of a run, by key; and all names below each step, by its name.

    ``unlisted`` has the steps that hold an object which cannot be listed, with the error; of these, the manifest alone
    is known.
    """

    objects: dict[str, ObjectStatus]
    names: dict[str, set[str]]
    unlisted: dict[str, UnsupportedError]


@dataclass
class _Memory:
    """What was read of the manifests of a run, and of which there is no need to read it again.

    ``known`` has the key of each manifest and its tag. ``written`` has the tombstones that were written, by key, with
    their bytes: nobody replaces them.
    """

    known: dict[tuple[str, str], ManifestContents] = field(default_factory=dict)
    written: dict[str, tuple[int, ManifestContents]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listed:
    """What is below the steps of a run, as in a `_Listing`, and its manifests and tombstones, by key."""

    objects: Objects
    names: Mapping[str, set[str]]
    unlisted: Mapping[str, UnsupportedError]
    manifests: Mapping[str, Found]
    tombstones: Mapping[str, Found]


class StoreRun:
    """Lists the objects of a run, and reads its manifests.

    A `snapshot` does both once, and answers every question from that.
    """

    def __init__(self, url: StorePath) -> None:
        self._url = url
        self._memory = _Memory()
        self._is_snapshot = False
        self._seen: Listed | None = None  # of a snapshot
        self._kept: dict[str, bytes] = {}  # the manifests that a snapshot has read, by key
        self._room = _KEPT_BYTES

    def snapshot(self) -> "StoreRun":
        """Return a run that is looked at once, for a deletion that is planned and then done."""
        found = copy(self)
        found._is_snapshot, found._kept = True, {}
        return found

    def list(self, step: str = "") -> _Listing:
        """List the objects below the steps, or below the step of a name; UnsupportedError for a web server."""
        if not self._url.has_listing:
            raise UnsupportedError(
                "a web server lists no names, so the steps of a run are not found",
                path=self._url,
                remedy="give the number of a step",
            )
        depth = len(self._url.key.split("/")) if self._url.key else 0
        found = _Listing({}, {}, {})
        for each in self._objects(step, found.unlisted):
            parts = each.key.split("/")[depth:]
            if len(parts) > 1 and step_numbers(parts[:1]):
                found.names.setdefault(parts[0], set()).add(parts[1])
                if len(parts) == 2:
                    found.objects[each.key] = each
        return found

    def _objects(self, step: str, unlisted: dict[str, UnsupportedError]) -> Sequence[ObjectStatus]:
        """Return the objects below all steps, or below one; note a step of which only the manifest is known."""
        try:
            return store_requests.objects(self._url / step)
        except UnsupportedError as error:
            if not step:
                return self._objects_of_each(unlisted)
            unlisted[step] = error
        with suppress(NotFoundError):
            return [store_requests.head(self._url / step / MANIFEST_NAME)]
        return []

    def _objects_of_each(self, unlisted: dict[str, UnsupportedError]) -> Sequence[ObjectStatus]:
        """Return the objects below all steps by a listing of each: one of all fails for a single object."""
        try:
            steps = [
                name for name, status in store_requests.children(self._url) if status is None and step_numbers([name])
            ]
        except UnsupportedError:
            # Of an object beside the steps; those before the steps need not be listed.
            with suppress(UnsupportedError):
                return store_requests.objects(self._url, after=(self._url / "step-").key)
            raise
        found: list[ObjectStatus] = []
        tasks = [lambda step=step: found.extend(self._objects(step, unlisted)) for step in steps]
        parallel.run(tasks, min(len(tasks), store_requests.SMALL_REQUESTS))
        return found

    def look(self, step: str = "", *, tombstones: bool = False) -> Listed:
        """List all objects, or those of a step, and read the manifests; again if one was deleted or replaced meanwhile.

        A snapshot does so once, for all steps.
        """
        if self._seen is not None:
            return self._seen
        for _ in range(_ATTEMPTS):
            step = "" if self._is_snapshot else step
            listed = self.list(step)
            manifests = self._read(listed.objects, MANIFEST_NAME.__eq__)
            marks = self._read(listed.objects, is_tombstone) if tombstones or self._is_snapshot else {}
            if not step:
                # A new one each time: other threads may read it.
                self._memory.known = {at: each for at, each in self._memory.known.items() if at[0] in listed.objects}
            if manifests is not None and marks is not None:
                run = Listed(*listed, manifests, marks)
                self._seen = run if self._is_snapshot else None
                return run
        raise StoreError("its steps change faster than they can be listed", path=self._url, remedy="try again")

    def _read(self, objects: Objects, chosen: Callable[[str], bool]) -> dict[str, Found] | None:
        """Return the contents of all manifests of the chosen names, or why one cannot be read; None if one has changed.

        What was read before is not read again.
        """
        tags = {key: each.tag or "" for key, each in objects.items() if chosen(key.rpartition("/")[2])}
        known, written = self._memory.known, self._memory.written
        found: dict[str, Found | None] = {k: known[k, tag] for k, tag in tags.items() if (k, tag) in known}

        def read(key: str) -> None:
            found[key] = self._contents_of(objects, key)

        for key in [key for key in tags if key in written]:
            size, contents = written.pop(key)
            if size == objects[key].size:
                found.setdefault(key, contents)
        missing = [key for key in tags if key not in found]
        parallel.run([partial(read, key) for key in missing], min(len(missing), store_requests.SMALL_REQUESTS))
        new = {
            (key, tags[key]): each for key, each in found.items() if tags[key] and isinstance(each, ManifestContents)
        }
        self._memory.known = self._memory.known | new
        read_all = {key: each for key, each in found.items() if each is not None}
        return read_all if len(read_all) == len(found) else None

    def _contents_of(self, objects: Objects, key: str) -> Found | None:
        path = self.path_of_key(key)
        directory = StoreDirectory(path.parent, objects)
        size = objects[key].size
        try:
            if self._is_snapshot and path.name == MANIFEST_NAME and size <= self._room:
                self._room -= size
                self._kept[key] = directory.read_once(path.name)
            return read_contents(directory, path.name)
        except NotACheckpointError:
            return None
        except TensorkeepError as error:
            return None if directory.was_replaced() else error

    def namers(self, objects: Objects, manifests: Mapping[str, Found]) -> Iterator[Namer]:
        """Yield what each manifest or tombstone names."""
        for key, found in manifests.items():
            directory = StoreDirectory(self.path_of_key(key).parent)
            keys = None
            if isinstance(found, ManifestContents):
                keys = frozenset(directory.path_of(name).key for name in found.sizes)
            yield Namer(objects[key], f"{key.rpartition('/')[0]}/", keys)

    def content_of(self, manifest: ObjectStatus) -> bytes:
        """Return the bytes of a manifest as it was listed; StoreError if it was replaced."""
        kept = self._kept.get(manifest.key)
        return bytes(store_requests.get(self.path_of_key(manifest.key), tag=manifest.tag)) if kept is None else kept

    def put_tombstone(self, manifest: ObjectStatus, contents: Found) -> None:
        """Keep a manifest as a tombstone, which need not be read."""
        content = self.content_of(manifest)
        tombstone = put_tombstone(self.path_of_key(manifest.key).parent, content)
        if isinstance(contents, ManifestContents):
            self._memory.written[tombstone.key] = len(content), contents

    def path_of_key(self, key: str) -> StorePath:
        """Return the path of an object of this bucket."""
        return StorePath(f"{self._url.bucket}/{key}")


# The steps of a run in an object store: found by one listing, deleted in two stages.
#
# First the manifest of a step is kept as ``removed.json``, its tombstone, and ``manifest.json`` is deleted: the step is
# gone. Its objects are deleted by a later `StorePlace.sweep`, when no step names them and the tombstone is older
# than the
# grace period. So whoever has opened the step reads it to the end, and a save that builds on it can finish.

logger = logging.getLogger(__name__)
_MOST_AHEAD = timedelta(minutes=15)
"""So much S3 allows."""
DEFAULT_GRACE = "1h"
"""The grace period; ``TENSORKEEP_STORE_GRACE`` replaces it."""


class StorePlace(StepPlace):
    """A prefix of an object store whose steps any process may change: a step that two save goes to one of them."""

    def __init__(self, root: StorePath) -> None:
        super().__init__(root)
        self._url = root
        self.grace_seconds = _grace_seconds()
        self._run = StoreRun(root)
        self._clock_is_right = False

    def numbers(self) -> list[int]:
        return self._listed_numbers() if self._url.has_listing else []

    def _listed_numbers(self) -> list[int]:
        return step_numbers(key.split("/")[-2] for key in self._run.list().objects if key.endswith(f"/{MANIFEST_NAME}"))

    def exists(self, path: Path) -> bool:
        try:
            store_requests.head(self._url / path.name / MANIFEST_NAME)
        except NotFoundError:
            return False
        return True

    def newest_first(self) -> Iterator[tuple[int, Step | TensorkeepError]]:
        for number in reversed(self._listed_numbers()):
            path = self._url / self.path_of(number).name
            try:
                yield number, self.read(number)
            except StoreError:
                raise  # the step may be whole
            except TensorkeepError as error:
                # Unless its writer has deleted it meanwhile.
                if not isinstance(error, NotACheckpointError) or self.exists(path):
                    yield number, error

    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        run = self._run.look()
        links = Counter(key for each in self._run.namers(run.objects, run.manifests) for key in each.among(run.objects))
        listed = {key: each._replace(links=links[key]) for key, each in run.objects.items()}
        steps = {key.split("/")[-2]: found for key, found in run.manifests.items()}
        for number in step_numbers(steps):
            path = self._url / self.path_of(number).name
            found = self._summary(path, steps[path.name], listed)
            # Unless its writer has deleted it meanwhile.
            if not isinstance(found, NotACheckpointError) or self.exists(path):
                yield number, found

    def _summary(self, path: StorePath, found: Found, listed: Objects) -> CheckpointSummary | TensorkeepError:
        """Return the summary of a step, or what is wrong with it."""
        if isinstance(found, ManifestContents):
            with suppress(TensorkeepError):
                return summarise_contents(StoreDirectory(path, listed), found)
        # The pages of a listing are not of one moment: perhaps the step was saved between two of them.
        try:
            return summarise(path)
        except StoreError:
            # The step may be whole: without it, a run would seem empty, and training begin again.
            raise
        except TensorkeepError as error:
            return error

    def files_of(self, path: Path) -> list[os.stat_result]:
        try:
            return [each.as_stat() for each in store_requests.objects(self._url / path.name)]
        except TensorkeepError:
            return []

    def snapshot(self) -> "StorePlace":
        found = copy(self)
        found._run = self._run.snapshot()
        return found

    def check_removable(self, path: Path) -> None:
        for error in self.not_removable([path]).values():
            raise error

    def not_removable(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        return self._refused(self._run.look(_only(paths)), paths) if paths else {}

    def _refused(self, run: Listed, paths: Iterable[Path]) -> dict[Path, TensorkeepError]:
        """Return which of some paths are not removed, and why."""
        refused: dict[Path, TensorkeepError] = {}
        for path in paths:
            step = self._url / path.name
            found = run.manifests.get((step / MANIFEST_NAME).key)
            contents = found if isinstance(found, ManifestContents) else None
            try:
                if isinstance(found, StoreError):
                    raise found
                if path.name in run.unlisted:
                    raise run.unlisted[path.name]
                # Unreadable, it may be the manifest of another tool.
                known = contents is not None or (found is not None and is_native(step))
                foreign = foreign_among(run.names.get(path.name, ()), contents, in_store=True) if known else None
                check_is_step(step, foreign)
            except TensorkeepError as error:
                refused[path] = error
        return refused

    def remove(self, path: Path) -> None:
        for error in self.remove_all([path]).values():
            raise error

    def remove_all(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        """Delete steps: their tombstones are written at the same time, and their manifests deleted by few requests.

        A step that was saved again meanwhile remains, unless that was after the last look: no store is asked to delete
        a manifest on a condition.
        """
        if not paths:
            return {}
        run = self._run.look(_only(paths))
        listed = {path: run.objects.get((self._url / path.name / MANIFEST_NAME).key) for path in paths}
        there = {path: manifest for path, manifest in listed.items() if manifest is not None}
        failures = self._refused(run, there)

        def mark(path: Path, manifest: ObjectStatus) -> None:
            try:
                self._run.put_tombstone(manifest, run.manifests[manifest.key])
            except NotFoundError:
                pass  # it is gone already
            except TensorkeepError as error:
                failures[path] = error

        tasks = [partial(mark, *each) for each in there.items() if each[0] not in failures]
        parallel.run(tasks, min(len(tasks), store_requests.SMALL_REQUESTS))
        now = self._run.list(_only(paths)).objects if tasks else {}
        gone = []
        for path, manifest in there.items():
            if path in failures or manifest.key not in now:
                continue
            if now[manifest.key].tag == manifest.tag:
                gone.append(path)
                continue
            failures[path] = StoreError(
                "was saved again while it was deleted, so it remains",
                path=self._url / path.name,
                remedy="delete it again",
            )
        try:
            store_requests.delete([self._url / path.name / MANIFEST_NAME for path in gone])
        except TensorkeepError as error:
            return failures | dict.fromkeys(gone, error)
        for path in gone:
            logger.info("deleted %s; its objects remain for %g s at least", path, self.grace_seconds)
        return failures

    def freed_bytes(self, paths: Iterable[Path]) -> int:
        names = {path.name for path in paths}
        run = self._run.look()
        gone: list[Namer] = []
        kept: list[Namer] = []
        for each in self._run.namers(run.objects, run.manifests):
            (gone if each.prefix.split("/")[-2] in names else kept).append(each)
        return freed_bytes(run.objects, gone, kept)

    def garbage(self) -> Garbage:
        run = self._run.look(tombstones=True)
        for found in (*run.manifests.values(), *run.tombstones.values(), *run.unlisted.values()):
            # That of a later version, or one that cannot be read or listed now, may name any object.
            if isinstance(found, TensorkeepError) and not isinstance(found, CorruptCheckpointError):
                raise found
        return find_garbage(
            run.objects,
            list(self._run.namers(run.objects, run.manifests)),
            list(self._run.namers(run.objects, run.tombstones)),
            now=datetime.now(UTC),
            grace=timedelta(seconds=self.grace_seconds),
        )

    def sweep(self) -> None:
        found = [self._run.path_of_key(key) for key in self.garbage().removable]
        if found and not self._clock_is_right:
            self._check_clock(found[0].parent)
        # Tombstones last: they say which objects are still to be deleted.
        store_requests.delete([path for path in found if not is_tombstone(path.name)])
        store_requests.delete([path for path in found if is_tombstone(path.name)])
        if found:
            logger.info("deleted %d objects below %s that no step needs", len(found), self.root)

    def _check_clock(self, step: StorePath) -> None:
        """Check that this machine's clock is not ahead: what others read and save now would seem old.

        Stores refuse the requests of such a machine, unless these have no signature with a time, as those to Google's.
        """
        # The answers that obstore passes on have no time, but an object has. If it stays, it is one of a failed save.
        probe = step / object_name("model.safetensors", secrets.token_hex(8))
        now = datetime.now(UTC)
        try:
            store_requests.put(probe, b"")
            ahead = now - store_requests.head(probe).modified
        finally:
            store_requests.delete([probe])
        if ahead > _MOST_AHEAD:
            raise StoreError(
                f"the clock of this machine is {format_age(ahead.total_seconds())} ahead of the store's, so what "
                "deleted steps have left is not deleted",
                path=self._url,
                remedy="set the clock of this machine",
            )
        self._clock_is_right = True


def _only(paths: Sequence[Path]) -> str:
    """Return the name of a single step; empty for several."""
    return paths[0].name if len(paths) == 1 else ""


def _grace_seconds() -> float:
    given = os.environ.get("TENSORKEEP_STORE_GRACE", "")
    try:
        return parse_seconds(given or DEFAULT_GRACE)
    except UsageError:
        raise UsageError(f"TENSORKEEP_STORE_GRACE is {given!r}", remedy="give a duration, such as 1h or 0s") from None
