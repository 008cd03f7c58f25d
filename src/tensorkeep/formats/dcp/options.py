"""The options of the format ``dcp``."""

from tensorkeep.errors import UsageError
from tensorkeep.formats.base import FormatOptions

MAX_THREADS = 256


class DcpOptions(FormatOptions, frozen=True):
    """Options of ``tensorkeep.save(..., format="dcp")``.

    Attributes
    ----------
    thread_count : int or None
        Number of data files, each written by one thread: 1 to 256. By default as many as the save has threads.

    Raises
    ------
    UsageError
        If it is out of range.

    Examples
    --------
    >>> DcpOptions(thread_count=2).thread_count
    2
    """

    thread_count: int | None = None

    def __post_init__(self) -> None:
        if self.thread_count is not None and not 1 <= self.thread_count <= MAX_THREADS:
            raise UsageError(f"thread_count is {self.thread_count}", remedy=f"give a number from 1 to {MAX_THREADS}")
