"""The steps of a run in an object store: found by one listing, deleted in two stages.

First the manifest of a step is kept as ``removed.json``, its tombstone, and ``manifest.json`` is deleted: the step is
gone. Its objects are deleted by a later `StorePlace.sweep`, when no step names them and the tombstone is older than the
grace period. So whoever has opened the step reads it to the end, and a save that builds on it can finish.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from tensorkeep.checkpoint.manager.garbage import Namer, find_garbage, freed_bytes
from tensorkeep.checkpoint.manager.steps import Garbage, StepPlace, check_is_step, step_numbers
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
)
from tensorkeep.formats.native.directory import Contents, Summary, read_contents, summarise, summarise_contents
from tensorkeep.io import parallel
from tensorkeep.io.objects import stores
from tensorkeep.io.objects.store_commit import is_tombstone, put_tombstone
from tensorkeep.io.objects.store_directory import StoreDirectory
from tensorkeep.io.objects.stores import ObjectStatus
from tensorkeep.io.places import MANIFEST_NAME
from tensorkeep.paths import StorePath
from tensorkeep.units import parse_seconds

logger = logging.getLogger(__name__)

DEFAULT_GRACE = "1h"
"""The grace period; ``TENSORKEEP_STORE_GRACE`` replaces it."""

_ATTEMPTS = 5

Objects = Mapping[str, ObjectStatus]
Found = Contents | TensorkeepError


@dataclass(frozen=True, slots=True)
class _Run:
    """The objects below the steps of a run, and the contents of its manifests and tombstones, all by key."""

    objects: Objects
    manifests: Mapping[str, Found]
    tombstones: Mapping[str, Found]


class StorePlace(StepPlace):
    """A prefix of an object store whose steps any process may change: a step that two save goes to one of them."""

    def __init__(self, root: StorePath) -> None:
        super().__init__(root)
        self._url = root
        self.grace_seconds = _grace_seconds()
        self._known: dict[tuple[str, str], Contents] = {}  # by the key of the manifest and its tag

    def numbers(self) -> list[int]:
        if not self._url.has_listing:
            return []
        return step_numbers(key.split("/")[-2] for key in self._objects() if key.endswith(f"/{MANIFEST_NAME}"))

    def exists(self, path: Path) -> bool:
        try:
            stores.head(self._url / path.name / MANIFEST_NAME)
        except NotFoundError:
            return False
        return True

    def summaries(self) -> Iterator[tuple[int, Summary | TensorkeepError]]:
        run = self._look()
        links = Counter(key for each in self._namers(run.objects, run.manifests) for key in each.among(run.objects))
        listed = {key: each._replace(links=links[key]) for key, each in run.objects.items()}
        steps = {key.split("/")[-2]: found for key, found in run.manifests.items()}
        for number in step_numbers(steps):
            path = self._url / self.path_of(number).name
            found = self._summary(path, steps[path.name], listed)
            # Unless its writer has deleted it meanwhile.
            if not isinstance(found, NotACheckpointError) or self.exists(path):
                yield number, found

    def _summary(self, path: StorePath, found: Found, listed: Objects) -> Summary | TensorkeepError:
        """Return the summary of a step, or what is wrong with it."""
        if isinstance(found, Contents):
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
            return [each.as_stat() for each in stores.objects(self._url / path.name)]
        except TensorkeepError:
            return []

    def check_removable(self, path: Path) -> None:
        check_is_step(path)

    def remove(self, path: Path) -> None:
        step = self._url / path.name
        try:
            self.check_removable(step)
            content, seen = stores.read(step / MANIFEST_NAME)
            put_tombstone(step, content)
            now = stores.head(step / MANIFEST_NAME)
        except NotACheckpointError:
            if self.exists(step):
                raise
            return  # it is gone already
        if now.tag != seen.tag:
            raise StoreError("was saved again while it was deleted, so it remains", path=step, remedy="delete it again")
        stores.delete([step / MANIFEST_NAME])
        logger.info("deleted %s; its objects remain for %g s at least", step, self.grace_seconds)

    def freed_bytes(self, paths: Iterable[Path]) -> int:
        names = {path.name for path in paths}
        run = self._look()
        gone: list[Namer] = []
        kept: list[Namer] = []
        for each in self._namers(run.objects, run.manifests):
            (gone if each.prefix.split("/")[-2] in names else kept).append(each)
        return freed_bytes(run.objects, gone, kept)

    def garbage(self) -> Garbage:
        run = self._look(tombstones=True)
        for found in (*run.manifests.values(), *run.tombstones.values()):
            # That of a later version, or one that cannot be read now, may name any object.
            if isinstance(found, TensorkeepError) and not isinstance(found, CorruptCheckpointError):
                raise found
        return find_garbage(
            run.objects,
            list(self._namers(run.objects, run.manifests)),
            list(self._namers(run.objects, run.tombstones)),
            # Stores refuse the requests of a machine whose clock is wrong by more than minutes.
            now=datetime.now(UTC),
            grace=timedelta(seconds=self.grace_seconds),
        )

    def sweep(self) -> None:
        found = [self._path_of_key(key) for key in self.garbage().removable]
        # Tombstones last: they say which objects are still to be deleted.
        stores.delete([path for path in found if not is_tombstone(path.name)])
        stores.delete([path for path in found if is_tombstone(path.name)])
        if found:
            logger.info("deleted %d objects below %s that no step needs", len(found), self.root)

    def _objects(self) -> Objects:
        """Return the objects that lie directly below the steps, by key; UnsupportedError for a web server."""
        if not self._url.has_listing:
            raise UnsupportedError(
                "a web server lists no names, so the steps of a run are not found",
                path=self.root,
                remedy="give the number of a step",
            )
        depth = len(self._url.key.split("/")) + 2 if self._url.key else 2
        found = ((each.key.split("/"), each) for each in stores.objects(self._url))
        return {each.key: each for parts, each in found if len(parts) == depth and step_numbers([parts[-2]])}

    def _look(self, *, tombstones: bool = False) -> _Run:
        """List all objects, and read the manifests; again if one was deleted or replaced meanwhile."""
        for _ in range(_ATTEMPTS):
            objects = self._objects()
            manifests = self._read(objects, MANIFEST_NAME.__eq__)
            marks = self._read(objects, is_tombstone) if tombstones else {}
            if manifests is not None and marks is not None:
                return _Run(objects, manifests, marks)
        raise StoreError("its steps change faster than they can be listed", path=self.root, remedy="try again")

    def _read(self, objects: Objects, chosen: Callable[[str], bool]) -> dict[str, Found] | None:
        """Return the contents of all manifests of the chosen names, or why one cannot be read; None if one has changed.

        What was read before is not read again.
        """
        tags = {key: each.tag or "" for key, each in objects.items() if chosen(key.rpartition("/")[2])}
        known = dict(self._known)
        found: dict[str, Found | None] = {k: known[k, tag] for k, tag in tags.items() if (k, tag) in known}

        def read(key: str) -> None:
            found[key] = self._contents_of(objects, key)

        missing = [key for key in tags if key not in found]
        parallel.run([partial(read, key) for key in missing], min(len(missing), stores.SMALL_REQUESTS))
        known |= {(key, tags[key]): each for key, each in found.items() if tags[key] and isinstance(each, Contents)}
        # A new one each time: other threads may read it.
        self._known = {at: each for at, each in known.items() if at[0] in objects}
        read_all = {key: each for key, each in found.items() if each is not None}
        return read_all if len(read_all) == len(found) else None

    def _contents_of(self, objects: Objects, key: str) -> Found | None:
        path = self._path_of_key(key)
        directory = StoreDirectory(path.parent, objects)
        try:
            return read_contents(directory, path.name)
        except NotACheckpointError:
            return None
        except TensorkeepError as error:
            return None if directory.was_replaced() else error

    def _namers(self, objects: Objects, manifests: Mapping[str, Found]) -> Iterator[Namer]:
        """Yield what each manifest or tombstone names."""
        for key, found in manifests.items():
            directory = StoreDirectory(self._path_of_key(key).parent)
            keys = None
            if isinstance(found, Contents):
                keys = frozenset(directory.path_of(name).key for name in found.sizes)
            yield Namer(objects[key], f"{key.rpartition('/')[0]}/", keys)

    def _path_of_key(self, key: str) -> StorePath:
        return StorePath(f"{self._url.bucket}/{key}")


def _grace_seconds() -> float:
    given = os.environ.get("TENSORKEEP_STORE_GRACE", "")
    try:
        return parse_seconds(given or DEFAULT_GRACE)
    except UsageError:
        raise UsageError(f"TENSORKEEP_STORE_GRACE is {given!r}", remedy="give a duration, such as 1h or 0s") from None
