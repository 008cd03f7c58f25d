"""The one path of every save: check the arguments, choose the compression, plan the writing, return a job."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from tensorkeep.checkpoint import auto_compression
from tensorkeep.checkpoint.background import (
    PendingSave,
    SaveJob,
    SaveMemory,
    SaveQueue,
    SaveReport,
    checked_budget,
    run_now,
)
from tensorkeep.checkpoint.options import (
    MemorySize,
    ProgressOption,
    SettingsSource,
    callback_only,
    drawn,
    read_settings,
    thread_count,
)
from tensorkeep.errors import DestinationExistsError, PathLike, UnsupportedError, UsageError
from tensorkeep.formats.base import (
    FORMATS,
    SUFFIXES_ELSEWHERE,
    StagedWrite,
    StepRecord,
    WriteSettings,
    check_saveable,
    format_by_suffix,
)
from tensorkeep.formats.native.writer import NativeOptions
from tensorkeep.paths import as_path, checked_path
from tensorkeep.ranks.group import ONE_RANK, Group, GroupCoordinator, RankCoordinator, ranks_of
from tensorkeep.ranks.merge import PREPARING, CollectiveWrite, merge_rank_states
from tensorkeep.state.leaf import Leaf, Source, on_cuda, wait_for_caller
from tensorkeep.state.skeleton import ObjectWriter
from tensorkeep.state.tree import Flat, flatten
from tensorkeep.storage import storage_of
from tensorkeep.storage.parallel import Progress
from tensorkeep.units import parse_bytes

DEFAULT_FORMAT = "native"


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """Checked arguments of a save. ``write`` has no pool yet; the compression may still be ``"auto"``."""

    path: PathLike
    format: str
    write: WriteSettings
    memory_budget: int | None
    settings_from: str | None
    started: float


def check_request(
    path: PathLike,
    compression: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    settings: SettingsSource | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    step: StepRecord | None = None,
    copy: bool = False,
    started: float | None = None,
) -> SaveRequest:
    """Check the arguments of a save, and take what they leave open from the settings; see `tensorkeep.save`."""
    started = time.perf_counter() if started is None else started
    path = checked_path(path, stores=True)
    if isinstance(base := options.get("base"), str | os.PathLike):
        options = {**options, "base": checked_path(base, stores=True)}
    format = format or default_format(path)
    given = {**options, "compression": compression, "threads": threads, "memory_budget": memory_budget}
    table = read_settings(settings)
    # The budget of the settings was measured for the buffers of a save without a copy.
    left_out = ["memory_budget"] if copy else []
    # An argument of the call wins over the settings file.
    used = {k: v for k, v in table.values_for(format).items() if given.get(k) is None and k not in left_out}
    taken = {**given, **used}
    if "direct_io" in used:
        options = {**options, "direct_io": used["direct_io"]}
    write = WriteSettings(
        overwrite=overwrite,
        metadata=_checked_metadata(metadata or {}),
        compression=taken["compression"] or "none",
        threads=thread_count(taken["threads"]),
        progress=progress,
        options=FORMATS.get(format).parse_options(options),
        step=step,
    )
    check_store(path, format)
    FORMATS.get(format).check(as_path(path), write)
    budget = None if taken["memory_budget"] is None else parse_bytes(taken["memory_budget"])
    return SaveRequest(path, format, write, budget, table.path if used else None, started)


def check_store(path: PathLike, format: str) -> None:
    """Raises UnsupportedError for the URL of a store that cannot be written to, or not in this format."""
    storage = storage_of(as_path(path))
    storage.check_writable(as_path(path))
    if storage.remote and not FORMATS.get(format).writes_to_stores:
        remedy = "save in the native format (leave out the suffix and `format`), or to a disk, and upload it"
        raise UnsupportedError(f"format {format!r} is not written to object stores", path=path, remedy=remedy)


def default_format(path: PathLike) -> str:
    """Return the format of a save by the suffix of its path.

    The format may be of a package that is not installed: a native checkpoint with the suffix of another format would
    surprise later.
    """
    found = format_by_suffix(path)
    if found is None:
        return SUFFIXES_ELSEWHERE.get(as_path(path).suffix.lower(), DEFAULT_FORMAT)
    return found.name


def flat_state(state: object, ranks: RankCoordinator = ONE_RANK) -> Flat[Leaf]:
    """Return a state, with state dicts for objects, that other threads may read now; raises as `flatten`."""
    flat = flatten(state, ObjectWriter(ranks.rank if ranks.is_distributed else None))
    # Kernels of the caller may still be computing the tensors.
    wait_for_caller(flat.leaves.values())
    return flat


def begin_save(
    flat: Flat[Source],
    request: SaveRequest,
    memory: SaveMemory,
    *,
    copy: bool = False,
    on_durable: Callable[[], None] | None = None,
    ranks: RankCoordinator = ONE_RANK,
) -> SaveJob:
    """Return a save that is ready to run; nothing is copied or written yet. All ranks call this together."""
    # `memory` must stay open until the save is over. The thread that writes calls `on_durable`; an error in it becomes
    # the error of the save. One save at a time: all ranks must exchange the messages of their saves in one order.
    with ranks.lock:
        with ranks.collective(PREPARING):
            job = _begin(flat, request, memory, copy=copy, on_durable=on_durable, ranks=ranks)
        if isinstance(job.staged, CollectiveWrite):
            job.staged.enqueue()
    return job


def _begin(
    flat: Flat[Source],
    request: SaveRequest,
    memory: SaveMemory,
    *,
    copy: bool,
    on_durable: Callable[[], None] | None,
    ranks: RankCoordinator,
) -> SaveJob:
    path, settings = as_path(request.path), request.write
    whole, shared = flat, None
    if isinstance(ranks, GroupCoordinator):
        shared = merge_rank_states(ranks, flat, _arguments_of_all(request))  # type: ignore[arg-type]  # in memory
        # Each rank checks and reports the full state, but writes its part only.
        whole, flat = shared.flat, shared.own_flat()
    check_saveable(whole)
    # Early, before the state is copied or measured. The commit looks again.
    if ranks.is_main and not settings.overwrite and storage_of(path).is_taken(path):
        text = "exists already"
        raise DestinationExistsError(text, path=path, remedy="choose another path, or replace it (overwrite=True)")
    if not copy:
        settings = replace(settings, pool=memory.single_pool())
    decision: dict[str, Any] | None = None
    if settings.compression == "auto" and request.format in auto_compression.FORMATS:
        if ranks.is_main:
            decision = asdict(auto_compression.decide(flat, path, settings, measure=partial(_measure, memory)))
        # The disk of rank 0 decides for all: a checkpoint has one compression.
        decision = ranks.broadcast(decision, "measuring")
        assert decision is not None
        settings = replace(settings, compression=decision["compression"])
    if copy:
        delta = isinstance(settings.options, NativeOptions) and settings.options.delta
        # After the decision: differences need larger buffers.
        settings = replace(
            settings, pool=memory.working(settings.threads, delta=delta, in_store=storage_of(path).remote)
        )
    write: StagedWrite
    if shared is None:
        write = FORMATS.get(request.format).begin(flat, path, settings)
    else:
        write = CollectiveWrite(shared, path, settings)
    fits = True
    if copy:
        needed = write.staging_bytes()
        staging = memory.staging(needed, from_cuda=on_cuda(flat.leaves.values()))  # type: ignore[arg-type]
        write.prepare(staging)
        fits = needed <= staging.budget
    make_report = partial(
        SaveReport,
        path=os.fspath(request.path),
        format=request.format,
        compression=settings.compression,
        state_bytes=sum(leaf.nbytes for leaf in whole.leaves.values()),
        tensors=len(whole.leaves),
        auto=decision,
        settings_from=request.settings_from,
    )
    job = SaveJob(os.fspath(request.path), write, make_report, memory, request.started, fits, on_durable)
    if not copy:
        job.copied.set()
    return job


def _arguments_of_all(request: SaveRequest) -> dict[str, Any]:
    """The arguments that must be the same on all ranks; the others count on rank 0 only."""
    if request.format != "native":
        remedy = "leave out `format` and the path's suffix; `tensorkeep convert` writes other formats afterwards"
        raise UsageError(f"format {request.format!r} is written by one process", path=request.path, remedy=remedy)
    options = request.write.options_as(NativeOptions)
    return {
        "path": os.fspath(request.path),
        "compression": request.write.compression,
        "step": None if request.write.step is None else request.write.step.number,
        "incremental": options.wide_digests,
        "delta": options.delta,
    }


def _measure(
    memory: SaveMemory, flat: Flat[Source], destination: Path, settings: WriteSettings
) -> auto_compression.Rates:
    # Measured with the memory that the save will have, which is freed for this.
    memory.close()
    with memory.single_pool() as pool:
        return auto_compression.measure(flat, destination, replace(settings, pool=pool))


def _checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """A copy of the metadata. Raises UsageError unless JSON keeps it unchanged."""
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(metadata))
        # Tuples come back as lists, and integer keys as strings: equal only if nothing was converted.
        same = isinstance(metadata, dict) and copied == metadata
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the metadata cannot be stored as JSON ({error})", remedy="give plain values") from error
    if not same:
        text = "the metadata would come back changed: JSON has no tuples, bytes or NaN, and its keys are strings"
        remedy = "give a dict of strings, numbers, booleans, None, lists and such dicts, or put it into the state"
        raise UsageError(text, remedy=remedy)
    return copied


# `tensorkeep.save` and `tensorkeep.save_async`.


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
    group: Group = None,
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
        on this one; ``base=PATH``, to build on that checkpoint and write only the blocks that have changed;
        ``delta=True``, to store these as differences where that is smaller (``compression="lossless"`` only); and
        ``files={"config.json": TEXT}``, small files that ``from_pretrained`` reads beside the weights.
        Safetensors: ``shard_bytes``, ``direct_io``, and ``force=True``, to compress tensors although other tools would
        read their bytes as tensors of uint8; a file named ``*.tensorkeep`` needs no ``force``.

    Raises
    ------
    UnsupportedLeafError, UsageError
        If a value of the state cannot be saved, and its key is named; if an argument, an option or a setting is wrong.
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
    checkpoint still verifies, because its checksums belong to the bytes that it stores. But tensors are read piece
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
        with ranks.reporting_errors(PREPARING):
            request = check_request(
                path, compression, format, overwrite, metadata, callback, threads, memory_budget, settings, options
            )
            memory = stack.enter_context(closing(SaveMemory(request.memory_budget)))
            flat = flat_state(state, ranks)
        return run_now(partial(begin_save, flat, request, memory, ranks=ranks), alone=not ranks.is_distributed).result()


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
    group: Group = None,
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
    memory_budget : int or str, optional
        Limit in bytes for the copy and all other buffers together, at least 128 MiB. For a larger state the caller
        waits until the last of it is copied; formats other than ``"native"`` refuse it. By default what the state
        needs, but at most half of the available memory. Ignores the budget of ``settings``.
    state, path, compression, format, overwrite, metadata, progress, threads, settings, group, timeout, **options
        See `tensorkeep.save`; ``progress`` is a function. With ``group`` the ranks wait for each other before the
        copying begins, and ``wait()`` returns, or raises, on all of them.

    Raises
    ------
    UsageError, UnsupportedLeafError, UnsupportedError, DestinationExistsError
        As `tensorkeep.save` does, or if the budget is too small for this format. All other errors come from ``wait()``.

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
    with ranks.reporting_errors(PREPARING):
        budget = checked_budget(memory_budget, delta=bool(options.get("delta")))
        callback = callback_only(progress)
        request = check_request(
            path, compression, format, overwrite, metadata, callback, threads, None, settings, options, copy=True
        )
        flat = flat_state(state, ranks)
    queue = SaveQueue("wait", budget, keep_buffers=False, alone=not ranks.is_distributed)
    try:
        return PendingSave(queue.add(lambda memory: begin_save(flat, request, memory, copy=True, ranks=ranks)))
    except BaseException:
        queue.close()
        raise
