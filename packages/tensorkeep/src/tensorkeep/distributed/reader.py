"""`DcpReader`: ``torch.distributed.checkpoint.load`` from checkpoints of any format."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorkeep.checkpoint.match import rebuild, refuse_placeholders_of
from tensorkeep.checkpoint.options import AllowOption, MemorySize, open_settings, thread_count
from tensorkeep.checkpoint.ranges import CopyPlan, fill_from_view, read_all
from tensorkeep.checkpoint.stateful import paths_to
from tensorkeep.errors import PathLike, StateMismatchError, UnsupportedError, UsageError
from tensorkeep.formats.base import Reader
from tensorkeep.formats.finding import open_reader
from tensorkeep.paths import StorePath, as_path
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state.dtypes import check_torch
from tensorkeep.state.leaf import wait_for_caller, wait_for_copies
from tensorkeep.state.sharded import TensorShard
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool


class _StandIn:
    """Stands for a numpy array or scalar that is not loaded."""


class DcpEntries:
    """The entries of an open checkpoint by their DCP names; arrays and nested tensors belong to plain values."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._stand_ins = {name: _stand_in(reader, name) for name in reader.leaf_specs}
        # By identity: flattening keeps the objects but gives them DCP's names.
        self._names = {id(stand_in): name for name, stand_in in self._stand_ins.items()}
        self.paths, self._values = self._flattened(self._stand_ins)
        self.tensors = {
            key: self._names[id(value)] for key, value in self._values.items() if isinstance(value, torch.Tensor)
        }

    def _flattened(self, tensors: Mapping[str, Any]) -> tuple[dict[str, tuple[str | int, ...]], dict[str, Any]]:
        # DCP's own function flattens, so that names and paths are exactly the ones that it asks for.
        state = rebuild(self._reader, self._reader.flat.skeleton, tensors, as_given=tensors)
        if not isinstance(state, dict):
            text = f"its state is a {type(state).__name__}, and torch.distributed.checkpoint loads dicts only"
            raise UnsupportedError(text, path=self._reader.path, remedy="load it with tensorkeep.load")
        flat, paths = flatten_state_dict(state)
        return paths, flat

    def metadata(self) -> Metadata:
        """Describe every tensor as one chunk, so that DCP's planner asks for the exact boxes that a rank needs."""
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key, value in self._values.items():
            # DCP stores a tensor as an entry if it is nested in dicts, or in lists with tensors or dicts.
            if key in self.tensors:
                chunk = ChunkStorageMetadata(torch.Size([0] * value.dim()), value.size())
                entries[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [chunk])
            else:
                entries[key] = BytesStorageMetadata()
        return Metadata(entries, self.paths, {}, StorageMeta(checkpoint_id=self._reader.path))

    def load_values(self, keys: set[str], threads: int, pool: BufferPool) -> dict[str, Any]:
        wanted = [name for name, key in self._keys_of_values.items() if key in keys]
        plan = CopyPlan(self._reader, wanted, {})
        plan.read(threads, pool, None)
        # An empty index makes a numpy scalar out of an array without dimensions.
        loaded = {
            name: value[()] if self._reader.leaf_specs[name].kind == "npscalar" else value
            for name, value in plan.values().items()
        }
        _, values = self._flattened({**self._stand_ins, **loaded})
        for key in keys:
            refuse_placeholders_of(self._reader, (key,), values[key])
        return {key: values[key] for key in keys}

    @cached_property
    def _keys_of_values(self) -> dict[str, str]:
        return {
            # An array, or a tensor that is not an entry itself, is loaded with the plain value around it.
            self._names[id(found)]: key
            for key, value in self._values.items()
            if key not in self.tensors
            for _, found in paths_to(value, (_StandIn, torch.Tensor))
        }


def _stand_in(reader: Reader, name: str) -> Any:
    entry = reader.entries[name]
    if reader.leaf_specs[name].kind not in ("tensor", "parameter"):
        return _StandIn()
    # DCP's functions look at dtype and shape only, so a tensor on the meta device takes no memory.
    return torch.empty(entry.shape, dtype=entry.dtype.torch, device="meta")


def read_pieces(reader: Reader, pieces: Sequence[TensorShard], threads: int, pool: BufferPool) -> None:
    """Fill pieces from the stored tensors, in parallel; CorruptCheckpointError if a byte is not what was written."""
    # Kernels that the caller has queued may still use the target memory.
    wait_for_caller(pieces)
    stored: list[tuple[str, TensorShard]] = []
    views: list[TensorShard] = []
    for piece in pieces:
        alias = reader.flat.aliases.get(piece.name)
        # A view of part of a tensor is not one of its boxes.
        if alias is not None and not alias.is_full(reader.flat.leaves[alias.of].shape):
            views.append(piece)
        else:
            stored.append((piece.name if alias is None else alias.of, piece))
    read_all(reader, {}, boxes=stored, threads=threads, pool=pool)
    wait_for_copies(pieces)
    for piece in views:
        fill_from_view(reader, piece.name, [piece], pool)


class DcpReader(StorageReader):
    """Reads a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    Each rank reads and checks the blocks that cover its shards. The number of ranks and the sharding may differ from
    the save; a checkpoint of one process loads into a sharded model as well.

    Parameters
    ----------
    path : path-like, optional
        The checkpoint, or a run as in `tensorkeep.load`: its folder, ``"RUN@1200"`` or ``"RUN@best"``. By default the
        ``checkpoint_id`` of the load.
    verify, format, allow, threads, memory_budget : optional
        See `tensorkeep.load`; threads and memory are counted for each rank.

    Raises
    ------
    UsageError
        If an argument is wrong.

    Notes
    -----
    DCP raises an error of one rank on all ranks, as a ``CheckpointException`` with the errors in ``failures``:
    CorruptCheckpointError if a byte is not what was written, StateMismatchError if a tensor of the state has another
    dtype, NotFoundError, NotACheckpointError. Nothing in the checkpoint is unpickled.

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
        allow: AllowOption = None,
        threads: int | None = None,
        memory_budget: MemorySize = DEFAULT_BUDGET,
    ) -> None:
        self._path = path
        self._format = format
        self._threads = thread_count(threads)
        self._settings = open_settings(memory_budget, verify=verify, allow=allow)
        self._reader: Reader | None = None
        self._entries: DcpEntries | None = None

    @property
    def checkpoint_id(self) -> PathLike | None:
        """The path of the checkpoint."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, of the checkpoint at another path if one is given; DCP calls this."""
        self._close()
        if checkpoint_id:
            self._path = checkpoint_id

    # No further arguments: DCP takes `**kwargs` as a sign that ranks have metadata of their own.
    def read_metadata(self) -> Metadata:
        """Open the checkpoint and describe it for DCP's planner; raises as `tensorkeep.open`."""
        if self._path is None:
            raise UsageError("no checkpoint is given", remedy="give DcpReader a path, or dcp.load a checkpoint_id")
        self._close()
        self._reader = open_reader(checkpoint_path(self._path), self._settings, self._format)
        self._entries = DcpEntries(self._reader)
        return self._entries.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: all ranks read in the same way."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank's plan asks for.

        Raises CorruptCheckpointError if a byte is not what was written, StateMismatchError before anything is read if a
        tensor has another dtype than the saved one.
        """
        try:
            self._read(plan, planner)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        reader, entries = self._reader, self._entries
        assert reader is not None and entries is not None, "read_metadata comes first"
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        # The planner gives the memory of the state, which is filled in place.
        targets = [planner.resolve_tensor(item) for item in tensors]
        pieces = [
            _piece(reader, entries.tensors[item.storage_index.fqn], item, target)
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
        assert self._entries is not None
        values = self._entries.load_values(set(wanted), self._threads, self._settings.pool)
        for key, item in wanted.items():
            # The planner unpickles its input, so it gets a pickle of ours and never bytes of the checkpoint.
            content = io.BytesIO()
            torch.save(values[key], content)
            content.seek(0)
            planner.load_bytes(item, content)

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._settings.pool.close()
        self._reader = self._entries = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this may be the path of a checkpoint, or its URL in an object store."""
        return isinstance(as_path(checkpoint_id), StorePath) or "://" not in os.fspath(checkpoint_id)


def _piece(reader: Reader, name: str, item: ReadItem, target: torch.Tensor) -> TensorShard:
    """Return the memory for a box of a tensor; StateMismatchError if dtype or shape differ from the saved box."""
    entry, target = reader.entries[name], target.detach()
    dtype = check_torch(name, target.dtype)
    if dtype != entry.dtype or tuple(target.shape) != tuple(item.lengths):
        text = f"is {dtype} {list(target.shape)} in the state, {entry.dtype} {list(item.lengths)} saved"
        remedy = f"load into a tensor of {entry.dtype}, and convert it then"
        raise StateMismatchError(text, path=reader.path, name=name, remedy=remedy, different=(name,))
    return TensorShard(name, "tensor", dtype, target, whole=entry.shape, offsets=tuple(item.storage_offsets))
