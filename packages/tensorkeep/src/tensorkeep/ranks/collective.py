"""One save by all ranks: rank 0 makes the staging folder, every rank writes its part, rank 0 publishes them."""

import os
import secrets
from dataclasses import replace
from pathlib import Path

from tensorkeep.errors import RanksDisagreeError
from tensorkeep.formats.base import WriteResult, WriteSettings
from tensorkeep.formats.decoding import as_a_reader
from tensorkeep.formats.native.directory import commit_to
from tensorkeep.formats.native.manifest import FILE_NAME, FragmentReport, Root
from tensorkeep.formats.native.sharded import check_plan, finish_saves, plan_root, root_content, write_plan, write_root
from tensorkeep.formats.native.writer import ShardedWrite
from tensorkeep.paths import absolute, as_path
from tensorkeep.ranks.merge import SharedState
from tensorkeep.storage import storage_of
from tensorkeep.storage.base import PendingCommit
from tensorkeep.storage.parallel import Cancelled


class GroupSaveCoordinator:
    """How the ranks of one save act together; a `tensorkeep.formats.native.writer.SaveCoordinator`.

    A rank that is killed before its report ends the save on all ranks, and the staging folder is removed.
    """

    def __init__(self, shared: SharedState, destination: Path, settings: WriteSettings) -> None:
        self.rank, self.size = shared.ranks.rank, shared.ranks.size
        self.ticket = shared.ranks.ticket()
        # Stored and new bytes of all ranks.
        self.totals: tuple[int, int] = 0, 0
        self._channel = shared.ranks.writer
        self._shared = shared
        self._destination = destination
        self._settings = settings
        self._commit: PendingCommit | None = None  # of rank 0
        self._plan: Root | None = None
        self._ended = False

    def begin(self) -> tuple[Path, str]:
        """Return the staging folder and the id of the save; collective."""
        # The exchanges of two saves on one channel would mix.
        self.ticket.wait()
        staged = self._stage() if self.rank == 0 else None
        folder, save = self._channel.gather(staged, f"beginning to save {self._destination}")[0]
        return as_path(folder), save

    def _stage(self) -> tuple[str, str]:
        """Make the staging folder and write the plan of the save into it; in a store, only check the destination."""
        destination = self._destination
        # The ranks of an earlier save may have been killed when only the last rename was missing. That save is
        # published first. The commit would remove it as abandoned.
        if not storage_of(destination).remote:
            finish_saves(absolute(destination).parent)
        commit = self._commit = commit_to(destination, overwrite=self._settings.overwrite).__enter__()
        # An elastic run that was restarted must not take files of its earlier attempt for new ones.
        save = f"{commit.save_id or secrets.token_hex(8)}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        shared = self._shared
        self._plan = plan_root(shared.flat, self._settings, save=save, ranks=self.size, layouts=shared.layouts)
        if commit.is_staged:
            write_plan(commit, self._plan)
        else:
            with as_a_reader():
                check_plan(self._plan, destination)
        return str(commit.path), save

    def finish(self, report: FragmentReport) -> None:
        """Publish the checkpoint, once the parts of all ranks are durable; collective."""
        reports = self._channel.gather(report, "writing its part", of=FragmentReport, to_main=True)
        # Rank 0 believes the reports: on a network file system it may not see the files of other ranks yet.
        # Each report says that the files of one rank are durable. Only now may a manifest name them.
        totals = sum(each.stored_bytes for each in reports), sum(each.new_bytes for each in reports)
        commit, plan = self._commit, self._plan
        if commit is not None and plan is not None:
            # Rank 0 alone renames the folder, or puts the manifest: the one step that makes the checkpoint visible.
            if commit.is_staged:
                # If rank 0 is killed here, the folder has all fragments and the plan: the next save publishes it.
                write_root(commit.path, plan, reports)
                commit.publish()
            else:
                commit.publish(root_content(self._destination / FILE_NAME, plan, reports))
            self._leave()
        self._end(totals)

    def _end(self, totals: tuple[int, int]) -> None:
        """Wait until rank 0 has published the checkpoint, and receive the totals."""
        try:
            self.totals = tuple(self._channel.gather(totals, "making the checkpoint visible")[0])
        except RanksDisagreeError as error:
            if error is not self._channel.connection.lost:
                raise
            # A rank is gone, perhaps rank 0, before or after it published the checkpoint: this rank cannot know.
            self._ended = True
            in_store = storage_of(self._destination).remote
            otherwise = "save again" if in_store else "the next save there finishes it first"
            raise RanksDisagreeError(
                f"{error.message}, when all ranks had written their parts",
                path=self._destination,
                remedy=f"load it to see whether it is the new checkpoint; if not, {otherwise}",
            ) from error
        self._ended = True

    def fail(self, error: BaseException) -> None:
        """End the save on all ranks, unless it has ended, and remove the staging folder."""
        if self._ended:
            return
        self._ended = True
        try:
            # The other ranks are still in the exchanges of earlier saves.
            self.ticket.wait()
            self._channel.report(error, "saving")
        finally:
            self._leave()

    def _leave(self) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:
            # Unlocks the staging folder, and removes it unless it was published.
            commit.__exit__()


class CollectiveWrite(ShardedWrite):
    """Writes one rank's part of a checkpoint. If that fails on one rank, the save fails on all ranks."""

    def __init__(self, shared: SharedState, destination: Path, settings: WriteSettings) -> None:
        self._group_save = GroupSaveCoordinator(shared, destination, settings)
        super().__init__(shared.pieces, shared.flat.parts, destination, settings, self._group_save)

    def enqueue(self) -> None:
        """Queue the save behind the earlier saves of the group; all ranks call this in the same order."""
        self._group_save.ticket.enqueue()

    def _write(self) -> WriteResult:
        try:
            result = super()._write()
        except BaseException as error:
            self._group_save.fail(error)
            raise
        finally:
            self._group_save.ticket.release()
        stored, new = self._group_save.totals
        return replace(result, stored_bytes=stored, new_bytes=new)

    def abandon(self) -> None:
        super().abandon()
        # `fail` does nothing unless the save was never begun.
        try:
            self._group_save.fail(Cancelled("the save was abandoned before it began"))
        finally:
            self._group_save.ticket.release()
