"""The objects of a run in a store: found by one listing, and each manifest is read once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tensorkeep.checkpoint.manager.garbage import Namer
from tensorkeep.checkpoint.manager.steps import step_numbers
from tensorkeep.errors import NotACheckpointError, NotFoundError, StoreError, TensorkeepError, UnsupportedError
from tensorkeep.formats.native.directory import Contents, read_contents
from tensorkeep.io import parallel
from tensorkeep.io.objects import stores
from tensorkeep.io.objects.store_commit import is_tombstone, put_tombstone
from tensorkeep.io.objects.store_directory import StoreDirectory
from tensorkeep.io.objects.stores import ObjectStatus
from tensorkeep.io.places import MANIFEST_NAME
from tensorkeep.paths import StorePath

_ATTEMPTS = 5

_KEPT_BYTES = 64 * 1024**2
"""Manifests that a snapshot keeps, to write them as tombstones; others are read twice."""

Objects = Mapping[str, ObjectStatus]
Found = Contents | TensorkeepError


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

    known: dict[tuple[str, str], Contents] = field(default_factory=dict)
    written: dict[str, tuple[int, Contents]] = field(default_factory=dict)


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
            return stores.objects(self._url / step)
        except UnsupportedError as error:
            if not step:
                return self._objects_of_each(unlisted)
            unlisted[step] = error
        with suppress(NotFoundError):
            return [stores.head(self._url / step / MANIFEST_NAME)]
        return []

    def _objects_of_each(self, unlisted: dict[str, UnsupportedError]) -> Sequence[ObjectStatus]:
        """Return the objects below all steps by a listing of each: one of all fails for a single object."""
        try:
            steps = [name for name, status in stores.children(self._url) if status is None and step_numbers([name])]
        except UnsupportedError:
            # Of an object beside the steps; those before the steps need not be listed.
            with suppress(UnsupportedError):
                return stores.objects(self._url, after=(self._url / "step-").key)
            raise
        found: list[ObjectStatus] = []
        tasks = [lambda step=step: found.extend(self._objects(step, unlisted)) for step in steps]
        parallel.run(tasks, min(len(tasks), stores.SMALL_REQUESTS))
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
        parallel.run([partial(read, key) for key in missing], min(len(missing), stores.SMALL_REQUESTS))
        new = {(key, tags[key]): each for key, each in found.items() if tags[key] and isinstance(each, Contents)}
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
            if isinstance(found, Contents):
                keys = frozenset(directory.path_of(name).key for name in found.sizes)
            yield Namer(objects[key], f"{key.rpartition('/')[0]}/", keys)

    def content_of(self, manifest: ObjectStatus) -> bytes:
        """Return the bytes of a manifest as it was listed; StoreError if it was replaced."""
        kept = self._kept.get(manifest.key)
        return bytes(stores.get(self.path_of_key(manifest.key), tag=manifest.tag)) if kept is None else kept

    def put_tombstone(self, manifest: ObjectStatus, contents: Found) -> None:
        """Keep a manifest as a tombstone, which need not be read."""
        content = self.content_of(manifest)
        tombstone = put_tombstone(self.path_of_key(manifest.key).parent, content)
        if isinstance(contents, Contents):
            self._memory.written[tombstone.key] = len(content), contents

    def path_of_key(self, key: str) -> StorePath:
        """Return the path of an object of this bucket."""
        return StorePath(f"{self._url.bucket}/{key}")
