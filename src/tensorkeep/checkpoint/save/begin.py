"""The one path of every save: check the arguments, choose the compression, plan the writing, return a job."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from tensorkeep.checkpoint.arguments import MemorySize, thread_count
from tensorkeep.checkpoint.ranks.collective import PREPARING, CollectiveWrite, agree, as_flat
from tensorkeep.checkpoint.ranks.group import Ranks, together
from tensorkeep.checkpoint.save import auto
from tensorkeep.checkpoint.save.job import SaveJob, SaveReport
from tensorkeep.checkpoint.save.memory import SaveMemory
from tensorkeep.checkpoint.settings import SettingsSource, read_settings
from tensorkeep.checkpoint.stateful import expand, for_rank
from tensorkeep.errors import DestinationExistsError, PathLike, UnsupportedError, UsageError
from tensorkeep.formats.base import FORMATS
from tensorkeep.formats.native.options import NativeOptions
from tensorkeep.formats.probe import first_bytes
from tensorkeep.formats.sealed import MANIFEST_NAME
from tensorkeep.formats.structure import check_saveable
from tensorkeep.formats.write import StagedWrite, StepRecord, WriteSettings
from tensorkeep.io.parallel import Progress
from tensorkeep.paths import StorePath, as_path, check_url, checked_path
from tensorkeep.state import cuda
from tensorkeep.state.leaf import Leaf, Source
from tensorkeep.state.tree import Flat, flatten
from tensorkeep.units import parse_bytes

DEFAULT_FORMAT = "native"

_BY_SUFFIX = {
    **dict.fromkeys((".safetensors", ".tensorkeep"), "safetensors"),
    **dict.fromkeys((".pt", ".pth", ".bin"), "torch"),
    ".zarr": "tensorstore",
}
"""Formats by the suffixes that mean one to every tool. ``.ckpt`` does not: it is any trainer's checkpoint."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The checked arguments of one save, with the settings file applied.

    ``write`` lacks its pool, and its compression may still be ``"auto"``. ``started`` is ``time.perf_counter()`` at the
    caller's call.
    """

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
    """Check the arguments of a save, and take what they leave open from the settings; see `tensorkeep.save`.

    With ``copy`` the state is copied first. The memory budget of the settings is then not used: it was measured for the
    buffers of a save without a copy.
    """
    started = time.perf_counter() if started is None else started
    path = checked_path(path, stores=True)
    if isinstance(base := options.get("base"), str | os.PathLike):
        options = {**options, "base": checked_path(base, stores=True)}
    format = format or format_by_suffix(path)
    given = {**options, "compression": compression, "threads": threads, "memory_budget": memory_budget}
    table = read_settings(settings)
    left_out = ["memory_budget"] if copy else []
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
    """Raise if the path is the URL of a store that cannot be written to, or not in this format."""
    place = as_path(path)
    if not isinstance(place, StorePath):
        return
    check_url(place)
    if place.scheme in ("http", "https"):
        raise UnsupportedError(
            f"{place.scheme}:// is only read from", path=path, remedy="save to s3://, gs://, az:// or a disk"
        )
    if not FORMATS.get(format).writes_to_stores:
        raise UnsupportedError(
            f"format {format!r} is not written to object stores",
            path=path,
            remedy="save in the native format (leave out the suffix and `format`), or to a disk, and upload it",
        )


def format_by_suffix(path: PathLike) -> str:
    """Return the format in which a checkpoint of this name is saved."""
    return _BY_SUFFIX.get(Path(path).suffix.lower(), DEFAULT_FORMAT)


def flat_state(state: object, ranks: Ranks | None = None) -> Flat[Leaf]:
    """Return a state taken apart into leaves that other threads may read now; raise as `flatten`.

    Objects with a ``state_dict()`` are replaced by what it returns. With ``ranks`` it may have DTensors and `PerRank`.
    """
    own, _ = for_rank(state, ranks.rank if ranks else None)
    flat = flatten(expand(own), sharded=ranks is not None)
    cuda.wait_for_caller(flat.leaves.values())
    return flat


def begin_save(
    flat: Flat[Source],
    request: SaveRequest,
    memory: SaveMemory,
    *,
    copy: bool = False,
    on_durable: Callable[[], None] | None = None,
    ranks: Ranks | None = None,
) -> SaveJob:
    """Return a save that is ready to run; nothing is copied or written yet. With ``ranks`` this is collective.

    ``memory`` must stay open until the save is over. With ``copy`` the state will be copied, so that the caller need
    not wait for the writing. ``on_durable`` is called when the checkpoint is durable, by the thread that writes; its
    error becomes that of the save.
    """
    begin = partial(_begin, flat, request, memory, copy=copy, on_durable=on_durable, ranks=ranks)
    if ranks is None:
        return begin()
    with ranks.caller.lock:
        with together(ranks, PREPARING):
            job = begin()
        assert isinstance(job.staged, CollectiveWrite)
        job.staged.take_turn()
    return job


def _begin(
    flat: Flat[Source],
    request: SaveRequest,
    memory: SaveMemory,
    *,
    copy: bool,
    on_durable: Callable[[], None] | None,
    ranks: Ranks | None,
) -> SaveJob:
    path, settings = as_path(request.path), request.write
    shared = None
    if ranks is not None:
        shared = agree(ranks, flat, _arguments_of_all(request))  # type: ignore[arg-type]  # of a state in memory
        flat = as_flat(shared.pieces)
    whole: Flat[Source] = flat if shared is None else shared.flat
    check_saveable(whole)
    if (ranks is None or ranks.is_coordinator) and not settings.overwrite and _is_taken(path):
        raise DestinationExistsError(
            "exists already", path=path, remedy="choose another path, or replace it (overwrite=True)"
        )
    if not copy:
        settings = replace(settings, pool=memory.single_pool())
    decision: dict[str, Any] | None = None
    if settings.compression == "auto" and request.format in auto.FORMATS:
        if ranks is None or ranks.is_coordinator:
            decision = asdict(auto.decide(flat, path, settings, measure=partial(_measure, memory)))
        if ranks is not None:
            decision = ranks.caller.exchange(decision, "measuring")[0]
        assert decision is not None
        settings = replace(settings, compression=decision["compression"])
    if copy:
        delta = isinstance(settings.options, NativeOptions) and settings.options.delta
        settings = replace(
            settings, pool=memory.working(settings.threads, delta=delta, in_store=isinstance(path, StorePath))
        )
    write: StagedWrite
    if ranks is None or shared is None:
        write = FORMATS.get(request.format).begin(flat, path, settings)
    else:
        write = CollectiveWrite(ranks, shared, path, settings)
    fits = True
    if copy:
        needed = write.staging_bytes()
        staging = memory.staging(needed, from_cuda=cuda.on_cuda(flat.leaves.values()))  # type: ignore[arg-type]
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


def _is_taken(path: Path) -> bool:
    """Return whether something is at a path; in a store, a checkpoint. The commit looks more closely."""
    if not isinstance(path, StorePath):
        return os.path.lexists(path)
    # A bucket itself is not an object.
    return any(first_bytes(place, 1) is not None for place in (path / MANIFEST_NAME, path) if path.key)


def _arguments_of_all(request: SaveRequest) -> dict[str, Any]:
    """Return the arguments that must be the same on all ranks; of the others, those of the coordinator count."""
    if request.format != "native":
        raise UsageError(
            f"format {request.format!r} is written by one process",
            path=request.path,
            remedy="leave out `format` and the path's suffix; `tensorkeep convert` writes other formats afterwards",
        )
    options = request.write.options_as(NativeOptions)
    return {
        "path": os.fspath(request.path),
        "compression": request.write.compression,
        "step": None if request.write.step is None else request.write.step.number,
        "incremental": options.wide_digests,
        "delta": options.delta,
    }


def _measure(memory: SaveMemory, flat: Flat[Source], destination: Path, settings: WriteSettings) -> auto.Rates:
    """Measure with the memory that the save will have, which is freed for it."""
    memory.close()
    with memory.single_pool() as pool:
        return auto.measure(flat, destination, replace(settings, pool=pool))


def _checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the metadata, having checked that JSON keeps it unchanged."""
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(metadata))
        same = isinstance(metadata, dict) and copied == metadata
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the metadata cannot be stored as JSON ({error})", remedy="give plain values") from error
    if not same:
        raise UsageError(
            "the metadata would come back changed: JSON has no tuples, bytes or NaN, and its keys are strings",
            remedy="give a dict of strings, numbers, booleans, None, lists and such dicts, or put it into the state",
        )
    return copied
