"""`tensorkeep.load`: a state, or some of its tensors, into new memory or into tensors that exist."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.into import LoadRequest, load_path
from tensorkeep.checkpoint.options import MemorySize, ProgressOption, budget_pool
from tensorkeep.errors import PathLike
from tensorkeep.formats.base import OpenSettings
from tensorkeep.formats.torch_file.unpickle import Allow, allowed_names
from tensorkeep.paths import checked_path
from tensorkeep.ranks.group import RankCoordinator, ranks_of
from tensorkeep.runs.address import checkpoint_path
from tensorkeep.state.leaf import Device, DTypeLike
from tensorkeep.storage.buffers import DEFAULT_BUDGET

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load(
    path: PathLike,
    *,
    into: Any = None,
    select: str | Iterable[str] | None = None,
    device: Device = None,
    dtype: DTypeLike = None,
    strict: bool = True,
    group: "ProcessGroup | None" = None,
    timeout: float | None = None,
    mmap: bool = False,
    verify: bool | None = None,
    page_cache: bool = False,
    format: str | None = None,
    allow: Allow | None = None,
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
        Classes outside torch\'s allow list, such as ``"argparse.Namespace"``. Their objects in ``torch.save`` files are
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
        settings = OpenSettings(
            verify=check, page_cache=through_cache, pool=budget_pool(memory_budget), allow=allowed_names(allow)
        )
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
