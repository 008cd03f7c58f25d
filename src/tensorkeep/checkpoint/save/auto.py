"""``compression="auto"``: choose between raw and lossless by measuring a sample of the state and the disk.

`tensorkeep.checkpoint.save.trial` measures how fast blocks of the state are gathered and coded, and how fast the
destination is written. `Rates.seconds` predicts the duration of both saves, and the faster one is chosen.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tensorkeep.checkpoint.save.trial import Rates, measure
from tensorkeep.errors import StoreError
from tensorkeep.formats.base import StoredLeaf
from tensorkeep.formats.blockfile.plan import BlockFileOptions
from tensorkeep.formats.native.writer import NativeOptions
from tensorkeep.formats.write import WriteSettings
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.units import format_bytes

FORMATS = ("native", "safetensors")
"""The formats that support ``"auto"``: those with raw and lossless blocks."""

SMALLEST = 256 * 1024**2
"""States with fewer bytes are not measured: the save takes about as long as measuring."""

FRESH = 600.0
"""Seconds for which rates are reused, for states of the same dtypes and sizes on the same file system."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen compression and why, with the rates and predictions; ``again`` if an earlier save measured them."""

    compression: str
    reason: str
    rates: Rates | None = None
    seconds: dict[str, float] | None = None
    again: bool = False
    measuring_seconds: float = 0.0


def decide(
    flat: Flat[Source],
    destination: Path,
    settings: WriteSettings,
    *,
    measure: Callable[[Flat[Source], Path, WriteSettings], Rates] = measure,
    clock: Callable[[], float] = time.monotonic,
) -> Decision:
    """Decide between ``"none"`` and ``"lossless"``; a temporary file beside the destination is written and removed.

    The result is ``"none"`` for small states, and if the destination cannot be written: the save then raises the error.
    If something is there already, DestinationExistsError is raised as by the save.
    """
    if isinstance(settings.options, NativeOptions) and settings.options.delta:
        return Decision("lossless", "differences are stored compressed")
    nbytes = sum(leaf.nbytes for leaf in flat.leaves.values())
    if nbytes < SMALLEST:
        return Decision("none", f"nothing is measured below {format_bytes(SMALLEST)}")
    begin = clock()
    key = _kind(flat, destination, settings)
    measured, rates = _known.get(key, (0.0, None)) if key is not None else (0.0, None)
    again = rates is not None and begin - measured < FRESH
    if rates is None or not again:
        try:
            rates = measure(flat, destination, settings)
        except StoreError as error:
            return Decision(
                "none", f"the disk could not be measured: {error.message}", measuring_seconds=clock() - begin
            )
        if key is not None:
            _known.pop(key, None)
            _known[key] = clock(), rates
            for oldest in list(_known)[:-_MOST_KNOWN]:
                _known.pop(oldest, None)
    seconds = rates.seconds(nbytes)
    taken, other = sorted(seconds, key=lambda name: (seconds[name], name != "none"))
    reason = f"{taken} is predicted to take {seconds[taken]:.3f} s, {other} {seconds[other]:.3f} s"
    return Decision(taken, reason, rates, seconds, again, clock() - begin)


_Key = tuple[object, ...]


def _kind(flat: Flat[Source], destination: Path, settings: WriteSettings) -> _Key | None:
    """Return what rates depend on: file system, settings, and bytes by dtype; None if the folder cannot be read."""
    try:
        device = next(folder for folder in destination.absolute().parents if folder.exists()).stat().st_dev
    except OSError:
        return None
    sizes: dict[str, int] = {}
    for leaf in flat.leaves.values():
        sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.nbytes
    direct = settings.options_as(BlockFileOptions).direct_io
    stored = any(isinstance(leaf, StoredLeaf) for leaf in flat.leaves.values())
    threads = settings.threads, settings.pool.budget
    return device, direct, threads, stored, len(flat.leaves), tuple(sorted(sizes.items()))


_MOST_KNOWN = 64
_known: dict[_Key, tuple[float, Rates]] = {}
"""The rates that this process has measured, and when: a training run saves the same state again and again.

Its operations are atomic, so that no lock is needed, which another thread might hold when the process is forked.
"""
