"""The steps of a run in an object store: found by one listing, deleted in two stages.

First the manifest of a step is kept as ``removed.json``, its tombstone, and ``manifest.json`` is deleted: the step is
gone. Its objects are deleted by a later `StorePlace.sweep`, when no step names them and the tombstone is older than the
grace period. So whoever has opened the step reads it to the end, and a save that builds on it can finish.
"""

import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from tensorkeep.checkpoint.manager.garbage import Namer, find_garbage, freed_bytes
from tensorkeep.checkpoint.manager.steps import Garbage, Step, StepPlace, check_is_step, step_numbers
from tensorkeep.checkpoint.manager.store_run import Found, Listed, Objects, StoreRun
from tensorkeep.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    NotFoundError,
    StoreError,
    TensorkeepError,
    UsageError,
)
from tensorkeep.formats.native.directory import (
    Contents,
    Summary,
    foreign_among,
    is_native,
    summarise,
    summarise_contents,
)
from tensorkeep.io import parallel
from tensorkeep.io.objects import stores
from tensorkeep.io.objects.store_commit import is_tombstone, object_name
from tensorkeep.io.objects.store_directory import StoreDirectory
from tensorkeep.io.objects.stores import ObjectStatus
from tensorkeep.io.places import MANIFEST_NAME
from tensorkeep.paths import StorePath
from tensorkeep.units import format_age, parse_seconds

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
            stores.head(self._url / path.name / MANIFEST_NAME)
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

    def summaries(self) -> Iterator[tuple[int, Summary | TensorkeepError]]:
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
            contents = found if isinstance(found, Contents) else None
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
        parallel.run(tasks, min(len(tasks), stores.SMALL_REQUESTS))
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
            stores.delete([self._url / path.name / MANIFEST_NAME for path in gone])
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
        stores.delete([path for path in found if not is_tombstone(path.name)])
        stores.delete([path for path in found if is_tombstone(path.name)])
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
            stores.put(probe, b"")
            ahead = now - stores.head(probe).modified
        finally:
            stores.delete([probe])
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
