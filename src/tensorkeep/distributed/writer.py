"""`DcpWriter`: ``torch.distributed.checkpoint.save`` and ``async_save`` to native checkpoints.

DCP calls a writer on every rank: ``prepare_local_plan``, then on the coordinator ``prepare_global_plan``, on every rank
``write_data``, and on the coordinator ``finish``. Between them it gathers and scatters, and raises the errors of one
rank on all of them.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.checkpoint.save.begin import SaveRequest, check_request
from tensorkeep.checkpoint.save.memory import SaveMemory, checked_budget
from tensorkeep.checkpoint.settings import SettingsSource
from tensorkeep.distributed.plan_state import RankDescription, RankState, merged_state, state_of_plan
from tensorkeep.distributed.stage import BegunSave, Stage
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.native.pieces.records import FragmentReport
from tensorkeep.formats.native.pieces.root import plan_root, write_root
from tensorkeep.formats.native.pieces.writer import PiecesWrite
from tensorkeep.formats.write import WriteResult as FormatResult
from tensorkeep.paths import checked_path
from tensorkeep.state import cuda


class DcpWriter(StorageWriter):
    """Writes a native checkpoint for ``torch.distributed.checkpoint.save`` and ``async_save``.

    The checkpoint becomes visible completely or not at all, when all ranks have written their parts durably; an error
    on one rank is raised on all. `tensorkeep.load` opens it in one process, as does everything else.

    Parameters
    ----------
    path : path-like, optional
        The path of the new checkpoint. Otherwise the ``checkpoint_id`` of the save is taken.
    compression : str, optional
        ``"none"``, the default; ``"lossless"``; or the name of a codec.
    overwrite : bool
        Replace an existing checkpoint. It stays intact until the new one is durable.
    metadata : dict, optional
        JSON values of your own, stored beside the state.
    threads : int, optional
        Writing threads of each rank; twice the cores, between 2 and 8, by default.
    memory_budget : int or str, optional
        Limit in bytes for the buffers of each rank, also as ``"512MiB"``; 256 MiB by default.
    settings : path-like or mapping, optional
        A settings file with a table ``[save]``; see `tensorkeep.save`.
    **options
        Options of the native format, such as ``base`` and ``incremental``; see `tensorkeep.save`.

    Raises
    ------
    UsageError
        If an argument or an option is wrong.

    Notes
    -----
    What a save raises on one rank, DCP raises on all of them, as a ``CheckpointException`` whose ``failures`` has the
    errors: UnsupportedLeafError for a value that cannot be stored without a pickle, DestinationExistsError, BusyError,
    StoreError. A writer can be used for several saves, one after the other, with a ``checkpoint_id`` for each.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, tensorkeep
    >>> from tensorkeep.distributed import DcpWriter
    >>> folder = tempfile.TemporaryDirectory()
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> state = {"model": {"weight": torch.ones(4)}, "step": 7}
    >>> metadata = dcp.save(state, storage_writer=DcpWriter(f"{folder.name}/saved"))
    >>> tensorkeep.load(f"{folder.name}/saved")
    {'model': {'weight': tensor([1., 1., 1., 1.])}, 'step': 7}
    >>> dist.destroy_process_group()
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        compression: str | None = None,
        overwrite: bool = False,
        metadata: dict[str, Any] | None = None,
        threads: int | None = None,
        memory_budget: MemorySize | None = None,
        settings: SettingsSource | None = None,
        **options: Any,
    ) -> None:
        if compression == "auto":
            raise UsageError(
                "compression='auto' measures one process, and here many write", remedy="give 'none' or 'lossless'"
            )
        self._arguments = {
            "path": path,
            "compression": compression,
            "overwrite": overwrite,
            "metadata": metadata,
            "threads": threads,
            "memory_budget": memory_budget,
            "settings": settings,
            **options,
        }
        self._path = None if path is None else checked_path(path)
        self._request: SaveRequest = check_request(
            self._path or "checkpoint",
            compression=compression,
            format="native",
            overwrite=overwrite,
            metadata=metadata,
            threads=threads,
            memory_budget=memory_budget,
            settings=settings,
            options=options,
        )
        self._budget = checked_budget(self._request.memory_budget, background=False)
        self._rank = 0
        self._begun: BegunSave | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # DCP sends the writer to the process in which an `async_save` with processes runs.
        return _remade, ({**self._arguments, "path": self._path},)

    @property
    def checkpoint_id(self) -> PathLike | None:
        """The path of the checkpoint."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to another path if one is given; DCP calls this."""
        if checkpoint_id:
            self._path = checked_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of the rank; DCP calls this.

        Raises
        ------
        UsageError
            If no path was given, or the ranks are not to act together.
        """
        if self._path is None:
            raise UsageError("no path is given", remedy="give DcpWriter a path, or dcp.save a checkpoint_id")
        if not kwargs.get("use_collectives", True):
            raise UsageError(
                "without collectives a checkpoint could not become visible as a whole",
                path=self._path,
                remedy="leave out use_collectives=False",
            )
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder that all ranks write into, and announce it to them.

        Raises
        ------
        DestinationExistsError, BusyError, StoreError
            If the checkpoint may not be written there.
        """
        assert self._path is not None
        self._begun = begun = BegunSave(Path(self._path), overwrite=self._request.write.overwrite)
        stage = Stage(os.fspath(self._path), os.fspath(begun.commit.path), begun.name, len(plans))
        stage.announce()
        return [replace(plan, storage_data=stage) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank's plan stores; return when it is durable.

        Raises
        ------
        UnsupportedLeafError
            If a value cannot be stored without a pickle.
        StoreError
            If the disk fails.
        """
        assert self._path is not None
        begun = self._begun
        if begun is not None:
            begun.is_writing = True
        try:
            together = _Together(self._rank, Stage.announced(os.fspath(self._path)))
            state = state_of_plan(plan, planner)
            written = self._write(state, together)
        except BaseException:
            if begun is not None:
                begun.abandon()
            raise
        finally:
            if begun is not None:
                begun.is_writing = False
        assert together.report is not None
        result = WriteResult(
            MetadataIndex(together.report.record.name),
            written.new_bytes,
            RankResult(together.report, RankDescription.of_state(state)),
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([result])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and make the checkpoint visible, durably.

        Raises
        ------
        RanksDisagreeError
            If the ranks have a tensor of different dtypes.
        DestinationExistsError, StoreError
            If something has appeared at the path, or the disk fails.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        ranks: list[RankResult] = [result.storage_data for each in results for result in each]
        try:
            flat = merged_state(metadata, [rank.description for rank in ranks])
            root = plan_root(flat, self._request.write, save=begun.name, ranks=len(ranks))
            write_root(begun.commit.path, root, [rank.report for rank in ranks])
            begun.publish()
        except BaseException:
            begun.abandon()
            raise

    def _write(self, state: RankState, together: "_Together") -> FormatResult:
        assert self._path is not None
        cuda.wait_for_caller(state.pieces)
        memory = SaveMemory(self._budget)
        try:
            settings = replace(self._request.write, pool=memory.single_pool())
            return PiecesWrite(state.pieces, state.parts, Path(self._path), settings, together).run()
        finally:
            memory.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this may be the path of a checkpoint; URLs are not."""
        return "://" not in os.fspath(checkpoint_id)


def _remade(arguments: dict[str, Any]) -> DcpWriter:
    return DcpWriter(**arguments)


@dataclass(frozen=True, slots=True)
class RankResult:
    """What a rank reports to the coordinator when its part is durable."""

    report: FragmentReport
    description: RankDescription


class _Together:
    """How this rank's part of a save is connected with those of the others: DCP carries what they exchange."""

    def __init__(self, rank: int, stage: Stage) -> None:
        self.rank = rank
        self.size = stage.ranks
        self.report: FragmentReport | None = None
        self._stage = stage

    def begin(self) -> tuple[Path, str]:
        """Return the folder to write into, and the name of the save."""
        return Path(self._stage.directory), self._stage.save

    def finish(self, report: FragmentReport) -> None:
        """Keep the report of this rank, for DCP to gather."""
        self.report = report
