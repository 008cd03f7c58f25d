"""``compression="auto"``: whether a raw or a lossless save is faster here, for this state, measured on a sample.

`tensorkeep.checkpoint.save.trial` measures how fast blocks of the state are gathered and coded, and how fast the
destination takes bytes. `Rates.seconds` predicts both saves from that, and the one with the lower prediction is taken.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.save.trial import Rates, measure, nearest_folder
from tensorkeep.errors import StoreError
from tensorkeep.formats.base import StoredLeaf, WriteSettings
from tensorkeep.formats.blockfile.plan import BlockFileOptions
from tensorkeep.formats.native.history import NativeOptions
from tensorkeep.state.leaf import Source
from tensorkeep.state.tree import Flat
from tensorkeep.units import format_bytes

FORMATS = ("native", "safetensors")
"""Where ``"auto"`` is understood: the formats that Tensorkeep writes raw or lossless."""

SMALLEST = 256 * 1024**2
"""Bytes below which nothing is measured: such a save takes about as long as measuring would."""

FRESH = 600.0
"""Seconds for which what was measured is used again, for states of the same dtypes and sizes at the same place."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which compression was taken, and why.

    Attributes
    ----------
    compression : str
        ``"none"`` or ``"lossless"``.
    reason : str
        A sentence computed from the figures.
    rates : Rates or None
        What was measured; None if nothing was.
    seconds : dict of str to float
        The predicted seconds by compression; empty if nothing was measured.
    again : bool
        Whether the figures are those of an earlier save of this process.
    measuring_seconds : float
        What it cost to decide.
    """

    compression: str
    reason: str
    rates: Rates | None = None
    seconds: dict[str, float] | None = None
    again: bool = False
    measuring_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as plain values."""
        return asdict(self)


Measure = Callable[[Flat[Source], Path, WriteSettings], Rates]


def decide(
    flat: Flat[Source],
    destination: Path,
    settings: WriteSettings,
    *,
    measure: Measure = measure,
    clock: Callable[[], float] = time.monotonic,
) -> Decision:
    """Decide between ``"none"`` and ``"lossless"``.

    Parameters
    ----------
    flat : Flat
        The state.
    destination : Path
        Where it will be saved; a file is written beside it for a moment, and removed.
    settings : WriteSettings
        Of the save; ``direct_io`` among its options is followed.
    measure, clock : callable
        What measures, and what tells how old a measurement is.

    Returns
    -------
    Decision
        ``"none"``, saying why, for small states and where the destination refuses: the save then says what it says.

    Raises
    ------
    DestinationExistsError
        As the save itself would.
    """
    if isinstance(settings.options, NativeOptions) and settings.options.delta:
        return Decision("lossless", "differences are stored compressed")
    nbytes = sum(leaf.nbytes for leaf in flat.leaves.values())
    if nbytes < SMALLEST:
        return Decision("none", f"nothing is measured below {format_bytes(SMALLEST)}")
    begin = clock()
    key = _kind(flat, destination, settings)
    rates = _known.get(key, begin)
    again = rates is not None
    if rates is None:
        try:
            rates = measure(flat, destination, settings)
        except StoreError as error:
            return Decision(
                "none", f"the disk could not be measured: {error.message}", measuring_seconds=clock() - begin
            )
        _known.put(key, rates, clock())
    seconds = rates.seconds(nbytes)
    taken, other = sorted(seconds, key=lambda name: (seconds[name], name != "none"))
    reason = f"{taken} is predicted to take {seconds[taken]:.3f} s, {other} {seconds[other]:.3f} s"
    return Decision(taken, reason, rates, seconds, again, clock() - begin)


def resolve(
    flat: Flat[Source], destination: Path, format: str, settings: WriteSettings, *, measure: Measure | None = None
) -> tuple[WriteSettings, dict[str, Any] | None]:
    """Return the settings with ``"auto"`` replaced by what was decided, and the decision as plain values.

    Settings that ask for no decision, and those of formats that know no ``"auto"``, are returned as they are.
    """
    if settings.compression != "auto" or format not in FORMATS:
        return settings, None
    if measure is None:
        decision = decide(flat, destination, settings)
    else:
        decision = decide(flat, destination, settings, measure=measure)
    return replace(settings, compression=decision.compression), decision.as_dict()


_Key = tuple[object, ...]


def _kind(flat: Flat[Source], destination: Path, settings: WriteSettings) -> _Key | None:
    """Return what a measurement holds for: a file system, a way to write, and bytes by dtype; None if nobody knows."""
    try:
        device = nearest_folder(destination).stat().st_dev
    except OSError:
        return None
    sizes: dict[str, int] = {}
    for leaf in flat.leaves.values():
        sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.nbytes
    direct = settings.options_as(BlockFileOptions).direct_io
    stored = any(isinstance(leaf, StoredLeaf) for leaf in flat.leaves.values())
    threads = settings.threads, settings.pool.budget
    return device, direct, threads, stored, len(flat.leaves), tuple(sorted(sizes.items()))


class _Known:
    """What this process has measured: a training run saves the same state to the same place again and again."""

    _MOST = 64

    def __init__(self) -> None:
        self.forget()
        # A child that is forked while another thread holds the lock would wait for it for ever.
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._rates: dict[_Key, tuple[float, Rates]] = {}

    def get(self, key: _Key | None, now: float) -> Rates | None:
        with self._lock:
            measured, rates = self._rates.get(key, (0.0, None)) if key is not None else (0.0, None)
        return rates if rates is not None and now - measured < FRESH else None

    def put(self, key: _Key | None, rates: Rates, now: float) -> None:
        if key is None:
            return
        with self._lock:
            self._rates.pop(key, None)
            self._rates[key] = (now, rates)
            while len(self._rates) > self._MOST:
                del self._rates[next(iter(self._rates))]


_known = _Known()
