"""`DcpWriter` and `DcpReader`, for the functions of ``torch.distributed.checkpoint``.

``save`` and ``async_save`` write native checkpoints; ``load`` reads checkpoints of any format.
"""

import io
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tensorkeep.checkpoint.background import SaveMemory, checked_budget
from tensorkeep.checkpoint.match import rebuild, refuse_placeholders_of
from tensorkeep.checkpoint.options import AllowOption, MemorySize, SettingsSource, open_settings, thread_count
from tensorkeep.checkpoint.ranges import CopyPlan, fill_from_view, read_boxes
from tensorkeep.checkpoint.saving import check_request
from tensorkeep.checkpoint.stateful import paths_to
from tensorkeep.errors import (
    PathLike,
    RanksDisagreeError,
    StateMismatchError,
    UnsupportedError,
    UnsupportedLeafError,
    UsageError,
)
from tensorkeep.formats.base import Reader
from tensorkeep.formats.base import WriteResult as FormatResult
from tensorkeep.formats.finding import open_reader
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.manifest import FragmentReport
from tensorkeep.formats.native.sharded import finish_saves, plan_root, write_root
from tensorkeep.formats.native.writer import ShardedWrite
from tensorkeep.formats.path_items import nest
from tensorkeep.paths import StorePath, absolute, as_path, checked_path
from tensorkeep.ranks.merge import FullTensor
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state import names
from tensorkeep.state.dtypes import BY_NAME, DType, check_torch
from tensorkeep.state.leaf import Leaf, wait_for_caller, wait_for_copies
from tensorkeep.state.names import KeyPath
from tensorkeep.state.sharded import TensorShard
from tensorkeep.state.skeleton import SkeletonWriter
from tensorkeep.state.tree import Flat
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.storage.commit import Commit


@dataclass(slots=True)
class RankState:
    pieces: list[TensorShard] = field(default_factory=list)
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    # The dtypes of all tensors, to compare them among ranks.
    dtypes: dict[str, str] = field(default_factory=dict)
    # Plain values are nodes of the skeleton, and never pickles.
    nodes: dict[str, Any] = field(default_factory=dict)
    # Arrays and tensors inside plain values.
    inner: dict[str, tuple[str, tuple[int, ...], tuple[str, str]]] = field(default_factory=dict)

    def description(self) -> "RankState":
        # The coordinator needs no tensor data, and DCP pickles this to send it.
        return RankState(dtypes=self.dtypes, nodes=self.nodes, inner=self.inner)


def state_of_plan(plan: SavePlan, planner: SavePlanner) -> RankState:
    paths = _paths(plan.planner_data, [item.index.fqn for item in plan.items])
    found = RankState(parts=_parts(paths))
    for item in plan.items:
        if item.type is WriteItemType.BYTE_IO:
            _add_value(found, item.index.fqn, _value(planner, item), paths[item.index.fqn])
        else:
            _add_tensor(found, item, planner)
    own = {piece.name for piece in found.pieces}
    found.parts = {name: part for name, part in found.parts.items() if name in own}
    return found


def _paths(planner_data: Any, keys: Iterable[str]) -> dict[str, tuple[str | int, ...]]:
    # A planner that does not flatten has no paths: the name is the path.
    known = planner_data if isinstance(planner_data, dict) else {}
    return {**known, **{key: known.get(key, (key,)) for key in keys}}


def _parts(paths: Mapping[str, KeyPath]) -> dict[str, tuple[str, str]]:
    return names.assign_parts(list(paths.values()), list(paths), is_dict=True)


def _add_tensor(found: RankState, item: WriteItem, planner: SavePlanner) -> None:
    name, tensor, data = item.index.fqn, planner.resolve_data(item).detach(), item.tensor_data
    leaf = Leaf.of(name, tensor)
    assert leaf is not None and data is not None
    expected = check_torch(name, data.properties.dtype), tuple(data.chunk.sizes)
    if (leaf.dtype, leaf.shape) != expected:
        text = f"the plan says {expected[0]} {list(expected[1])}, and the planner gives {leaf.dtype} {list(leaf.shape)}"
        raise UnsupportedLeafError(text, name=name, remedy="let the planner change the plan as it changes the tensor")
    found.dtypes[name] = leaf.dtype.name
    if leaf.nbytes:
        # Ranks without elements of a tensor write no shard, but its dtype is compared.
        whole, offsets = tuple(data.size), tuple(data.chunk.offsets)
        found.pieces.append(TensorShard(name, "tensor", leaf.dtype, leaf.array, whole=whole, offsets=offsets))


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        text = f"{type(planner).__name__} has no lookup_object, so that its plain values are known as pickles only"
        remedy = "derive it from torch.distributed.checkpoint.DefaultSavePlanner"
        raise UnsupportedLeafError(text, name=item.index.fqn, remedy=remedy)
    return lookup(item.index)


def _add_value(found: RankState, key: str, value: Any, path: KeyPath) -> None:
    writer = SkeletonWriter()
    found.nodes[key] = writer.encode(value, path)
    part, part_key = found.parts[key]
    for one in writer.leaves:
        rest = ".".join(map(names.key_text, one.path[len(path) :]))
        leaf, name = one.leaf, f"{key}.{rest}" if rest else key
        leaf.name = one.node[leaf.kind] = name
        place = part, f"{part_key}.{rest}" if rest else part_key
        if name in found.parts and name != key:
            raise UnsupportedLeafError(f"two tensors are named {name!r}", name=name, remedy="rename one of their keys")
        found.parts[name] = place
        found.inner[name] = leaf.dtype.name, leaf.shape, place
        if leaf.nbytes:
            found.pieces.append(TensorShard.of_leaf(leaf))


def merge_plan_states(metadata: Metadata, ranks: Sequence[RankState]) -> Flat[FullTensor]:
    """Merge the states of all ranks; RanksDisagreeError if ranks have different dtypes of a tensor."""
    entries = metadata.state_dict_metadata
    paths = {key: path for key, path in _paths(metadata.planner_data, entries).items() if key in entries}
    parts = _parts(paths)
    nodes: dict[str, Any] = {key: node for rank in ranks for key, node in rank.nodes.items()}
    leaves: dict[str, FullTensor] = {}
    for key in paths:
        entry = entries[key]
        if not isinstance(entry, BytesStorageMetadata):
            leaves[key] = _full(key, check_torch(key, entry.properties.dtype), entry.size)
            nodes[key] = {"tensor": key}
    _check_dtypes(leaves, ranks)
    for rank in ranks:
        for name, (dtype, shape, part) in rank.inner.items():
            leaves[name] = _full(name, BY_NAME[dtype], shape)
            parts[name] = part
    # DCP flattens a state to names joined by dots; the planner's paths of keys restore the nesting.
    skeleton = nest(paths, nodes, lambda built: {"dict": built})
    return Flat(skeleton, leaves, {}, {name: parts[name] for name in leaves})


def _full(name: str, dtype: DType, shape: Sequence[int]) -> FullTensor:
    return FullTensor(name, dtype, tuple(shape), prod(shape) * dtype.itemsize)


def _check_dtypes(leaves: Mapping[str, FullTensor], ranks: Sequence[RankState]) -> None:
    for number, rank in enumerate(ranks):
        for name, dtype in rank.dtypes.items():
            if dtype != leaves[name].dtype.name:
                text = f"is {dtype} on rank {number}, and {leaves[name].dtype} on an earlier one"
                remedy = "give all ranks the same state; only the shards of DTensors may differ"
                raise RanksDisagreeError(text, name=name, remedy=remedy)


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The folder that all ranks of a save write into; the coordinator puts it into the plans that DCP scatters."""

    destination: str
    directory: str
    save: str
    ranks: int

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling announces the folder: a planner that caches plans gives the writer a plan of an earlier save
        # instead of the received one.
        return _received, (self.destination, self.directory, self.save, self.ranks)

    def announce(self) -> "SharedFolder":
        with _lock:
            _announced[self.destination] = self
        return self

    @classmethod
    def announced(cls, destination: str) -> "SharedFolder":
        """Take the folder of the current save; RanksDisagreeError if this process received none."""
        with _lock:
            # Each rank uses a folder once: a second save must not find the folder of the first.
            folder = _announced.pop(destination, None)
        if folder is None:
            text = "the coordinator's plan did not arrive, or names another path"
            remedy = "give all ranks the same path, and let the planner return the plans that it is given"
            raise RanksDisagreeError(text, path=destination, remedy=remedy)
        return folder


# Received folders by path. A rank uses each once, in `write_data`.
_lock = threading.Lock()
_announced: dict[str, SharedFolder] = {}


def _received(*fields: Any) -> SharedFolder:
    return SharedFolder(*fields).announce()


class BegunSave:
    """The coordinator's temporary folder. Raises DestinationExistsError, BusyError, StoreError as `Commit`."""

    is_writing: bool
    end: Callable[[], object]

    def __init__(self, destination: Path, *, overwrite: bool) -> None:
        earlier: BegunSave | None = _begun.get(destination)
        if earlier is not None and not earlier.is_writing:
            earlier.end()
        # Saves that were killed may have left folders beside it.
        finish_saves(absolute(destination).parent)
        commit = Commit(destination, directory=True, overwrite=overwrite, replaceable=is_replaceable)
        commit.__enter__()
        # The commit is a context manager, but begins and ends in different calls of DCP. The end removes the folder
        # unless it was published.
        self.end = weakref.finalize(self, commit.__exit__, None, None, None)
        self.commit = commit
        self.name = secrets.token_hex(16)
        self.is_writing = False
        _begun[destination] = self


# DCP does not call the coordinator's writer when another rank fails. The folder is then removed when the writer is
# garbage-collected, when this process saves to the same path again, or at exit.
_begun: "weakref.WeakValueDictionary[Path, BegunSave]" = weakref.WeakValueDictionary()


# DCP calls `prepare_local_plan` on every rank, `prepare_global_plan` on the coordinator, `write_data` on every rank,
# and `finish` on the coordinator. In between it gathers and scatters, and raises an error of one rank on all ranks.
class DcpWriter(StorageWriter):
    """Writes a native checkpoint for ``torch.distributed.checkpoint.save`` and ``async_save``.

    The checkpoint becomes visible as a whole once all ranks have written their parts durably. An error on one rank is
    raised on all ranks. `tensorkeep.load` and all other functions open the checkpoint in one process.

    Parameters
    ----------
    path : path-like, optional
        The path of the new checkpoint; by default the ``checkpoint_id`` of the save.
    compression, overwrite, metadata, threads, memory_budget, settings, **options : optional
        See `tensorkeep.save`; threads and memory are counted for each rank. ``compression="auto"`` is refused.

    Raises
    ------
    UsageError
        If an argument or an option is wrong.

    Notes
    -----
    DCP raises an error of one rank on all ranks, as a ``CheckpointException`` with the errors in ``failures``:
    UnsupportedLeafError for a value that cannot be stored without a pickle, DestinationExistsError, BusyError,
    StoreError. One writer can serve several saves one after the other, with different values of ``checkpoint_id``.

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
            text = "compression='auto' measures one process, and here many write"
            raise UsageError(text, remedy="give 'none' or 'lossless'")
        arguments: dict[str, Any] = {
            "compression": compression,
            "overwrite": overwrite,
            "metadata": metadata,
            "threads": threads,
            "memory_budget": memory_budget,
            "settings": settings,
        }
        self._arguments = {**arguments, **options}
        self._path = None if path is None else checked_path(path)
        self._request = check_request(self._path or "checkpoint", format="native", options=options, **arguments)
        self._budget = checked_budget(self._request.memory_budget, background=False)
        self._rank = 0
        self._begun: BegunSave | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # `async_save` with processes sends the writer to another process.
        return partial(DcpWriter, self._path, **self._arguments), ()

    @property
    def checkpoint_id(self) -> PathLike | None:
        """The path of the checkpoint."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, to another path if one is given; DCP calls this."""
        if checkpoint_id:
            self._path = checked_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Store the rank; UsageError if no path was given, or ``use_collectives`` is False. DCP calls this."""
        if self._path is None:
            raise UsageError("no path is given", remedy="give DcpWriter a path, or dcp.save a checkpoint_id")
        if not kwargs.get("use_collectives", True):
            text = "without collectives a checkpoint could not become visible as a whole"
            raise UsageError(text, path=self._path, remedy="leave out use_collectives=False")
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder that all ranks write into, and put it into their plans.

        Raises DestinationExistsError, BusyError or StoreError if the checkpoint may not be written there.
        """
        assert self._path is not None
        self._begun = begun = BegunSave(Path(self._path), overwrite=self._request.write.overwrite)
        folder = SharedFolder(os.fspath(self._path), os.fspath(begun.commit.path), begun.name, len(plans))
        # A save of one process pickles no plan, so nothing else announces the folder.
        folder.announce()
        return [replace(plan, storage_data=folder) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors and values of this rank's plan; return when they are durable.

        Raises UnsupportedLeafError if a value cannot be stored without a pickle, StoreError if the disk fails.
        """
        assert self._path is not None
        begun = self._begun
        if begun is not None:
            # Another save of this process to the same path must not remove the folder now.
            begun.is_writing = True
        try:
            together = _DcpRank(self._rank, SharedFolder.announced(os.fspath(self._path)))
            state = state_of_plan(plan, planner)
            written = self._write(state, together)
        except BaseException:
            if begun is not None:
                begun.end()
            raise
        finally:
            if begun is not None:
                begun.is_writing = False
        assert together.report is not None
        # DCP gathers these results to the coordinator, for `finish`.
        result = WriteResult(
            MetadataIndex(together.report.record.name),
            written.new_bytes,
            RankResult(together.report, state.description()),
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([result])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and make the checkpoint visible, durably.

        Raises RanksDisagreeError if the ranks have a tensor of different dtypes, DestinationExistsError if something
        has appeared at the path, StoreError if the disk fails.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        ranks: list[RankResult] = [result.storage_data for each in results for result in each]
        try:
            flat = merge_plan_states(metadata, [rank.description for rank in ranks])
            root = plan_root(flat, self._request.write, save=begun.name, ranks=len(ranks))
            write_root(begun.commit.path, root, [rank.report for rank in ranks])
            begun.commit.publish()
        finally:
            begun.end()

    def _write(self, state: RankState, together: "_DcpRank") -> FormatResult:
        assert self._path is not None
        # Kernels that the caller has queued may still write to the tensors.
        wait_for_caller(state.pieces)
        memory = SaveMemory(self._budget)
        try:
            settings = replace(self._request.write, pool=memory.single_pool())
            return ShardedWrite(state.pieces, state.parts, Path(self._path), settings, together).run()
        finally:
            memory.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this may be the path of a checkpoint; URLs are not."""
        return "://" not in os.fspath(checkpoint_id)


@dataclass(frozen=True, slots=True)
class RankResult:
    report: FragmentReport
    description: RankState


class _DcpRank:
    """This rank among the ranks of a save; DCP carries the messages."""

    def __init__(self, rank: int, folder: SharedFolder) -> None:
        self.rank = rank
        self.size = folder.ranks
        self.report: FragmentReport | None = None
        self._folder = folder

    def begin(self) -> tuple[Path, str]:
        return Path(self._folder.directory), self._folder.save

    def finish(self, report: FragmentReport) -> None:
        self.report = report


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
    read_boxes(reader, stored, threads, pool)
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
