"""The options of the format."""

from __future__ import annotations

from tensorkeep.errors import UsageError
from tensorkeep.formats.base import FormatOptions

MOST_THREADS = 256


class DcpOptions(FormatOptions, frozen=True):
    """The options of the format.

    Attributes
    ----------
    thread_count : int or None
        DCP's number of files and threads; the ``threads`` of the save by default.
    """

    thread_count: int | None = None

    def __post_init__(self) -> None:
        if self.thread_count is not None and not 1 <= self.thread_count <= MOST_THREADS:
            raise UsageError(f"thread_count is {self.thread_count}", remedy=f"give a number from 1 to {MOST_THREADS}")
