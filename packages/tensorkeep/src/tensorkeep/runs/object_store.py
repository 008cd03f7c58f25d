"""The steps of a run in an object store: found by one listing, deleted in two stages.

A deleted step leaves a tombstone, ``removed.json``. `StoreBackend.sweep` later deletes its objects.
"""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Self

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
from tensorkeep.runs.backends import Garbage, SingleTierBackend
from tensorkeep.runs.steps import Step, check_is_step, step_numbers
from tensorkeep.storage import parallel, store_requests
from tensorkeep.storage.base import MANIFEST_NAME
from tensorkeep.storage.object_store import StoreDirectory
from tensorkeep.storage.store_commit import LEFTOVER_AGE, is_tombstone, object_name, put_tombstone, save_of
from tensorkeep.storage.store_requests import ObjectStatus
from tensorkeep.units import format_age, parse_seconds
from tensorkeep.variables import read_variable

logger = logging.getLogger(__name__)

# The grace period: readers and saves that have opened a deleted step may finish. `TENSORKEEP_STORE_GRACE` replaces it.
DEFAULT_GRACE = "1h"
# S3 refuses requests from machines with a larger clock error.
_MOST_CLOCK_AHEAD = timedelta(minutes=15)
_ATTEMPTS = 5
# Bytes of manifests that a snapshot keeps, to write them as tombstones. Further manifests are read twice.
_KEPT_BYTES = 64 * 1024**2

Objects = Mapping[str, ObjectStatus]
ReadManifest = ManifestContents | TensorkeepError


# Which objects nobody needs: decided from one listing and the manifests, without a request.


@dataclass(frozen=True, slots=True)
class ManifestReferences:
    status: ObjectStatus
    # The prefix of the step, with a slash at the end.
    prefix: str
    # All objects that the manifest names, itself included; None if it is damaged.
    keys: frozenset[str] | None

    def among(self, objects: Objects) -> set[str]:
        """Return the keys of the objects that it refers to; for a damaged manifest, all objects that it may name."""
        if self.keys is not None:
            return {key for key in self.keys if key in objects}
        return {key for key in objects if key.startswith(self.prefix) and is_ours(key.removeprefix(self.prefix))}


def find_garbage(
    objects: Objects,
    manifests: Sequence[ManifestReferences],
    tombstones: Sequence[ManifestReferences],
    *,
    now: datetime,
    grace: timedelta,
) -> Garbage:
    """Return the objects that no manifest, and no tombstone younger than the grace period, refers to."""
    used = _referenced(manifests, objects)
    # A later save may have given the name of a deleted object to a new one, which the tombstone does not mean.
    meant = {
        each.status.key: {key for key in each.among(objects) if objects[key].modified <= each.status.modified}
        for each in tombstones
    }
    # A reader may have opened a step just before it was deleted.
    recent = [each for each in tombstones if now - each.status.modified < grace]
    past = [each for each in tombstones if now - each.status.modified >= grace]
    waiting: set[str] = set().union(*(meant[each.status.key] for each in recent)) - used
    removable: set[str] = set().union(*(meant[each.status.key] for each in past)) - used - waiting
    marks = {each.status.key for each in tombstones}
    # Objects of a save that no manifest names: of a running save until they are a day old, then of a failed one.
    loose = {key for key in objects if save_of(key) and is_ours(key.rpartition("/")[2])}
    loose -= used | marks | set().union(*meant.values())
    failed = {key for key in loose if now - objects[key].modified >= LEFTOVER_AGE}
    removable = (removable - marks) | failed
    # A tombstone remains until all objects of its own step can go: later sweeps find them by it.
    for each in past:
        own = {key for key in meant[each.status.key] if key.startswith(each.prefix)} - {each.status.key}
        if own <= removable:
            removable.add(each.status.key)
    return Garbage(_sizes(removable, objects), _sizes(waiting - marks, objects), _sizes(loose - failed, objects))


def freed_bytes(objects: Objects, deleted: Sequence[ManifestReferences], kept: Sequence[ManifestReferences]) -> int:
    return sum(_sizes(_referenced(deleted, objects) - _referenced(kept, objects), objects).values())


def _referenced(manifests: Iterable[ManifestReferences], objects: Objects) -> set[str]:
    return set().union(*(each.among(objects) for each in manifests))


def _sizes(keys: Iterable[str], objects: Objects) -> dict[str, int]:
    return {key: objects[key].size for key in sorted(keys)}


# Listing the objects of a run, and reading each manifest once.


@dataclass(frozen=True, slots=True)
class RunObjects:
    """The objects directly below the steps, and the contents of manifests and tombstones among them, by key."""

    objects: dict[str, ObjectStatus] = field(default_factory=dict)
    # All names below each step, by the step's name.
    names: dict[str, set[str]] = field(default_factory=dict)
    # Steps with an object that cannot be listed, and the error. Only their manifests are known.
    unlisted: dict[str, UnsupportedError] = field(default_factory=dict)
    manifests: Mapping[str, ReadManifest] = field(default_factory=dict)
    tombstones: Mapping[str, ReadManifest] = field(default_factory=dict)


@dataclass
class _ManifestCache:
    """Manifests that need not be read again: ``by_tag`` by key and tag of the object."""

    by_tag: dict[tuple[str, str], ManifestContents] = field(default_factory=dict)
    # Written by this process, by key, with their sizes: nobody replaces them.
    tombstones: dict[str, tuple[int, ManifestContents]] = field(default_factory=dict)


class RunScanner:
    """Lists the objects of a run, and reads its manifests. A `snapshot` does so once."""

    def __init__(self, url: StorePath) -> None:
        self._url = url
        self._cache = _ManifestCache()
        self._is_snapshot = False
        self._scanned: RunObjects | None = None  # of a snapshot
        self._kept: dict[str, bytes] = {}  # manifests that a snapshot has read, by key
        self._room = _KEPT_BYTES

    def snapshot(self) -> Self:
        found = copy(self)
        found._is_snapshot, found._kept = True, {}
        return found

    def check_listing(self) -> None:
        if not self._url.has_listing:
            text = "a web server lists no names, so the steps of a run are not found"
            raise UnsupportedError(text, path=self._url, remedy="give the number of a step")

    def list(self, step: str = "") -> RunObjects:
        self.check_listing()
        depth = len(self._url.key.split("/")) if self._url.key else 0
        found = RunObjects()
        for each in self._list(step, found.unlisted):
            parts = each.key.split("/")[depth:]
            if len(parts) > 1 and step_numbers(parts[:1]):
                found.names.setdefault(parts[0], set()).add(parts[1])
                if len(parts) == 2:
                    found.objects[each.key] = each
        return found

    def _list(self, step: str, unlisted: dict[str, UnsupportedError]) -> Sequence[ObjectStatus]:
        """Return the objects below all steps or one; add a step that cannot be listed to ``unlisted``."""
        try:
            return store_requests.objects(self._url / step)
        except UnsupportedError as error:
            if not step:
                return self._list_each_step(unlisted)
            unlisted[step] = error
        # The manifest can be asked for by name: the step exists if it is there.
        with suppress(NotFoundError):
            return [store_requests.head(self._url / step / MANIFEST_NAME)]
        return []

    def _list_each_step(self, unlisted: dict[str, UnsupportedError]) -> Sequence[ObjectStatus]:
        # A listing of all steps fails for a single object that it cannot contain.
        try:
            steps = [
                name for name, status in store_requests.children(self._url) if status is None and step_numbers([name])
            ]
        except UnsupportedError:
            # The object lies beside the steps. Objects before "step-" in the alphabet need not be listed.
            with suppress(UnsupportedError):
                return store_requests.objects(self._url, after=(self._url / "step-").key)
            raise
        found: list[ObjectStatus] = []
        tasks = [lambda step=step: found.extend(self._list(step, unlisted)) for step in steps]
        parallel.run(tasks, min(len(tasks), store_requests.SMALL_REQUESTS))
        return found

    def scan(self, step: str = "", *, tombstones: bool = False) -> RunObjects:
        """List all steps, or one, and read the manifests; again if one was deleted or replaced meanwhile."""
        if self._scanned is not None:
            return self._scanned
        # The manifests are read after the listing: if one has changed, the listing is out of date.
        for _ in range(_ATTEMPTS):
            # A snapshot answers every later question, about any step.
            step = "" if self._is_snapshot else step
            listed = self.list(step)
            manifests = self._read(listed.objects, MANIFEST_NAME.__eq__)
            marks = self._read(listed.objects, is_tombstone) if tombstones or self._is_snapshot else {}
            if not step:
                # Forget deleted manifests. A new dict, because other threads may read the old one.
                self._cache.by_tag = {at: each for at, each in self._cache.by_tag.items() if at[0] in listed.objects}
            if manifests is not None and marks is not None:
                run = replace(listed, manifests=manifests, tombstones=marks)
                self._scanned = run if self._is_snapshot else None
                return run
        raise StoreError("its steps change faster than they can be listed", path=self._url, remedy="try again")

    def _read(self, objects: Objects, is_chosen: Callable[[str], bool]) -> dict[str, ReadManifest] | None:
        """Return the contents of the manifests with chosen names, or their errors; None if one has changed."""
        tags = {key: each.tag or "" for key, each in objects.items() if is_chosen(key.rpartition("/")[2])}
        cached, written = self._cache.by_tag, self._cache.tombstones
        found: dict[str, ReadManifest | None] = {k: cached[k, tag] for k, tag in tags.items() if (k, tag) in cached}

        def read(key: str) -> None:
            found[key] = self._read_one(objects, key)

        for key in [key for key in tags if key in written]:
            size, contents = written.pop(key)
            # Popped: from now on, the tag of the listing identifies the tombstone.
            if size == objects[key].size:
                found.setdefault(key, contents)
        missing = [key for key in tags if key not in found]
        parallel.run([partial(read, key) for key in missing], min(len(missing), store_requests.SMALL_REQUESTS))
        new = {
            (key, tags[key]): each for key, each in found.items() if tags[key] and isinstance(each, ManifestContents)
        }
        self._cache.by_tag = self._cache.by_tag | new
        complete = {key: each for key, each in found.items() if each is not None}
        return complete if len(complete) == len(found) else None

    def _read_one(self, objects: Objects, key: str) -> ReadManifest | None:
        path = self.path_of_key(key)
        directory = StoreDirectory(path.parent, objects)
        size = objects[key].size
        try:
            if self._is_snapshot and path.name == MANIFEST_NAME and size <= self._room:
                self._room -= size
                self._kept[key] = directory.read_once(path.name)
            return read_contents(directory, path.name)
        except NotACheckpointError:
            return None  # deleted since it was listed
        except TensorkeepError as error:
            return None if directory.was_replaced() else error

    def references(self, objects: Objects, manifests: Mapping[str, ReadManifest]) -> Iterator[ManifestReferences]:
        for key, found in manifests.items():
            directory = StoreDirectory(self.path_of_key(key).parent)
            keys = None
            if isinstance(found, ManifestContents):
                keys = frozenset(directory.path_of(name).key for name in found.sizes)
            yield ManifestReferences(objects[key], f"{key.rpartition('/')[0]}/", keys)

    def put_tombstone(self, manifest: ObjectStatus, contents: ReadManifest) -> None:
        """Copy a manifest, as it was listed, to a tombstone; StoreError if the manifest was replaced."""
        content = self._kept.get(manifest.key)
        if content is None:
            content = bytes(store_requests.get(self.path_of_key(manifest.key), tag=manifest.tag))
        tombstone = put_tombstone(self.path_of_key(manifest.key).parent, content)
        if isinstance(contents, ManifestContents):
            self._cache.tombstones[tombstone.key] = len(content), contents

    def path_of_key(self, key: str) -> StorePath:
        return StorePath(f"{self._url.bucket}/{key}")


# The backend.


class StoreBackend(SingleTierBackend):
    """Steps below a prefix of an object store. Any process may change them; of two that save one step, one succeeds."""

    def __init__(self, root: StorePath) -> None:
        super().__init__(root)
        self._url = root
        self.grace_seconds = _grace_seconds()
        self._scanner = RunScanner(root)
        self._clock_is_right = False

    def numbers(self) -> list[int]:
        if not self._url.has_listing:
            return []
        keys = self._scanner.list().objects
        return step_numbers(key.split("/")[-2] for key in keys if key.endswith(f"/{MANIFEST_NAME}"))

    def newest_first(self) -> Iterator[tuple[int, Step | TensorkeepError]]:
        self._scanner.check_listing()
        return super().newest_first()

    def exists(self, path: Path) -> bool:
        try:
            store_requests.head(self._manifest_of(path))
        except NotFoundError:
            return False
        return True

    def _manifest_of(self, path: Path) -> StorePath:
        return self._url / path.name / MANIFEST_NAME

    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        run = self._scanner.scan()
        references = self._scanner.references(run.objects, run.manifests)
        # The count of manifests that name an object stands for the link count of a file.
        links = Counter(key for each in references for key in each.among(run.objects))
        listed = {key: each._replace(links=links[key]) for key, each in run.objects.items()}
        steps = {key.split("/")[-2]: found for key, found in run.manifests.items()}
        for number in step_numbers(steps):
            path = self._url / self.path_of(number).name
            found = self._summary(path, steps[path.name], listed)
            if not isinstance(found, TensorkeepError) or self.is_broken(number, found):
                yield number, found

    def is_broken(self, number: int, error: TensorkeepError) -> bool:
        if isinstance(error, StoreError):
            # The step may be complete. Without it a run could seem empty, and training would begin again.
            raise error
        return super().is_broken(number, error)

    def _summary(self, path: StorePath, found: ReadManifest, listed: Objects) -> CheckpointSummary | TensorkeepError:
        if isinstance(found, ManifestContents):
            with suppress(TensorkeepError):
                return summarise_contents(StoreDirectory(path, listed), found)
        # The pages of a listing are not of one moment: the step may have been saved between two pages.
        try:
            return summarise(path)
        except TensorkeepError as error:
            return error

    def files_of(self, path: Path) -> list[os.stat_result]:
        try:
            return [each.as_stat() for each in store_requests.objects(self._url / path.name)]
        except TensorkeepError:
            return []

    def snapshot(self) -> Self:
        found = copy(self)
        found._scanner = self._scanner.snapshot()
        return found

    def not_removable(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        return self._refused(self._scanner.scan(_only(paths)), paths) if paths else {}

    def _refused(self, run: RunObjects, paths: Iterable[Path]) -> dict[Path, TensorkeepError]:
        refused: dict[Path, TensorkeepError] = {}
        for path in paths:
            step = self._url / path.name
            found = run.manifests.get(self._manifest_of(path).key)
            contents = found if isinstance(found, ManifestContents) else None
            try:
                if isinstance(found, StoreError):
                    raise found
                if path.name in run.unlisted:
                    raise run.unlisted[path.name]
                # A manifest that cannot be parsed may belong to another tool.
                known = contents is not None or (found is not None and is_native(step))
                foreign = foreign_among(run.names.get(path.name, ()), contents, in_store=True) if known else None
                check_is_step(step, foreign)
            except TensorkeepError as error:
                refused[path] = error
        return refused

    def remove_all(self, paths: Sequence[Path]) -> dict[Path, TensorkeepError]:
        if not paths:
            return {}
        run = self._scanner.scan(_only(paths))
        listed = {path: run.objects.get(self._manifest_of(path).key) for path in paths}
        manifests = {path: manifest for path, manifest in listed.items() if manifest is not None}
        failures = self._refused(run, manifests)

        def mark(path: Path, manifest: ObjectStatus) -> None:
            try:
                self._scanner.put_tombstone(manifest, run.manifests[manifest.key])
            except NotFoundError:
                pass  # it is gone already
            except TensorkeepError as error:
                failures[path] = error

        # The tombstone comes first. If this process is killed before it deletes the manifest, the step still exists,
        # and its manifest protects the objects from the sweep.
        tasks = [partial(mark, *each) for each in manifests.items() if each[0] not in failures]
        parallel.run(tasks, min(len(tasks), store_requests.SMALL_REQUESTS))
        # No store deletes an object on a condition. A step that another process saves again remains if it is seen here;
        # one that is saved between this listing and the deletion loses its manifest.
        now = self._scanner.list(_only(paths)).objects if tasks else {}
        deleted = []
        for path, manifest in manifests.items():
            if path in failures or manifest.key not in now:
                continue
            if now[manifest.key].tag == manifest.tag:
                deleted.append(path)
                continue
            failures[path] = StoreError(
                "was saved again while it was deleted, so it remains",
                path=self._url / path.name,
                remedy="delete it again",
            )
        try:
            store_requests.delete([self._manifest_of(path) for path in deleted])
        except TensorkeepError as error:
            return failures | dict.fromkeys(deleted, error)
        for path in deleted:
            logger.info("deleted %s; its objects remain for %g s at least", path, self.grace_seconds)
        return failures

    def freed_bytes(self, paths: Iterable[Path]) -> int:
        names = {path.name for path in paths}
        run = self._scanner.scan()
        deleted: list[ManifestReferences] = []
        kept: list[ManifestReferences] = []
        for each in self._scanner.references(run.objects, run.manifests):
            (deleted if each.prefix.split("/")[-2] in names else kept).append(each)
        return freed_bytes(run.objects, deleted, kept)

    def garbage(self) -> Garbage:
        run = self._scanner.scan(tombstones=True)
        for found in (*run.manifests.values(), *run.tombstones.values(), *run.unlisted.values()):
            # A manifest of a later version, or one that cannot be read or listed now, may refer to any object.
            if isinstance(found, TensorkeepError) and not isinstance(found, CorruptCheckpointError):
                raise found
        return find_garbage(
            run.objects,
            list(self._scanner.references(run.objects, run.manifests)),
            list(self._scanner.references(run.objects, run.tombstones)),
            now=datetime.now(UTC),
            grace=timedelta(seconds=self.grace_seconds),
        )

    def sweep(self) -> None:
        found = [self._scanner.path_of_key(key) for key in self.garbage().removable]
        if not found:
            return
        if not self._clock_is_right:
            self._check_clock(found[0].parent)
        # Tombstones last: if this process is killed, they still name the objects to delete.
        store_requests.delete([path for path in found if not is_tombstone(path.name)])
        store_requests.delete([path for path in found if is_tombstone(path.name)])
        logger.info("deleted %d objects below %s that no step needs", len(found), self.root)

    def _check_clock(self, step: StorePath) -> None:
        # With a clock that is ahead, what others read and save now would seem old. Most stores refuse requests with a
        # wrong time, but Google's requests are signed without a time.
        # obstore does not pass on the time of an answer, but the time of an object. If this process is killed, the
        # probe remains, and is deleted like an object of a failed save.
        probe = step / object_name("model.safetensors", secrets.token_hex(8))
        now = datetime.now(UTC)
        try:
            store_requests.put(probe, b"")
            ahead = now - store_requests.head(probe).modified
        finally:
            store_requests.delete([probe])
        if ahead > _MOST_CLOCK_AHEAD:
            raise StoreError(
                f"the clock of this machine is {format_age(ahead.total_seconds())} ahead of the store's, so what "
                "deleted steps have left is not deleted",
                path=self._url,
                remedy="set the clock of this machine",
            )
        self._clock_is_right = True


def _only(paths: Sequence[Path]) -> str:
    # One step is listed alone; for several, one listing of the run takes fewer requests.
    return paths[0].name if len(paths) == 1 else ""


def _grace_seconds() -> float:
    given = read_variable("TENSORKEEP_STORE_GRACE")
    try:
        return parse_seconds(given or DEFAULT_GRACE)
    except UsageError:
        raise UsageError(f"TENSORKEEP_STORE_GRACE is {given!r}", remedy="give a duration, such as 1h or 0s") from None
