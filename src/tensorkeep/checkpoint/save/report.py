"""What a save reports: what was written, how long it took, and why it was compressed as it was."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tensorkeep.formats.base import WriteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport(WriteResult):
    """What a save wrote and what it cost.

    Attributes
    ----------
    path, format, compression : str
        As written, also where they were inferred or chosen by measuring.
    state_bytes, tensors : int
        Raw bytes of the tensors, where shared storage counts once, and how many were stored.
    stored_bytes, new_bytes : int
        Bytes on disk of all files of the checkpoint, and of those those that this save wrote; the rest is shared with
        earlier checkpoints.
    seconds, durable_seconds : float
        From the call until the checkpoint was durable and visible.
    stall_seconds : float
        How long the caller was blocked: all of it, except for `tensorkeep.save_async`.
    peak_buffer_bytes : int
        The peak of host buffer memory of this save.
    direct_io : bool
        Whether the page cache was bypassed (``O_DIRECT``); some file systems refuse that.
    auto : dict or None
        For ``compression="auto"``: the measured rates, the predictions, and the reason for the choice.
    settings_from : str or None
        The settings file, if at least one of its values was used.
    base, base_refused : str or None
        The earlier checkpoint that unchanged blocks were taken from, and why some or all of its blocks were not.
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
