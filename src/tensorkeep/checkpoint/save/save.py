"""`tensorkeep.save` and `tensorkeep.save_async`."""

from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from tensorkeep.checkpoint.arguments import MemorySize
from tensorkeep.checkpoint.progress import ProgressOption, callback_only, drawn
from tensorkeep.checkpoint.ranks.collective import PREPARING
from tensorkeep.checkpoint.ranks.group import ranks_of, reported_to_others
from tensorkeep.checkpoint.save.begin import begin_save, check_request, flat_state
from tensorkeep.checkpoint.save.job import PendingSave, SaveReport, run_now
from tensorkeep.checkpoint.save.memory import SaveMemory, checked_budget
from tensorkeep.checkpoint.save.queue import SaveQueue
from tensorkeep.checkpoint.settings import SettingsSource
from tensorkeep.errors import PathLike

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def save(
    state: object,
    path: PathLike,
    *,
    compression: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    metadata: dict[str, Any] | None = None,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    settings: SettingsSource | None = None,
    group: "ProcessGroup | None" = None,
    timeout: float | None = None,
    **options: Any,
) -> SaveReport:
    """Save a nested state. It becomes visible completely or not at all, and is durable on return.

    Parameters
    ----------
    state : nested dict, list, tuple of tensors, arrays, plain values and objects
        For example ``{"model": model, "optimizer": optimizer, "step": 100}``, or one model. Objects with a
        ``state_dict()`` are replaced by what it returns. Tensors of any shape, strides and device; sparse, nested,
        quantised and sub-byte ones are refused, with a remedy.
    path : path-like
        The path of the new checkpoint; missing parent folders are created. Or its URL in an object store, such as
        ``"s3://bucket/run/step-100"``; native format, and single safetensors files without compression.
    compression : str, optional
        ``"none"``, the default; ``"lossless"``, about a third smaller for bf16 weights, bit-exact; ``"auto"``, which
        measures for a moment and takes the faster of the two (``report.auto["reason"]`` gives the reason; for object
        stores it is ``"lossless"``); or the name of a codec.
    format : str, optional
        ``"native"``, ``"torch"``, ``"safetensors"``, ``"dcp"`` (torch's distributed checkpoints), ``"tensorstore"``
        (Zarr arrays), ``"t5x"``, or a plug-in's. By default the path's suffix decides: ``.safetensors`` and
        ``.tensorkeep`` are single safetensors files, ``.pt``, ``.pth`` and ``.bin`` torch files, ``.zarr`` is
        tensorstore, all else is native.
    overwrite : bool
        Replace an existing checkpoint of the same format. It stays intact until the new one is durable.
    metadata : dict, optional
        JSON values of your own, stored beside the state.
    progress : bool or callable, optional
        True draws a bar on stderr if that is a terminal. A function is called with (bytes done, bytes in all), from
        the writing threads, one call at a time.
    threads : int, optional
        Writing threads; twice the cores, between 2 and 8, by default.
    memory_budget : int or str, optional
        Limit in bytes for all buffers together, whatever the size of the state, also as ``"512MiB"``; 256 MiB by
        default.
    settings : path-like or mapping, optional
        A settings file with a table ``[save]``, as ``tensorkeep tune checkpoint`` writes it, or the content of that
        table. It provides ``compression`` (native format only), ``threads``, ``memory_budget`` and ``direct_io``
        where the call leaves them open.
    group : torch.distributed.ProcessGroup, optional
        The ranks that save together, such as ``torch.distributed.group.WORLD``; native format only. All of them call
        this with the same arguments, and it returns on all of them, or raises on all. The state may have DTensors, of
        which each rank writes its part; a tensor that several ranks have in full must be the same on all of them, and
        is written once; plain values must be the same, unless they are wrapped by `tensorkeep.distributed.PerRank`;
        the ranks may have different keys. Other processes load the result as one checkpoint.
    timeout : float, optional
        Seconds to wait for the other ranks; 30 minutes by default.
    **options
        Options of the format. Native: ``shard_bytes``, the size after which a new file begins; ``direct_io=False``, to
        write through the page cache (safetensors as well); ``incremental=True``, so that later checkpoints can build
        on this one; ``base=PATH``, to build on that checkpoint and write only the blocks that have changed; and
        ``delta=True``, to store these as differences where that is smaller (``compression="lossless"`` only).
        Safetensors: ``shard_bytes``, ``direct_io``, and ``force=True``, to compress tensors although other tools would
        read their bytes as tensors of uint8; a file named ``*.tensorkeep`` needs no ``force``.

    Raises
    ------
    UnsupportedLeafError, UsageError
        If a value of the state cannot be saved, whose key is named; if an argument, an option or a setting is wrong.
    UnsupportedError
        If the format is unknown, or cannot store this state.
    DestinationExistsError
        If something is at ``path`` and ``overwrite`` is not set, or it is not a checkpoint of this format.
    BusyError, StoreError
        If another process is writing to ``path``, or the disk failed or is full, or the network. What was there
        before is intact.
    RanksDisagreeError
        If another rank has failed, has ended, does not answer in time, or has other arguments or values; it is named.

    Notes
    -----
    Another thread or process may change values of tensors during the call, but not resize or free their memory. The
    checkpoint still verifies, because its checksums are those of the bytes that it stores. But tensors are read piece
    by piece, so that it may have old and new values of them. For the values of one moment, change nothing until the
    call returns; `save_async` returns earlier.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> state = {"model": {"w": torch.zeros(1000, dtype=torch.bfloat16)}, "step": 100}
    >>> report = tensorkeep.save(state, f"{folder.name}/step-100", compression="lossless")
    >>> report.state_bytes, report.compression
    (2000, 'lossless')
    >>> tensorkeep.load(f"{folder.name}/step-100")["step"]
    100
    >>> folder.cleanup()
    """
    ranks = ranks_of(group, timeout)
    with drawn(progress, "saving") as callback, ExitStack() as stack:
        with reported_to_others(ranks, PREPARING):
            request = check_request(
                path, compression, format, overwrite, metadata, callback, threads, memory_budget, settings, options
            )
            memory = stack.enter_context(closing(SaveMemory(request.memory_budget)))
            flat = flat_state(state, ranks)
        return run_now(partial(begin_save, flat, request, memory, ranks=ranks), alone=ranks is None).result()


def save_async(
    state: object,
    path: PathLike,
    *,
    compression: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    metadata: dict[str, Any] | None = None,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    settings: SettingsSource | None = None,
    group: "ProcessGroup | None" = None,
    timeout: float | None = None,
    **options: Any,
) -> PendingSave:
    """Save a nested state in the background; it may change as soon as this returns.

    The caller waits while the state is copied to host memory. The checkpoint becomes visible later, completely or not
    at all; ``wait()`` of the result returns the report, or raises the error of the save, and an interpreter that exits
    waits for it. Each call allocates new memory for the copy;
    `tensorkeep.CheckpointManager` reuses it, which makes the copying several times faster.

    Parameters
    ----------
    state : nested dict, list, tuple of tensors, arrays, plain values and objects
    path : path-like
        The path of the new checkpoint, or its URL in an object store; missing parent folders are created.
    memory_budget : int or str, optional
        Limit in bytes for the copy and all other buffers together, at least 128 MiB. For a larger state the caller
        waits until the last of it is copied; formats other than ``"native"`` refuse it. By default what the state
        needs, but at most half of the available memory. That of ``settings`` is not used.
    progress : callable, optional
        Called with (bytes done, bytes in all), from the writing threads, one call at a time.
    compression, format, overwrite, metadata, threads, settings, group, timeout, **options : optional
        The same as those of `tensorkeep.save`. With ``group`` the ranks wait for each other before the copying begins,
        and ``wait()`` returns, or raises, on all of them.

    Raises
    ------
    UnsupportedLeafError, UsageError
        If a value of the state cannot be saved, whose key is named; if an argument, an option or a setting is wrong, or
        the budget is too small for this format.
    UnsupportedError
        If the format is unknown, or cannot store this state.
    DestinationExistsError
        If something is at ``path`` and ``overwrite`` is not set.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> weight = torch.ones(1000)
    >>> pending = tensorkeep.save_async({"w": weight}, f"{folder.name}/step-100")
    >>> _ = weight.zero_()  # the copy is not affected
    >>> report = pending.wait()
    >>> float(tensorkeep.load(report.path)["w"].sum())
    1000.0
    >>> folder.cleanup()
    """
    ranks = ranks_of(group, timeout)
    with reported_to_others(ranks, PREPARING):
        budget = checked_budget(memory_budget, delta=bool(options.get("delta")))
        callback = callback_only(progress)
        request = check_request(
            path, compression, format, overwrite, metadata, callback, threads, None, settings, options, copy=True
        )
        flat = flat_state(state, ranks)
    queue = SaveQueue("wait", budget, keep_buffers=False, alone=ranks is None)
    try:
        return PendingSave(queue.add(lambda memory: begin_save(flat, request, memory, copy=True, ranks=ranks)))
    except BaseException:
        queue.close()
        raise
