"""Saving a state."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from tensorkeep.checkpoint import settings as settings_file
from tensorkeep.checkpoint.arguments import MemorySize, budget_pool, checked_path, thread_count
from tensorkeep.checkpoint.finding import get_format
from tensorkeep.checkpoint.save import auto
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.formats.base import WriteResult, WriteSettings
from tensorkeep.io.buffers import DEFAULT_BUDGET
from tensorkeep.io.parallel import Progress
from tensorkeep.state import cuda
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat, flatten

_BY_SUFFIX = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(WriteResult):
    """What a save did and what it cost; the fields of `WriteResult` say what was written.

    Attributes
    ----------
    path : str
        Where the checkpoint lies.
    format, compression : str
        As written; the format also where it was inferred.
    state_bytes : int
        Raw bytes of the tensors, each storage once.
    tensors : int
        How many tensors were stored.
    seconds : float
        From the call to the end.
    stall_seconds : float
        How long the caller was held: all of it, but for `tensorkeep.save_async`.
    durable_seconds : float
        Until the checkpoint was on the disk and visible.
    auto : dict or None
        For ``compression="auto"``: what was measured and predicted, and why this compression was taken.
    settings_from : str or None
        The ``tensorkeep.toml`` that was followed in at least one setting.
    """

    path: str
    format: str
    compression: str
    state_bytes: int
    tensors: int
    seconds: float
    stall_seconds: float
    durable_seconds: float
    auto: dict[str, Any] | None = None
    settings_from: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``--json`` prints it."""
        return asdict(self)


def save(
    state: object,
    path: PathLike,
    *,
    compression: str | None = None,
    format: str | None = None,
    overwrite: bool = False,
    metadata: dict[str, Any] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    memory_budget: MemorySize | None = None,
    **options: Any,
) -> SaveReport:
    """Save a nested state so that it is visible whole or not at all, and durable on return.

    What the call leaves open of ``compression``, ``threads``, ``memory_budget`` and ``direct_io`` is taken from the
    nearest ``tensorkeep.toml`` from the destination's folder upwards, if there is one (``tensorkeep tune`` writes it).

    Parameters
    ----------
    state : nested dict, list, tuple of tensors, arrays and plain values
        For example ``{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}``.
    path : path-like
        Where the checkpoint shall appear; missing parent folders are created.
    compression : str, optional
        ``"none"``, the default; ``"lossless"``, about a third smaller for bf16, without losing a bit; ``"auto"``, which
        measures for a moment and takes the faster of the two (``report.auto`` says why); or one codec's name.
    format : str, optional
        ``"native"``, ``"torch"``, ``"safetensors"``, ``"dcp"`` (torch's distributed checkpoints), ``"tensorstore"``
        (Zarr arrays), ``"t5x"``, or a plug-in's. By default the path's suffix decides: ``.safetensors`` is a
        safetensors file, ``.pt`` and ``.pth`` are torch files, all else is native.
    overwrite : bool
        Replace a checkpoint of the same format that is there. It stays whole until the new one is.
    metadata : dict, optional
        Plain JSON values of your own, kept beside the state.
    progress : callable, optional
        Called with (bytes done, bytes in all), from the writing threads, one call at a time.
    threads : int, optional
        Writing threads; twice the cores, between 2 and 8, by default.
    memory_budget : int or str, optional
        Bytes that all buffers together may take, whatever the size of the state, also as ``"512MiB"``; 256 MiB by
        default.
    **options
        The format's own, such as ``shard_bytes``, or ``direct_io=False`` to write through the page cache (both
        native and safetensors). Native checkpoints can be incremental: with ``incremental=True`` later ones can build
        on this one, with ``base=PATH`` this one builds on that one and writes only the blocks that have changed, and
        with ``delta=True`` these are stored as differences where that is smaller (``compression="lossless"`` only).

    Returns
    -------
    SaveReport

    Raises
    ------
    UnsupportedLeafError
        If a value cannot be saved; raised before a byte is written, naming its key.
    DestinationExistsError, BusyError, StoreError, UsageError, UnsupportedError
    """
    begin = time.perf_counter()
    checked_path(path)
    format = format or format_of(path)
    choice = settings_file.choose(
        path, format, compression=compression, threads=threads, memory_budget=memory_budget, options=options
    )
    with budget_pool(DEFAULT_BUDGET if choice.memory_budget is None else choice.memory_budget) as pool:
        settings = WriteSettings(
            overwrite=overwrite,
            metadata=checked_metadata(metadata or {}),
            compression=choice.compression,
            threads=thread_count(choice.threads),
            pool=pool,
            progress=progress,
            options=get_format(format).parse_options(choice.options),
        )
        flat = flatten(state)
        cuda.wait_for_caller(flat.leaves.values())
        return save_flat(flat, path, format=format, settings=settings, begin=begin, settings_from=choice.settings_from)


def save_flat(
    flat: Flat[Source],
    path: PathLike,
    *,
    format: str,
    settings: WriteSettings,
    begin: float,
    settings_from: str | None = None,
) -> SaveReport:
    """Save a flattened state, from memory or from another checkpoint; see `save`.

    Parameters
    ----------
    begin : float
        ``time.perf_counter()`` at the caller's call.
    settings_from : str, optional
        The ``tensorkeep.toml`` that the settings follow.
    """
    settings, decision = auto.resolve(flat, Path(path), format, settings)
    about = About(os.fspath(path), format, settings.compression, *size_of(flat), decision, settings_from)
    written = get_format(format).write(flat, Path(path), settings)
    seconds = time.perf_counter() - begin
    return about.report(written, seconds, stall=seconds)


@dataclass(frozen=True, slots=True)
class About:
    """What a report says that is known before anything is written; see `SaveReport`."""

    path: str
    format: str
    compression: str
    state_bytes: int
    tensors: int
    auto: dict[str, Any] | None
    settings_from: str | None

    def report(self, written: WriteResult, seconds: float, *, stall: float) -> SaveReport:
        """Return the report of a save that is durable now."""
        return SaveReport(
            **asdict(self), **asdict(written), seconds=seconds, stall_seconds=stall, durable_seconds=seconds
        )


def size_of(flat: Flat[Source]) -> tuple[int, int]:
    """Return the bytes and the number of the tensors that are stored."""
    return sum(leaf.nbytes for leaf in flat.leaves.values()), len(flat.leaves)


def format_of(path: PathLike) -> str:
    """Return the format that a path's suffix asks for."""
    return _BY_SUFFIX.get(Path(path).suffix.lower(), "native")


def checked_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the metadata, which JSON must give back as it is: the caller may change it meanwhile."""
    try:
        copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(metadata))
        same = isinstance(metadata, dict) and copied == metadata
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the metadata cannot be stored as JSON ({error})", remedy="give plain values") from error
    if not same:
        raise UsageError(
            "the metadata would come back changed: JSON has no tuples, bytes, NaN or keys that are no strings",
            remedy="give a dict of strings, numbers, booleans, None, lists and such dicts, or put it into the state",
        )
    return copied
