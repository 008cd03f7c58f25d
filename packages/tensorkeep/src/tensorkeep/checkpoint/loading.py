"""`tensorkeep.load`: into existing tensors and objects, into new memory, or over a mapped file."""

import copy
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tensorkeep.checkpoint.match import (
    StateMatch,
    check_same_checkpoint,
    rebuild,
    refuse_placeholders,
    select_tensors,
    warn_of_attributes,
    warn_of_placeholders,
)
from tensorkeep.checkpoint.object_checks import REFUSALS, in_own_names, is_module
from tensorkeep.checkpoint.options import AllowOption, MemorySize, ProgressOption, drawn, open_settings, thread_count
from tensorkeep.checkpoint.ranges import CopyPlan, read_all
from tensorkeep.checkpoint.stateful import (
    StatefulObject,
    for_rank,
    is_below,
    load_objects,
    made,
    unwrap_states,
    value_at,
    with_values_at,
    wrap_objects,
)
from tensorkeep.errors import (
    PathLike,
    StateMismatchError,
    TensorkeepError,
    UnsupportedError,
    UsageError,
    explains_keywords,
)
from tensorkeep.formats.base import OpenSettings, Reader, StoredLeaf
from tensorkeep.formats.finding import open_reader
from tensorkeep.paths import checked_path
from tensorkeep.ranks.group import ONE_RANK, Group, RankCoordinator, ranks_of
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state import names
from tensorkeep.state.aliases import make_view
from tensorkeep.state.leaf import Array, Device, DTypeLike, LeafKind, allocate, check_device, float_dtype
from tensorkeep.state.skeleton import PerRank, SkeletonWriter
from tensorkeep.state.tree import prune, state_leaves
from tensorkeep.storage.buffers import DEFAULT_BUDGET, BufferPool
from tensorkeep.storage.parallel import Progress

# ``load(mmap=True)``: the memory of the tensors is the mapped file, and data is read when it is used.


def map_tensors(reader: Reader, names: Iterable[str]) -> dict[str, Array]:
    """Raises UnsupportedError if the bytes of a tensor are not stored as they are in memory."""
    stored: dict[str, Array] = {}
    tensors: dict[str, Array] = {}
    for name in names:
        alias = reader.flat.aliases.get(name)
        base = name if alias is None else alias.of
        if base not in stored:
            stored[base] = _map_tensor(reader, reader.leaf_specs[name].kind, reader.flat.leaves[base])
        tensors[name] = stored[base] if alias is None else make_view(stored[base], alias)
    return tensors


def _map_tensor(reader: Reader, kind: LeafKind, leaf: StoredLeaf) -> Array:
    if not leaf.nbytes:
        return allocate(kind, leaf.dtype, leaf.shape)
    content = reader.mapped(leaf.name)
    if content is not None and kind in ("ndarray", "npscalar"):
        array = content.view(leaf.dtype.numpy).reshape(leaf.shape)
        if array.flags.aligned:
            return array
    elif content is not None:
        import torch

        tensor = torch.frombuffer(content, dtype=leaf.dtype.torch).view(leaf.shape)
        # Foreign files may place a tensor at any byte.
        if not tensor.data_ptr() % leaf.dtype.itemsize:
            return tensor
    how = f"is stored as {leaf.codec}" if leaf.codec != "raw" else "is not stored in one aligned piece"
    remedy = "load without mmap, or `tensorkeep.convert` it with compression='none'"
    raise UnsupportedError(f"{how}, so that it cannot be mapped", path=reader.path, name=leaf.name, remedy=remedy)


# Loading from an open checkpoint: a new state, or into tensors in place and objects by ``load_state_dict``.


@dataclass(frozen=True, slots=True)
class LoadRequest:
    into: Any = None
    select: str | Iterable[str] | None = None
    device: Device = None
    strict: bool = True
    dtype: DTypeLike = None
    mmap: bool = False
    check_mapped: bool = False
    progress: ProgressOption = None
    threads: int | None = None
    ranks: RankCoordinator = ONE_RANK


def load_path(path: PathLike, settings: OpenSettings, request: LoadRequest, format: str | None = None) -> Any:
    """Load the checkpoint at a path, with buffers that are freed afterwards."""
    with request.ranks.collective("loading"), settings.pool as pool, open_reader(path, settings, format) as reader:
        if request.ranks.is_distributed:
            check_same_checkpoint(reader, request.ranks)
        return load_open(reader, pool, request)


def load_open(reader: Reader, pool: BufferPool, request: LoadRequest) -> Any:
    """See `tensorkeep.load`. Raises StateMismatchError; it states whether tensors are overwritten already."""
    _check_request(request)
    with drawn(request.progress, "loading") as progress:
        threads = thread_count(request.threads, reader.path)
        if request.into is not None:
            # Everything is compared first. Then objects without tensors to fill in place (schedulers, a new optimizer)
            # are loaded; if one refuses, all get their previous states back. Only then are tensors overwritten.
            return _IntoState(reader, request).load(threads, pool, progress)
        return _load_new(reader, request, threads, pool, progress)


def _load_new(reader: Reader, request: LoadRequest, threads: int, pool: BufferPool, progress: Progress | None) -> Any:
    select = request.select
    chosen = list(reader.leaf_specs) if select is None else select_tensors(reader, reader.leaf_specs, select)
    skeleton = reader.flat.skeleton if select is None else prune(reader.flat.skeleton, set(chosen))
    if reader.refusal is not None:
        refuse_placeholders(reader, skeleton)
    warn_of_placeholders(reader, skeleton)
    if select is None:
        warn_of_attributes(reader)
    dtype = None if request.dtype is None else float_dtype(request.dtype)
    if request.mmap:
        values = map_tensors(reader, chosen)
        if request.check_mapped:
            # A mapped file is read by the kernel, so checksums need a read of their own.
            stored = dict.fromkeys(reader.entries[name].alias_of or name for name in chosen)
            read_all(reader, stored, threads=threads, pool=pool, progress=progress)
    else:
        plan = CopyPlan(reader, chosen, {}, request.device, dtype)
        plan.read(threads, pool, progress)
        values = plan.values()
    return rebuild(reader, skeleton, values, as_given=())


def _check_request(request: LoadRequest) -> None:
    # By identity: device 0 is equal to False, and numpy's float64 to None.
    given: dict[str, bool] = {name: getattr(request, name) is not None for name in ("into", "device", "dtype")}
    given["mmap"] = request.mmap
    if not request.strict and not given["into"]:
        raise UsageError("strict=False needs `into`", remedy="give the state to load into, or `select` tensors")
    for one, other, remedy in (
        ("into", "mmap", "leave out `into` or `mmap`"),
        ("into", "device", "leave out `device`: tensors in `into` keep their devices"),
        ("into", "dtype", "leave out `dtype`: tensors in `into` keep their dtypes, which must be the saved ones"),
        ("mmap", "dtype", "leave out `mmap`, or convert tensors later"),
    ):
        if given[one] and given[other]:
            raise UsageError(f"`{one}` and `{other}` exclude each other", remedy=remedy)
    if request.mmap and str(request.device or "cpu") != "cpu":
        text = f"mapped tensors cannot be on device {str(request.device)!r}"
        raise UsageError(text, remedy="leave out `mmap`, or move them later")
    check_device(request.device)


class _IntoState:
    def __init__(self, reader: Reader, request: LoadRequest) -> None:
        self._reader = reader
        ranks = request.ranks
        self._rank = str(ranks.rank)
        state, self._per_rank = for_rank(request.into, ranks)
        # Nothing is touched unless the states of all ranks fit.
        with ranks.collective("comparing its state with the checkpoint"):
            self._match = StateMatch(
                reader,
                wrap_objects(state),
                request.select,
                strict=request.strict,
                ranks=ranks,
                per_rank=self._per_rank.keys(),
            )
            targets = self._match.targets()
        self._state = self._match.state
        # What is not selected may be a placeholder.
        whole = self._match.skeleton
        self._skeleton = whole if request.select is None else prune(whole, reader.entries)
        self._first = self._match.loaded_first()
        self._done = set(self._match.unselected)  # objects that are loaded already, or not at all
        self._tensors_read = False
        # Tied tensors are loaded into new memory first, to be compared.
        first_names = set[str]().union(*self._first.values(), *self._match.tied)
        targets |= self._match.divided_like_parameters()
        chosen = self._match.chosen
        plans = (
            CopyPlan(
                reader,
                [name for name in chosen if (name in first_names) is first],
                {name: target for name, target in targets.items() if (name in first_names) is first},
                request.device,
            )
            for first in (True, False)
        )
        self._first_plan, self._plan = plans

    def load(self, threads: int, pool: BufferPool, progress: Progress | None) -> Any:
        skeleton, total = self._skeleton, self._first_plan.nbytes + self._plan.nbytes
        self._first_plan.read(threads, pool, _offset_progress(progress, 0, total))
        values = self._first_plan.values()
        self._check_tied(values)
        saved = {**self._match.saved_tensors, **values}
        as_given = saved.keys() - (values.keys() & self._match.new)
        self._load_first(rebuild(self._reader, skeleton, saved, as_given=as_given, makes_objects=False))
        self._tensors_read = True
        self._plan.read(threads, pool, _offset_progress(progress, self._first_plan.nbytes, total))
        values |= self._plan.values()
        if values.keys() != self._reader.entries.keys():
            skeleton = prune(skeleton, values.keys(), placeholders=True)
        as_given = values.keys() - self._match.new
        saved = rebuild(self._reader, skeleton, values, as_given=as_given, makes_objects=False)
        try:
            loaded = made(load_objects(self._state, saved, self._load))
        except UnsupportedError as error:
            if error.path is not None:
                raise
            raise UnsupportedError(error.message, path=self._reader.path, remedy=error.remedy) from error
        self._match.warn_of_skipped()
        warn_of_placeholders(self._reader, skeleton)
        # Each `PerRank` with its loaded value; as it was given where the checkpoint has none of this rank.
        of_this_rank = dict(self._per_rank)
        for path in self._per_rank:
            with suppress(KeyError):
                of_this_rank[path] = PerRank(value_at(loaded, (*path, self._rank)))
        return with_values_at(loaded, of_this_rank)

    def _check_tied(self, values: Mapping[str, Any]) -> None:
        """Raises StateMismatchError if tensors that are one in the state were saved with different values."""
        if self._match.tied:
            import torch

        for first, *others in self._match.tied:
            for other in others:
                # NaN is equal to the same NaN.
                if not torch.equal(*(values[name].reshape(-1).view(torch.uint8) for name in (first, other))):
                    raise StateMismatchError(
                        f"{other!r} is {first!r} in the state, and they were saved with different values; "
                        "nothing was touched",
                        path=self._reader.path,
                        remedy="give each tensor of the state its own memory, or load without `into`",
                        different=(first, other),
                    )

    def _load_first(self, loaded: Any) -> None:
        """Load the objects that come first; if one refuses, load the previous states back into all objects."""
        previous: list[tuple[names.KeyPath, StatefulObject, Any]] = []
        try:
            for path in self._first:
                stateful = self._match.objects[path].stateful
                # Copied before the load: an object may change its state and then refuse. The copy shares the tensors,
                # which may be large: loading replaces them.
                state = unwrap_states(stateful.state)
                tensors = [found.value for found in state_leaves(state, SkeletonWriter(sharded=True)).values()]
                previous.append((path, stateful, copy.deepcopy(state, {id(tensor): tensor for tensor in tensors})))
                load_objects(stateful, value_at(loaded, path), self._load, path)
        except BaseException:
            for path, stateful, state in previous:
                # The object that refused may refuse its previous state, too; the others must still get theirs.
                with suppress(Exception):
                    load_objects(stateful, state, lambda _, each, state: each.methods.load_state_dict(state), path)
            raise
        self._done |= set(self._first)

    def _load(self, path: names.KeyPath, stateful: StatefulObject, state: Any) -> None:
        if is_below(path, self._done):
            return
        value, state = stateful.value, in_own_names(stateful, state)
        try:
            if self._match.partial and is_module(value):
                value.load_state_dict(state, strict=False)
            else:
                stateful.methods.load_state_dict(state)
        except TensorkeepError:
            raise
        except REFUSALS as error:
            raise StateMismatchError(
                f"the {type(value).__name__} at {names.display(path)!r} does not accept its saved state: {error}; "
                + ("the tensors of the state are overwritten already" if self._tensors_read else "nothing was touched"),
                path=self._reader.path,
                remedy="load into an object that was made in the same way",
                different=(names.display(path),),
            ) from error


def _offset_progress(progress: Progress | None, before: int, total: int) -> Progress | None:
    """A callback that adds ``before`` to the bytes done, for the second of two readings."""
    return None if progress is None else lambda done, _: progress(before + done, total)


@explains_keywords(
    map_location="give device=", weights_only="leave it out, no load runs code from a file", state_dict="give into="
)
def load(
    path: PathLike,
    *,
    into: Any = None,
    select: str | Iterable[str] | None = None,
    device: Device = None,
    dtype: DTypeLike = None,
    strict: bool = True,
    group: Group = None,
    timeout: float | None = None,
    mmap: bool = False,
    verify: bool | None = None,
    page_cache: bool = False,
    format: str | None = None,
    allow: AllowOption = None,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
) -> Any:
    """Load a checkpoint of any format.

    Never executes code from a file: pickles are decoded without execution. A value that cannot be read is a
    `Placeholder`, which the call warns of; with ``select`` it is left out. Objects of classes that ``allow`` lacks are
    an error instead, unless ``select`` or ``into`` leaves them out.

    Parameters
    ----------
    path : path-like
        The checkpoint; its format is found by looking at the files. Or a run: its folder for the last complete step,
        ``"RUN@1200"`` for a step, ``"RUN@best"`` or ``"RUN@best:METRIC"`` for the best one.
    into : nested state or object, optional
        Tensors and arrays to fill in place, on whatever device they are, and objects with a ``load_state_dict()``
        (modules, optimizers, schedulers, `tensorkeep.RandomState`), also one object alone. Filling is the fastest way,
        because no new memory is touched. Names, shapes, dtypes and shared memory are compared first, and nothing is
        touched unless everything fits: an object with a ``check_state_dict()`` is asked then. A new optimizer takes the
        state that was saved; parameters with names (``param_names``) must have the saved ones.

        A module may convert what was saved, as in its ``load_state_dict()``: a copy of the module without memory is
        asked before anything is read. Tensors that it takes unchanged are filled in place. A tied weight may be saved
        under a single name, and the names of either side may have the prefixes ``module.`` and ``_orig_mod.`` of
        wrappers.

        A dict may lack entries of the checkpoint's top level, which are then not loaded: ``into={"model": model}``
        leaves a saved optimizer alone. Within each entry, and in a dict of tensors, nothing may be missing or extra.
    select : str or list of str, optional
        Globs on the names; only these tensors are read, and with ``into`` only these are filled. Tensors that are not
        selected are left out of dicts and replaced by None in lists.
    device : torch.device or str, optional
        Where new tensors go; the CPU by default.
    dtype : torch.dtype or str, optional
        Convert tensors of floating point to this dtype while they are read, block by block, such as ``torch.bfloat16``
        or ``"bfloat16"``. Other tensors and numpy arrays keep their dtypes. Not together with ``into``.
    strict : bool
        With False, what fits ``into`` by name and shape is loaded, and a `StateMismatchWarning` names the rest, which
        is left unchanged. Dtypes must still be the same. Objects other than modules are loaded as a whole or, if
        the checkpoint does not have them, not at all.
    group : torch.distributed.ProcessGroup, optional
        The ranks that load together, such as ``torch.distributed.group.WORLD``; all ranks call this. ``into`` may
        then have DTensors: every rank reads its own shards, whichever ranks saved them. A new optimizer of such
        parameters takes a state that is sharded like the parameters. The ranks may have different keys, as in
        pipelines: only what no rank has is extra. If one of them fails, all raise.
    timeout : float, optional
        Seconds to wait for the other ranks; 30 minutes by default.
    mmap : bool
        Return tensors over the mapped file (native, safetensors and torch files, uncompressed, on the CPU) instead of
        copies in new memory. The call takes about a millisecond; data is read when it is used. Writing to such a tensor
        changes memory only. The file must not be overwritten or truncated while they are in use; deleting or replacing
        the checkpoint with Tensorkeep does no harm.
    verify : bool, optional
        Check every block that is read against its checksum, where the format has any. The default is True; with
        ``mmap`` it is False, because checking reads the whole file.
    page_cache : bool
        Leave the files in the page cache, for other processes of this machine that load them as well. Otherwise only
        what is cached already is taken from there, and the rest is read directly, which is faster.
    format : str, optional
        The name of the format, instead of looking.
    allow : str, class, or list of them, optional
        Classes outside torch's allow list, such as ``"argparse.Namespace"``. Their objects in ``torch.save`` files are
        read as dicts; their code never runs.
    progress : bool or callable, optional
        True draws a bar on stderr if that is a terminal. A function is called with (bytes done, bytes in all), from
        the reading threads, one call at a time.
    threads : int, optional
        Reading threads; by default twice the cores, between 2 and 8, or 8 from an object store.
    memory_budget : int or str
        Limit in bytes for all buffers together, besides the tensors themselves, also as ``"256MiB"``.

    Returns
    -------
    state
        The state as it was saved. With ``into``, the given objects, tensors, parameters and arrays are in it, and
        other entries only if they hold no tensors, such as a step. If ``into`` is one object, that object.

    Raises
    ------
    NotFoundError, NotACheckpointError
        If nothing is at the path, or not a checkpoint.
    CorruptCheckpointError
        If a byte is not what was written; it names the file, the tensor and the block. Tensors given to ``into`` may
        then be partly filled.
    StateMismatchError
        If ``into`` does not fit. Usually nothing was touched; the message says so if an object refused its state later.
        With ``strict=False``, if nothing fits.
    UsageError
        If a pattern matches nothing, the device does not exist, or arguments exclude each other.
    RanksDisagreeError
        If another rank has failed, has ended, or does not answer in time; it is named.
    UnsupportedError, OutOfMemoryError, StoreError
        If the checkpoint has a dtype, class, codec or version that this installation does not know, or with ``mmap`` a
        tensor that is not stored as it is in memory; the tensors are larger than the memory of this machine; or the
        disk failed.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> _ = tensorkeep.save({"model": {"w": torch.ones(2), "b": torch.zeros(2)}, "step": 7}, f"{folder.name}/c")
    >>> tensorkeep.load(f"{folder.name}/c")["step"]
    7
    >>> weight = torch.empty(2)
    >>> _ = tensorkeep.load(f"{folder.name}/c", into={"model": {"w": weight}}, select="model.w")
    >>> weight
    tensor([1., 1.])

    Objects are saved by their ``state_dict()``, and loaded by their ``load_state_dict()``:

    >>> model, average = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> _ = tensorkeep.save({"model": model, "average": average, "step": 8}, f"{folder.name}/d")
    >>> tensorkeep.load(f"{folder.name}/d", into={"model": model})
    {'model': Linear(in_features=2, out_features=2, bias=True), 'step': 8}
    >>> folder.cleanup()
    """
    check = not mmap if verify is None else verify
    ranks = ranks_of(group, timeout)
    # Ranks of one machine read the same blocks: from the disk once.
    through_cache = page_cache or mmap or ranks.is_distributed
    request = LoadRequest(into, select, device, strict, dtype, mmap, check, progress, threads, ranks)
    with ranks.reporting_errors("loading"):
        settings = open_settings(memory_budget, verify=check, page_cache=through_cache, allow=allow)
        return load_path(_found(path, ranks), settings, request, format)


def _found(path: PathLike, ranks: RankCoordinator) -> PathLike:
    """Return the path of a checkpoint: for all ranks that give the same address, the path that rank 0 finds."""
    if not ranks.is_distributed:
        return checkpoint_path(path)
    given = os.fsencode(checked_path(path, stores=True))
    # A run may get a new step meanwhile; each rank would then find another "last" one.
    own = os.fsencode(checkpoint_path(path)) if ranks.is_main else None
    address, found = ranks.broadcast([given, own], "loading")
    return os.fsdecode(found) if address == given else checkpoint_path(path)
