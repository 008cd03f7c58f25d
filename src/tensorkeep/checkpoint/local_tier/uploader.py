"""The uploads of a run's steps, from a folder on a disk to an object store, by one background thread."""

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from tensorkeep.checkpoint.local_tier.transfer import StoredCopy, Throttle, Transfer, copy_to_store, find_copy
from tensorkeep.checkpoint.manager.steps import UploadStatus, step_path
from tensorkeep.errors import (
    CorruptCheckpointError,
    DestinationExistsError,
    NotACheckpointError,
    NotFoundError,
    StoreError,
    TensorkeepError,
    UnsupportedError,
)
from tensorkeep.formats.native.directory import summarise
from tensorkeep.formats.probe import exists
from tensorkeep.io.parallel import Cancellation, Cancelled
from tensorkeep.paths import StorePath
from tensorkeep.units import counted, format_speed

logger = logging.getLogger(__name__)


def in_short(error: BaseException) -> str:
    """Return what an error says, without its remedy, for another message."""
    return str(error).partition("\n")[0] or type(error).__name__


class Uploader:
    """Uploads the steps of a folder, by their numbers, until none waits or the store fails.

    A thread does so, which ends then; `add` and `start` begin again. An interpreter that exits waits for it.

    In the thread, ``prepare`` is called until it has succeeded, to find the steps that earlier processes have left
    (`add_found`); ``choose`` with the numbers that wait, if they are several, to return those that are still wanted;
    and ``uploaded`` after each step.
    """

    def __init__(
        self,
        root: Path,
        store: StorePath,
        bytes_per_second: int | None,
        *,
        prepare: Callable[[], None],
        choose: Callable[[list[int]], list[int]],
        uploaded: Callable[[int], None],
    ) -> None:
        self._root = root
        self._store = store
        self._throttle = Throttle(bytes_per_second)
        self._prepare = prepare
        self._choose = choose
        self._uploaded = uploaded
        # Ctrl-C cannot come between taking a plain lock and entering its block; a condition is entered by Python code.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._cancellation = Cancellation()
        self._prepared = False
        self._waiting: dict[int, bool] = {}  # with whether another step of the number is replaced
        self._current: UploadStatus | None = None
        self._copies: dict[int, StoredCopy] = {}
        self._refused: dict[int, TensorkeepError] = {}  # steps that cannot be uploaded, though the store works
        self._failure: BaseException | None = None
        self._process = os.getpid()

    # Called in the threads of the user and of saves

    def add(self, number: int, *, overwrite: bool) -> None:
        """Upload a step that was saved, and all that wait; ``overwrite`` one of this number that the store has."""
        with self._lock:
            self._copies.pop(number, None)
            self._refused.pop(number, None)
            self._waiting[number] = overwrite
        self.start()

    def start(self, *, look: bool = False) -> None:
        """Begin to upload what waits, unless that is being done; with ``look``, after another `prepare`."""
        with self._lock:
            self._prepared = self._prepared and not look
            if self._thread is not None:
                return
            self._failure = None
            if self._prepared and not self._waiting:
                return
            self._cancellation = Cancellation()
            try:
                self._thread = threading.Thread(target=self._run, name="tensorkeep-uploads")
                self._thread.start()
                return
            except RuntimeError:
                # The interpreter exits, and waits for the thread of a save, which is this one.
                self._thread = threading.current_thread()
            except BaseException:
                # Nobody must wait for a thread that may never run; one that does run ends at once.
                self._thread = None
                raise
        self._run()

    def drain(self) -> None:
        """Upload what waits, until that is done or the store has failed; Ctrl-C ends the waiting and the uploads."""
        try:
            while True:
                self.start()
                with self._lock:
                    while self._thread is not None:
                        self._changed.wait()
                    # Else the thread was about to end after an earlier Ctrl-C.
                    if self._failure is not None or not self._waiting:
                        return
        except KeyboardInterrupt:
            self._cancellation.cancel()
            raise

    def forget(self, number: int) -> None:
        """Do not upload a step, since it is to be deleted; one that is being uploaded is waited for."""
        with self._lock:
            while self._current is not None and self._current.step == number:
                self._changed.wait()
            for steps in (self._waiting, self._refused, self._copies):
                steps.pop(number, None)

    def drop_copy(self, number: int) -> None:
        """Forget the copy of a step that is saved again, or deleted from the disk."""
        with self._lock:
            self._copies.pop(number, None)

    def stored(self) -> set[int]:
        """Return the steps of the folder that the store has a copy of."""
        with self._lock:
            return set(self._copies)

    def pending(self) -> set[int]:
        """Return the steps that wait, or cannot be uploaded."""
        with self._lock:
            return {*self._waiting, *self._refused}

    def statuses(self) -> list[UploadStatus]:
        """Return the steps that are not in the store yet, by number."""
        with self._lock:
            reason = None if self._failure is None else str(self._failure)
            state: Literal["waiting", "failed"] = "waiting" if reason is None else "failed"
            found = {number: UploadStatus(number, state, error=reason) for number in self._waiting}
            found |= {number: UploadStatus(number, "failed", error=str(why)) for number, why in self._refused.items()}
            if self._current is not None:
                found[self._current.step] = self._current
            return [found[number] for number in sorted(found)]

    def take_failure(self) -> BaseException | None:
        """Return the reason of the last failure, unless it was returned or raised before."""
        return _unreported.pop(self, None)

    def raise_failure(self) -> None:
        """Raise StoreError with the steps that could not be uploaded, and the reason."""
        with self._lock:
            left = sorted({*self._waiting, *self._refused})
            reason = self._failure or next(iter(self._refused.values()), None)
        self.take_failure()
        if reason is None:
            return
        what = f"{counted(len(left), 'step')} ({', '.join(map(str, left))})" if left else "its steps"
        raise StoreError(
            f"{what} could not be uploaded from {self._root}: {in_short(reason)}",
            path=self._store,
            remedy="the next process that saves into this run uploads those that are on the disk",
        ) from reason

    # Called in the thread that uploads

    def add_found(self, number: int) -> None:
        """Note a step that an earlier process has saved: the store has a whole copy of it, or it waits."""
        try:
            if not self._look_at_copy(number, replace=True):
                self._refuse(number, self._conflict(number))
        except NotACheckpointError:
            with self._lock:
                self._waiting.setdefault(number, False)
        except (CorruptCheckpointError, UnsupportedError) as error:
            self._refuse(number, error)

    def _look_at_copy(self, number: int, *, replace: bool) -> bool:
        """Note the copy in the store, or with ``replace`` that the step waits to replace a damaged one.

        Returns False if neither is so, as of another step. Raises the errors of `find_copy`.
        """
        source, destination = self._paths(number)
        copy = find_copy(source, destination)
        if copy is None:
            return False
        try:
            summarise(destination)
        except CorruptCheckpointError as error:
            if not replace:
                return False
            logger.warning("step %d of %s is uploaded again: %s", number, self._root, in_short(error))
            with self._lock:
                self._waiting.setdefault(number, True)
        else:
            self._note_copy(number, copy)
        return True

    def _run(self) -> None:
        thread = threading.current_thread()
        with self._lock:
            if self._thread is not thread:
                return  # its start was interrupted
        try:
            if not self._prepared:
                self._prepare()
                self._prepared = True
            while (found := self._next()) is not None:
                self._upload(*found)
        except Cancelled:
            pass
        except BaseException as error:
            logger.info("steps of %s are not uploaded: %s", self._root, in_short(error))
            with self._lock:
                self._failure = _unreported[self] = error
        finally:
            with self._lock:
                if self._thread is thread:
                    self._current = self._thread = None
                self._changed.notify_all()

    def _next(self) -> tuple[int, bool] | None:
        """Return the next step, and whether it replaces another one; None if no step waits, which ends the thread."""
        with self._lock:
            waiting = sorted(self._waiting)
        wanted = self._choose(waiting) if len(waiting) > 1 else waiting
        with self._lock:
            self._current = None
            for number in {*waiting} - {*wanted}:
                self._waiting.pop(number, None)
            self._changed.notify_all()
            if not self._waiting:
                # In the same moment, so that a step which is added now begins a new thread.
                self._thread = None
                return None
            number = min(self._waiting)
            self._current = UploadStatus(number, "uploading")
            return number, self._waiting.pop(number)

    def _upload(self, number: int, overwrite: bool) -> None:
        source, destination = self._paths(number)
        started = time.perf_counter()
        try:
            self._note_copy(number, self._copy(number, overwrite=overwrite))
        except DestinationExistsError as error:
            # Others may have uploaded this very step. A damaged copy that could not be replaced is not tried again.
            with suppress(NotACheckpointError):
                if self._look_at_copy(number, replace=not overwrite):
                    return
            self._refuse(number, error)
            return
        except (CorruptCheckpointError, UnsupportedError) as error:
            self._refuse(number, error)
            return
        except BaseException as error:
            if isinstance(error, NotACheckpointError) and not exists(source):
                # Not by `forget`, which waits for this.
                self._refuse(number, NotFoundError("was deleted before it was uploaded", path=source))
                return
            with self._lock:
                self._waiting.setdefault(number, overwrite)
            raise
        sent = self._current.bytes_total if self._current else 0
        logger.info("uploaded %s to %s: %s", source, destination, format_speed(sent, time.perf_counter() - started))
        self._uploaded(number)

    def _copy(self, number: int, *, overwrite: bool) -> StoredCopy:
        """Copy a step, at a second attempt if a request fails once: not every one is repeated below."""
        source, destination = self._paths(number)
        transfer = Transfer(self._throttle, self._cancellation, partial(self._note_progress, number))
        with self._lock:
            earlier = list(self._copies.values())
        try:
            return copy_to_store(source, destination, transfer, earlier=earlier, overwrite=overwrite)
        except StoreError as error:
            logger.info("step %d of %s is uploaded again: %s", number, self._root, in_short(error))
            return copy_to_store(source, destination, transfer, earlier=earlier, overwrite=overwrite)

    def _paths(self, number: int) -> tuple[Path, StorePath]:
        source = step_path(self._root, number)
        return source, self._store / source.name

    def _note_progress(self, number: int, done: int, total: int) -> None:
        with self._lock:
            self._current = UploadStatus(number, "uploading", done, total)

    def _conflict(self, number: int) -> TensorkeepError:
        source, destination = self._paths(number)
        return DestinationExistsError(
            "another step of this number is in the store", path=destination, remedy=f"delete it, or {source}"
        )

    def _note_copy(self, number: int, copy: StoredCopy) -> None:
        with self._lock:
            # Unless it was saved again meanwhile.
            if number not in self._waiting:
                self._copies[number] = copy

    def _refuse(self, number: int, error: TensorkeepError) -> None:
        """Note a step that cannot be uploaded, while others can."""
        logger.info("step %d of %s cannot be uploaded: %s", number, self._root, in_short(error))
        with self._lock:
            _unreported[self] = error
            if number not in self._waiting:
                self._refused[number] = error


_unreported: dict[Uploader, BaseException] = {}
"""The last failure of each uploader for which no method has returned or raised it yet."""


def _log_unreported() -> None:
    for uploader, error in list(_unreported.items()):
        if uploader._process == os.getpid():
            logger.error("NOT UPLOADED: steps of %s: %s", uploader._root, in_short(error))


atexit.register(_log_unreported)
