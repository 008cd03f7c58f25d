"""`DcpReader`: ``torch.distributed.checkpoint.load`` from checkpoints of any format."""

import io
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, thread_count
from tensorkeep.checkpoint.finding import open_reader
from tensorkeep.checkpoint.manager.address import checkpoint_path
from tensorkeep.distributed.contents import Contents
from tensorkeep.distributed.pieces import read_pieces
from tensorkeep.errors import PathLike, StateMismatchError, UsageError
from tensorkeep.formats.base import OpenSettings, Reader
from tensorkeep.formats.torch_file.allowed import Allow, allowed_names
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.paths import StorePath, as_path
from tensorkeep.state.dtypes import check_torch
from tensorkeep.state.sharded import Piece


class DcpReader(StorageReader):
    """Reads a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    Each rank reads the blocks that cover its shards, whatever the number and the layout of the ranks that saved, and
    checks them. A checkpoint that one process saved is loaded into a sharded model in the same way.

    Parameters
    ----------
    path : path-like, optional
        The checkpoint, or a run as for `tensorkeep.load`: its folder, ``"RUN@1200"`` or ``"RUN@best"``. Otherwise the
        ``checkpoint_id`` of the load is taken.
    verify : bool
        Check every block that is read against its checksum, where the format has any.
    format : str, optional
        The name of the format, instead of looking.
    allow : str, class, or list of them, optional
        Classes whose objects in ``torch.save`` files are read as dicts; see `tensorkeep.load`.
    threads : int, optional
        Reading threads of each rank; twice the cores, between 2 and 8, by default.
    memory_budget : int or str
        Limit in bytes for the buffers of each rank, besides the tensors themselves, also as ``"256MiB"``.

    Raises
    ------
    UsageError
        If an argument is wrong.

    Notes
    -----
    What a load raises on one rank, DCP raises on all of them, as a ``CheckpointException`` whose ``failures`` has the
    errors: CorruptCheckpointError if a byte is not what was written, StateMismatchError if a tensor of the state has
    another dtype, NotFoundError, NotACheckpointError. Nothing in the checkpoint is unpickled: plain values are read
    from its description.

    Examples
    --------
    >>> import tempfile, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, tensorkeep
    >>> from tensorkeep.distributed import DcpReader
    >>> folder = tempfile.TemporaryDirectory()
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> report = tensorkeep.save({"model": {"weight": torch.ones(4)}, "step": 7}, f"{folder.name}/saved")
    >>> state = {"model": {"weight": torch.zeros(4)}, "step": 0}
    >>> dcp.load(state, storage_reader=DcpReader(f"{folder.name}/saved"))
    >>> state
    {'model': {'weight': tensor([1., 1., 1., 1.])}, 'step': 7}
    >>> dist.destroy_process_group()
    >>> folder.cleanup()
    """

    def __init__(
        self,
        path: PathLike | None = None,
        *,
        verify: bool = True,
        format: str | None = None,
        allow: Allow | None = None,
        threads: int | None = None,
        memory_budget: MemorySize = DEFAULT_BUDGET,
    ) -> None:
        self._path = path
        self._format = format
        self._threads = thread_count(threads)
        self._settings = OpenSettings(verify=verify, pool=budget_pool(memory_budget), allow=allowed_names(allow))
        self._reader: Reader | None = None
        self._contents: Contents | None = None

    @property
    def checkpoint_id(self) -> PathLike | None:
        """The path of the checkpoint."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, of the checkpoint at another path if one is given; DCP calls this."""
        self._close()
        if checkpoint_id:
            self._path = checkpoint_id

    # Without further arguments: DCP would take `**kwargs` to mean that each rank may have metadata of its own.
    def read_metadata(self) -> Metadata:
        """Open the checkpoint and describe it for DCP's planner.

        Raises
        ------
        NotFoundError, NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError
            If it cannot be opened.
        UsageError
            If no path was given.
        """
        if self._path is None:
            raise UsageError("no checkpoint is given", remedy="give DcpReader a path, or dcp.load a checkpoint_id")
        self._close()
        self._reader = open_reader(checkpoint_path(self._path), self._settings, self._format)
        self._contents = Contents(self._reader)
        return self._contents.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks read alike."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank's plan asks for.

        Raises
        ------
        CorruptCheckpointError
            If a byte is not what was written.
        StateMismatchError
            If a tensor has another dtype than the saved one; nothing has been read then.
        """
        try:
            self._read(plan, planner)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        reader, contents = self._reader, self._contents
        assert reader is not None and contents is not None, "read_metadata comes first"
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item) for item in tensors]
        pieces = [
            _piece(reader, contents.tensors[item.storage_index.fqn], item, target)
            for item, target in zip(tensors, targets, strict=True)
        ]
        read_pieces(reader, pieces, self._threads, self._settings.pool)
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        self._read_values([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)

    def _read_values(self, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
        wanted = {item.storage_index.fqn: item for item in items}
        if not wanted:
            return
        assert self._contents is not None
        values = self._contents.load_values(set(wanted), self._threads, self._settings.pool)
        for key, item in wanted.items():
            # The planner unpickles anything: what it gets are bytes that were made here.
            content = io.BytesIO()
            torch.save(values[key], content)
            content.seek(0)
            planner.load_bytes(item, content)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._settings.pool.close()
        self._reader = self._contents = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this may be the path of a checkpoint, or its URL in an object store."""
        return isinstance(as_path(checkpoint_id), StorePath) or "://" not in os.fspath(checkpoint_id)


def _piece(reader: Reader, name: str, item: ReadItem, target: torch.Tensor) -> Piece:
    """Return the memory that a box of a tensor is read into.

    Raises StateMismatchError if it is of another dtype or shape than the saved box.
    """
    entry, target = reader.entries[name], target.detach()
    dtype = check_torch(name, target.dtype)
    if dtype != entry.dtype or tuple(target.shape) != tuple(item.lengths):
        raise StateMismatchError(
            f"is {dtype} {list(target.shape)} in the state, {entry.dtype} {list(item.lengths)} saved",
            path=reader.path,
            name=name,
            remedy=f"load into a tensor of {entry.dtype}, and convert it then",
            different=(name,),
        )
    return Piece(name, "tensor", dtype, target, whole=entry.shape, offsets=tuple(item.storage_offsets))
