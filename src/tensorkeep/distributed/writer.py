"""`DcpWriter`: ``torch.distributed.checkpoint.save`` and ``async_save`` to native checkpoints.

DCP calls a writer on every rank: ``prepare_local_plan``, then on the coordinator ``prepare_global_plan``, on every rank
``write_data``, and on the coordinator ``finish``. Between them it gathers and scatters, and raises the errors of one
rank on all of them.
"""

import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.checkpoint.memory import SaveMemory, checked_budget
from tensorkeep.checkpoint.saving import SaveRequest, check_request
from tensorkeep.checkpoint.settings import SettingsSource
from tensorkeep.errors import PathLike, RanksDisagreeError, UnsupportedLeafError, UsageError
from tensorkeep.formats.base import WriteResult as FormatResult
from tensorkeep.formats.native.directory import is_replaceable
from tensorkeep.formats.native.manifest import FragmentReport
from tensorkeep.formats.native.sharded import finish_saves, plan_root, write_root
from tensorkeep.formats.native.writer import ShardedWrite
from tensorkeep.paths import absolute, checked_path
from tensorkeep.ranks.outline import FullTensor
from tensorkeep.state import cuda, names
from tensorkeep.state.dtypes import BY_NAME, DType, check_torch
from tensorkeep.state.leaf import Leaf
from tensorkeep.state.names import KeyPath
from tensorkeep.state.sharded import Piece
from tensorkeep.state.skeleton import SkeletonWriter
from tensorkeep.state.tree import Flat
from tensorkeep.storage.commit import Commit

# What a rank's save plan of DCP stores: boxes of tensors, and plain values without pickles.
#
# DCP flattens a state to names joined by dots. Its planners keep the keys that lead to each name, from which the nested
# state is built again.


@dataclass(slots=True)
class RankState:
    """What one rank stores.

    ``nodes`` has the nodes of plain values in the skeleton, and ``inner`` the arrays and tensors in them. ``dtypes``
    are those of the tensors, of which other ranks may have boxes as well.
    """

    pieces: list[Piece] = field(default_factory=list)
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, tuple[str, tuple[int, ...], tuple[str, str]]] = field(default_factory=dict)


def state_of_plan(plan: SavePlan, planner: SavePlanner) -> RankState:
    """Return what a rank's plan stores.

    Raises UnsupportedLeafError for a value that cannot be stored, or a tensor that is not what the plan says.
    """
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


def _paths(planner_data: Any, keys: Iterable[str]) -> dict[str, KeyPath]:
    """Return the keys that lead to each flat name; those of planners that do not flatten are the names themselves."""
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
        raise UnsupportedLeafError(
            f"the plan says {expected[0]} {list(expected[1])}, and the planner gives {leaf.dtype} {list(leaf.shape)}",
            name=name,
            remedy="let the planner change the plan as it changes the tensor",
        )
    found.dtypes[name] = leaf.dtype.name
    if leaf.nbytes:
        whole, offsets = tuple(data.size), tuple(data.chunk.offsets)
        found.pieces.append(Piece(name, "tensor", leaf.dtype, leaf.array, whole=whole, offsets=offsets))


def _value(planner: SavePlanner, item: WriteItem) -> Any:
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UnsupportedLeafError(
            f"{type(planner).__name__} has no lookup_object, so that its plain values are known as pickles only",
            name=item.index.fqn,
            remedy="derive it from torch.distributed.checkpoint.DefaultSavePlanner",
        )
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
            found.pieces.append(Piece.of_leaf(leaf))


@dataclass(frozen=True, slots=True)
class RankDescription:
    """What the coordinator must know of one rank's state, as plain values."""

    dtypes: Mapping[str, str]
    nodes: Mapping[str, Any]
    inner: Mapping[str, tuple[str, tuple[int, ...], tuple[str, str]]]

    @classmethod
    def of_state(cls, state: RankState) -> "RankDescription":
        """Return what to send of a state."""
        return cls(state.dtypes, state.nodes, state.inner)


def merged_state(metadata: Metadata, ranks: Sequence[RankDescription]) -> Flat[FullTensor]:
    """Return the state that all ranks have together.

    Raises RanksDisagreeError if a tensor has different dtypes on two ranks.
    """
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
    return Flat(_nested(paths, nodes), leaves, {}, {name: parts[name] for name in leaves})


def _full(name: str, dtype: DType, shape: Sequence[int]) -> FullTensor:
    return FullTensor(name, dtype, tuple(shape), prod(shape) * dtype.itemsize)


def _check_dtypes(leaves: Mapping[str, FullTensor], ranks: Sequence[RankDescription]) -> None:
    for number, rank in enumerate(ranks):
        for name, dtype in rank.dtypes.items():
            if dtype != leaves[name].dtype.name:
                raise RanksDisagreeError(
                    f"is {dtype} on rank {number}, and {leaves[name].dtype} on an earlier one",
                    name=name,
                    remedy="give all ranks the same state, apart from what they have of each DTensor",
                )


class _Container(dict[str | int, Any]):
    """A dict or a list that is built."""

    def node(self) -> Any:
        """Return its node in the skeleton; a list item that no rank has is None, as in torch."""
        built = {key: child.node() if isinstance(child, _Container) else child for key, child in self.items()}
        indices = [key for key in built if type(key) is int]
        if indices:
            return [built.get(index) for index in range(max(indices) + 1)]
        return {"dict": built}


def _nested(paths: Mapping[str, KeyPath], nodes: Mapping[str, Any]) -> Any:
    """Return the skeleton of a state with these nodes at the ends of their paths."""
    root = _Container()
    for key, path in paths.items():
        container = root
        for step in path[:-1]:
            container = container.setdefault(step, _Container())  # type: ignore[arg-type]
        container[path[-1]] = nodes[key]  # type: ignore[index]
    return root.node()


# The folder that the ranks of one save of DCP write into: created by the coordinator, known to all, published once.


@dataclass(frozen=True, slots=True)
class Stage:
    """What every rank must know of a save: where to write, the name of the save, and the number of ranks.

    The coordinator puts it into the plans that DCP scatters. A planner that caches plans drops what it receives, and
    gives the writer a plan of an earlier save. So a rank takes note of a stage when it is unpickled.
    """

    destination: str
    directory: str
    save: str
    ranks: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.destination, self.directory, self.save, self.ranks)

    def announce(self) -> "Stage":
        """Take note of it in this process, for `announced`."""
        with _lock:
            _announced[self.destination] = self
        return self

    @classmethod
    def announced(cls, destination: str) -> "Stage":
        """Return the stage of the save that has begun, once; RanksDisagreeError if no stage was received."""
        with _lock:
            stage = _announced.pop(destination, None)
        if stage is None:
            raise RanksDisagreeError(
                "the coordinator's plan did not arrive, or names another path",
                path=destination,
                remedy="give all ranks the same path, and let the planner return the plans that it is given",
            )
        return stage


_lock = threading.Lock()
_announced: dict[str, Stage] = {}


def _received(*fields: Any) -> Stage:
    return Stage(*fields).announce()


class BegunSave:
    """The coordinator's part of a save: the folder of the ranks, until it is published or removed.

    DCP does not call the coordinator's writer when another rank fails. The folder is then removed when the writer is
    collected, when this process begins to save to the same path again, or at exit.

    Raises DestinationExistsError, BusyError, StoreError as `Commit`.
    """

    is_writing: bool

    def __init__(self, destination: Path, *, overwrite: bool) -> None:
        earlier: BegunSave | None = _begun.get(destination)
        if earlier is not None and not earlier.is_writing:
            earlier.abandon()
        finish_saves(absolute(destination).parent)
        commit = Commit(destination, directory=True, overwrite=overwrite, replaceable=is_replaceable)
        commit.__enter__()
        self._end = weakref.finalize(self, commit.__exit__, None, None, None)
        self.commit = commit
        self.name = secrets.token_hex(16)
        self.is_writing = False
        _begun[destination] = self

    def publish(self) -> None:
        """Make the folder, which is complete and durable, visible as the checkpoint."""
        self.commit.publish()
        self._end()

    def abandon(self) -> None:
        """Remove the folder, unless it was published or removed."""
        self._end()


_begun: "weakref.WeakValueDictionary[Path, BegunSave]" = weakref.WeakValueDictionary()


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
            return ShardedWrite(state.pieces, state.parts, Path(self._path), settings, together).run()
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
