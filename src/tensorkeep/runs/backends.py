"""The steps of a run in a folder of a disk, and the place of the steps of any run."""

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorkeep.errors import NotACheckpointError, PathLike, TensorkeepError
from tensorkeep.formats.native.directory import CheckpointSummary, freed_bytes, summarise
from tensorkeep.formats.native.sharded import finish_saves
from tensorkeep.paths import StorePath, as_path
from tensorkeep.runs.steps import StepPlace, check_is_step, step_numbers
from tensorkeep.runs.store_backend import StorePlace
from tensorkeep.storage import exists, names_in
from tensorkeep.storage.commit import FolderLock, remove_abandoned, remove_checkpoint
from tensorkeep.storage.direct_io import store_errors
from tensorkeep.storage.parallel import shielded

logger = logging.getLogger(__name__)


def place_of(root: PathLike) -> StepPlace:
    """Return the place of the steps below a root, which need not exist."""
    path = as_path(root)
    return StorePlace(path) if isinstance(path, StorePath) else DiskPlace(path)


class DiskPlace(StepPlace):
    """A folder of steps, which one process at a time may change."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._lock: FolderLock | None = None

    def numbers(self) -> list[int]:
        return step_numbers(names_in(self.root))

    def exists(self, path: Path) -> bool:
        return exists(path)

    def summaries(self) -> Iterator[tuple[int, CheckpointSummary | TensorkeepError]]:
        for number in self.numbers():
            path = self.path_of(number)
            found: CheckpointSummary | TensorkeepError
            try:
                found = summarise(path)
            except TensorkeepError as error:
                # A step that its writer has deleted meanwhile is not broken.
                if isinstance(error, NotACheckpointError) and not exists(path):
                    continue
                found = error
            yield number, found

    def files_of(self, path: Path) -> list[os.stat_result]:
        try:
            with os.scandir(path) as found:
                return [file.stat(follow_symlinks=False) for file in found if not file.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def claim(self) -> None:
        shielded(self._claim)

    def _claim(self) -> None:
        if self._lock is None or not self._lock.is_valid():
            self._lock = FolderLock(self.root)
            finish_saves(self.root)
            remove_abandoned(self.root)

    def release(self) -> None:
        try:
            shielded(self._release)
        except BaseException:  # an interrupt, perhaps before it began
            shielded(self._release)
            raise

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def finish_saves(self) -> None:
        finish_saves(self.root)

    def check_removable(self, path: Path) -> None:
        with store_errors(path, "look at the step"):
            if path.is_symlink():
                raise NotACheckpointError("is a link, so it is not deleted", path=path, remedy="remove it yourself")
            check_is_step(path)

    def remove(self, path: Path) -> None:
        if not exists(path):
            return
        self.check_removable(path)
        with store_errors(path, "delete the step"):
            try:
                remove_checkpoint(path)
            except FileNotFoundError:
                return
        logger.info("deleted %s", path)

    def freed_bytes(self, paths: Iterable[Path]) -> int:
        return freed_bytes(paths)
